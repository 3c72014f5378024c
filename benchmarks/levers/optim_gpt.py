"""A GPT of 1.4 billion parameters under a dp plan: AdamW plain, offloaded and small.

Every step is planned for its parameters, their gradients and 3 GiB, and compiled with XLA's own
rematerialization pass off. FLOPs are those of the loss and its gradient by the plan's own
arithmetic, beside those without a plan.
"""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._gpt import GPT
from benchmarks._record import record
from benchmarks.levers.optim import compile_step, row
from jaxmem.optim import half_params, small_moments

CONTEXT, BATCH = 1024, 4
ACTIVATIONS = 3 * 2**30


def transformer():
    gpt = GPT(width=2048, depth=24, heads=16, context=CONTEXT)
    half = jaxmem.precision("bf16")

    def loss_fn(params, tokens):
        params = half.cast_to_compute(params)
        x = gpt.embed(params["embed"], tokens[:, :-1])
        for layer in params["blocks"]:
            x = gpt.block(layer, x)
        return gpt.loss(params["head"], (x, tokens[:, 1:]))

    def init(key, dtype):
        blocks = [gpt.layer(key)] * gpt.depth
        params = {"embed": gpt.embedding(key), "blocks": blocks, "head": gpt.head(key)}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    adamw = optax.adamw(1e-4)
    all_small = small_moments(adamw, keep=lambda path, leaf: leaf.size < 4096)
    cases = {
        "optax.adamw": (adamw, jnp.float32),
        "jaxmem.offload(adamw)": (jaxmem.offload(adamw), jnp.float32),
        "small_moments, 8bit": (all_small, jnp.float32),
        "half_params(8bit), stochastic": (half_params(all_small), jnp.bfloat16),
        "offload(half_params(8bit))": (jaxmem.offload(half_params(all_small)), jnp.bfloat16),
    }
    for name, (optimizer, dtype) in cases.items():
        params = jax.eval_shape(lambda key, dtype=dtype: init(key, dtype), jax.random.key(0))
        batch = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32)
        budget = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
        plan = jaxmem.plan(loss_fn, params, batch, budget=budget + ACTIVATIONS)
        report = compile_step(plan.apply(loss_fn), optimizer, params, batch)
        flops = 1 + plan.predicted.recompute_flops / (3 * plan.predicted.flops)
        found = row(name, report, report.argument / gpt.parameters())
        found["FLOPs"] = f"{flops:.3f}x"
        print(found, flush=True)
        yield found


def main():
    record(
        f"A GPT of 1.42 billion parameters, batch {BATCH} x {CONTEXT}, bfloat16 compute: compiled "
        "bytes of whole steps on an H200",
        list(transformer()),
        __doc__.split("\n\n")[1],
    )


if __name__ == "__main__":
    main()
