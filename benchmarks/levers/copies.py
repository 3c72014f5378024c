"""How long planned loops wait for residuals that they keep in host memory.

Each loss is planned with `offload=True` within a share of its plain bytes and compiled for a GPU
that is not there. "on the link" are the seconds of all copies, there and back; "waits" those that
no kernel runs beside in XLA's schedule: as XLA schedules by itself, and with
`plan.compiler_options`. Seconds are predicted from the compiled program.

    python -m benchmarks.levers.copies            # all
    python -m benchmarks.levers.copies LSTM       # some
"""

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._record import record_parts
from benchmarks.planner.planner_gpt import workload
from jaxmem.targets import family_of

WAITS = "(copies and collectives)"
TARGETS, SHARES = ("rtx-3090", "a100-40gb", "h100"), (0.8, 0.5)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def perceptrons():
    def layer(x, weights):
        hidden = jnp.sin(jnp.tanh(x @ weights[0]) @ weights[1])
        return x + (hidden @ weights[0]) @ weights[1], None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    return loss, (array(16, 2, 2048, 2048), array(8192, 2048))


def convolutions():
    def convolved(x, kernel):
        axes = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)

    def layer(x, kernels):
        return x + convolved(jax.nn.relu(convolved(x, kernels[0])), kernels[1]), None

    def loss(kernels, x):
        return jnp.mean(jax.lax.scan(layer, x, kernels)[0] ** 2)

    return loss, (array(12, 2, 3, 3, 128, 128), array(64, 56, 56, 128))


def lstm():
    def loss(weight, xs):
        def step(carry, x):
            hidden, cell = carry
            gates = jnp.concatenate([x, hidden], -1) @ weight
            i, f, g, o = jnp.split(gates, 4, -1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

        zeros = jnp.zeros((xs.shape[1], 1024))
        return jnp.sum(jax.lax.scan(step, (zeros, zeros), xs)[0][0] ** 2)

    return loss, (array(2048, 4096), array(64, 2048, 1024))


def llama():
    """Sixteen layers of width 2,048 in bfloat16, 4 x 2,048 tokens."""
    width = 2048

    def normed(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def layer(x, w):
        hidden = normed(x)
        heads = (*x.shape[:2], 16, 128)
        query, key, value = (jnp.reshape(hidden @ w["qkv"][i], heads) for i in range(3))
        seen = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + jnp.reshape(seen, x.shape) @ w["out"]
        hidden = normed(x)
        return x + (jax.nn.silu(hidden @ w["gate"]) * (hidden @ w["up"])) @ w["down"], None

    def loss(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    shapes = {
        "qkv": (3, width, width),
        "out": (width, width),
        "gate": (width, 4 * width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = {name: array(16, *shape, dtype=jnp.bfloat16) for name, shape in shapes.items()}
    return loss, (params, array(4, 2048, width, dtype=jnp.bfloat16))


LOSSES = {
    "GPT-2 medium, scan": lambda: workload("scan"),
    "perceptrons": perceptrons,
    "convolutions": convolutions,
    "LSTM": lstm,
    "Llama-like": llama,
}


def rows_of(name):
    loss, args = LOSSES[name]()
    for target in TARGETS:
        known = jaxmem.target(target)
        overlapping = family_of(known).copying_options

        def compiled(fun, options=None, timeline=False, target=target):
            step = jax.jit(jax.value_and_grad(fun))
            return jaxmem.memory(
                step, *args, target=target, compiler_options=options, timeline=timeline
            )

        plain = compiled(loss).device
        wanted = {min(int(share * plain), known.usable_bytes) for share in SHARES}
        for budget in sorted(wanted, reverse=True):
            try:
                plan = jaxmem.plan(
                    loss, *args, budget=budget, target=target, offload=True, compilations=4
                )
            except jaxmem.BudgetError:
                continue
            if not plan.predicted.host_bytes:
                continue
            options = plan.compiler_options
            by_itself = {flag: value for flag, value in options.items() if flag not in overlapping}
            planned = plan.apply(loss)
            before, after = (compiled(planned, one) for one in (by_itself, options))
            link = known.shares.link * known.host_bandwidth
            waits = [report.time.by_limit.get(WAITS, 0.0) for report in (before, after)]
            yield {
                "loss": name,
                "GPU": target,
                "of the plain bytes": f"{budget / plain:.0%}",
                "in host memory": jaxmem.format_bytes(plan.predicted.host_bytes),
                "step, ms": round(1e3 * after.time.seconds),
                "on the link, ms": round(2e3 * plan.predicted.host_bytes / link),
                "waits, XLA's schedule": round(1e3 * waits[0]),
                "waits, plan.compiler_options": round(1e3 * waits[1]),
                "device": jaxmem.format_bytes(after.device),
            }


def main():
    jax.config.update("jax_platforms", "cpu")
    title = "What loops wait for residuals in host memory"
    record_parts(title, "loss", list(LOSSES), rows_of, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
