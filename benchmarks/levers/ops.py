"""A loss of a large vocabulary and attention: plain JAX, a plan on it, and the operation.

Compiled for an H200: value and gradients, bf16. Cross-entropy of 8 x 1024 tokens, width 4096,
vocabulary 128,256; attention of 1 x 16 heads of width 64. The plan is the least projected bytes of
the dp planner. FLOPs are those of matmuls, relative to plain JAX. `swap` is `jaxmem.ops.swap` on
the plain function.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks._record import record

GIB = 2**30
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def plain_loss(hidden, weights, labels):
    logits = (hidden @ weights).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def ops_loss(hidden, weights, labels):
    return jaxmem.ops.softmax_cross_entropy(hidden, weights, labels).mean()


def attention(fun, **options):
    def loss(query, key, value):
        return jnp.square(fun(query, key, value, **options).astype(jnp.float32)).mean()

    return loss


def compiled(loss, args, wanted):
    step = jax.jit(jax.value_and_grad(loss, wanted))
    return jaxmem.memory(step, *args, target="h200", compiler_options=OPTIONS)


def compare(what, plain, ours, args, wanted):
    forms = {"plain": plain, "operation": ours, "swap": jaxmem.ops.swap(plain)}
    least = jaxmem.pareto(plain, *args, target="h200", argnums=wanted, points=8).plans[-1]
    forms["plan"] = least.apply(plain)
    reports = {name: compiled(loss, args, wanted) for name, loss in forms.items()}
    row = {"what": what}
    for name in ("plain", "plan", "swap", "operation"):
        report = reports[name]
        row[name] = f"{report.device / GIB:.3f} GiB"
        if name != "plain":
            row[f"{name}: FLOPs"] = f"{report.work.flops / reports['plain'].work.flops:.3f}x"
    print(row, flush=True)
    return row


def main():
    args = half(8192, 4096), half(4096, 128256), jax.ShapeDtypeStruct((8192,), jnp.int32)
    rows = [compare("cross-entropy", plain_loss, ops_loss, args, (0, 1))]
    every = 0, 1, 2
    for is_causal in False, True:
        name = "causal attention" if is_causal else "attention"
        usual = attention(jax.nn.dot_product_attention, is_causal=is_causal)
        ours = attention(jaxmem.ops.attention, is_causal=is_causal)
        for length in (4096, 16384):
            args = (half(1, length, 16, 64),) * 3
            rows.append(compare(f"{name}, {length} tokens", usual, ours, args, every))
        sizes = [compiled(ours, (half(1, length, 16, 64),) * 3, every).device for length in LENGTHS]
        # bytes = a + b length + c length^2, by least squares: c tells whether it is linear
        fit = np.polynomial.Polynomial.fit(LENGTHS, sizes, 2).convert().coef
        share = fit[2] * LENGTHS[-1] ** 2 / sizes[-1]
        per_token = (sizes[-1] - sizes[0]) / (LENGTHS[-1] - LENGTHS[0]) / 2**10
        note = f"{name}: {per_token:.1f} KiB a token from 1k to 16k, quadratic share {share:.1%}"
        print(note, flush=True)
        rows[-1]["fit"] = note.partition(": ")[2]
    for row in rows:
        row.setdefault("fit", "")
    record("Operations against plain JAX and a plan on it", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
