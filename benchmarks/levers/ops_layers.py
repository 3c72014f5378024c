"""Twelve layers of activation, norm or dropout and a matmul: what is kept of each, for an H200.

Device bytes of value and gradient less parameters, input and gradients, in activations (8192 x
4096, bf16) a layer, and the FLOPs of matmuls relative to plain JAX. The plan is the least of the dp
planner without a matmul done twice, or that of planner "dots". The operation is the layer as one
rule that keeps what the matmul before it made (`jax.checkpoint(lambda x, w: act(x) @ w)`); packed
masks are a `custom_vjp` that keeps one bit an element.
"""

import functools

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._record import record

LAYERS, ROWS, WIDTH = 12, 8192, 4096
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


def layer_norm(x):
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rms_norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


@jax.custom_vjp
def packed_relu(x):
    return jax.nn.relu(x)


packed_relu.defvjp(
    lambda x: (jax.nn.relu(x), jnp.packbits(x > 0, -1)),
    lambda kept, given: (jnp.where(jnp.unpackbits(kept, -1), given, 0).astype(given.dtype),),
)


def mask_of(x, number):
    return jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), number), 0.9, x.shape)


def dropout(x, number):
    return jnp.where(mask_of(x, number), x / 0.9, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def packed_dropout(x, number):
    return dropout(x, number)


def _forward(x, number):
    mask = mask_of(x, number)
    return jnp.where(mask, x / 0.9, 0), jnp.packbits(mask, -1)


packed_dropout.defvjp(
    _forward,
    lambda _, kept, given: (
        jnp.where(jnp.unpackbits(kept, -1), given / 0.9, 0).astype(given.dtype),
    ),
)

PLAIN = {
    "swish": lambda x, _: jax.nn.swish(x),
    "gelu, tanh": lambda x, _: jax.nn.gelu(x),
    "gelu, erf": lambda x, _: jax.nn.gelu(x, approximate=False),
    "mish": lambda x, _: mish(x),
    "elu": lambda x, _: jax.nn.elu(x),
    "relu": lambda x, _: jax.nn.relu(x),
    "layer norm": lambda x, _: layer_norm(x),
    "rms norm": lambda x, _: rms_norm(x),
    "relu, dropout": lambda x, number: dropout(jax.nn.relu(x), number),
}
PACKED = {
    "relu": lambda x, _: packed_relu(x),
    "relu, dropout": lambda x, number: packed_dropout(packed_relu(x), number),
}


def network(layer):
    def loss(weights, x):
        x = x @ weights[0]
        for number, w in enumerate(weights[1:]):
            x = layer(number)(x, w)
        return jnp.square(x.astype(jnp.float32)).mean()

    return loss


def unfused(act):
    return lambda number: lambda x, w: act(x, number) @ w


def fused(act):
    return lambda number: jax.checkpoint(unfused(act)(number))


def main():
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * (LAYERS + 1)
    args = weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    one = ROWS * WIDTH * 2
    fixed_bytes = 2 * len(weights) * WIDTH**2 * 2 + one

    def compiled(loss):
        step = jax.jit(jax.value_and_grad(loss))
        return jaxmem.memory(step, *args, target="h200", compiler_options=OPTIONS)

    rows = []
    for name, act in PLAIN.items():
        loss = network(unfused(act))
        plain = compiled(loss)
        found = jaxmem.pareto(loss, *args, target="h200", points=30).plans
        once = [plan for plan in found if not plan.predicted.recompute_flops][-1]
        plans = once, jaxmem.plan(loss, *args, planner="dots")
        planned = [compiled(plan.apply(loss)) for plan in plans]
        reports = {"plain": plain, "plan": min(planned, key=lambda report: report.device)}
        reports["operation"] = compiled(network(fused(act)))
        if name in PACKED:
            reports["packed masks"] = compiled(network(unfused(PACKED[name])))
        row = {"layer": f"{name}, matmul"}
        for form in ("plain", "plan", "operation", "packed masks"):
            if form not in reports:
                row[form] = ""
                continue
            report = reports[form]
            assert report.work.flops == plain.work.flops, (name, form)
            row[form] = f"{(report.device - fixed_bytes) / one / LAYERS:.2f}"
        rows.append(row | {"FLOPs": "1.000x"})
        print(rows[-1], flush=True)
    record("Twelve layers: activations kept a layer", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
