"""GPT-2 medium against the policies that people put on every layer, compiled for an H200.

24 layers of width 1024, batch 8 x 1024, bf16 compute, fp32 parameters; value and gradient of the
loss, as a Python loop over the layers and as a `lax.scan`. For each policy on every layer, the dp
planner gets the bytes that it compiles to as its budget. FLOPs are relative to no remat.
"""

import sys

import jax
import jax.numpy as jnp
from _gpt import GPT
from _record import record

import jaxmem

GIB = 2**30
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options
POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
}


def problem(form: str, policy=None):
    """The loss as a function of (parameters, tokens and labels), and abstract arguments."""
    gpt = GPT(width=1024, depth=24, heads=16, context=1024)

    def half(params):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def block(params, x):
        return gpt.block(half(params), x)

    if policy:
        block = jax.checkpoint(block, policy=policy)

    def loss(params, batch):
        embedding, layers, head = params
        tokens, labels = batch
        x = gpt.embed(embedding, tokens).astype(jnp.bfloat16)
        if form == "scan":
            x, _ = jax.lax.scan(lambda x, params: (block(params, x), None), x, layers)
        else:
            for layer in layers:
                x = block(layer, x)
        return gpt.loss(half(head), (x, labels))

    def init(key):
        if form == "scan":
            layers = jax.vmap(gpt.layer)(jax.random.split(key, gpt.depth))
        else:
            layers = [gpt.layer(key) for _ in range(gpt.depth)]
        return gpt.embedding(key), layers, gpt.head(key)

    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    return loss, (jax.eval_shape(init, jax.random.key(0)), (tokens, tokens))


def report(loss, args):
    step = jax.jit(jax.value_and_grad(loss))
    return jaxmem.memory(step, *args, target="h200", compiler_options=OPTIONS, timeline=False)


def main():
    rows = []
    for form in sys.argv[1:] or ("scan", "unrolled"):
        loss, args = problem(form)
        flops = report(loss, args).work.flops
        for name, policy in POLICIES.items():
            usual = report(*problem(form, policy))
            row = {
                "form": form,
                "policy": name,
                "its bytes": f"{usual.device / GIB:.3f} GiB",
                "its FLOPs": f"{usual.work.flops / flops:.3f}x",
            }
            try:
                plan = jaxmem.plan(loss, *args, budget=usual.device, target="h200")
            except jaxmem.BudgetError as error:
                plan = jaxmem.plan(loss, *args, budget=error.lowest, target="h200")
            rows.append(
                row
                | {
                    "projected": f"{plan.projected_bytes / GIB:.3f} GiB",
                    "dp's bytes": f"{plan.compiled_bytes / GIB:.3f} GiB",
                    "dp's FLOPs": f"{plan.compiled_flops / flops:.3f}x",
                }
            )
            print(rows[-1], flush=True)
    record("GPT-2 medium against policies on every layer", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
