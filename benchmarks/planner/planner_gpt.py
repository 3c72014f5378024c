"""GPT-2 medium against the policies that people put on every layer, compiled for an H200.

24 layers of width 1024, batch 8 x 1024, bf16 compute, fp32 parameters; value and gradient of the
loss, as a Python loop over the layers and as a `lax.scan`. For each policy on every layer, the dp
planner gets the bytes that it compiles to (rounded up to a thousandth of a GiB) as its budget, and
ten compilations (five are the default); then twice and three times the lowest budget that it finds
a plan for. Where a policy makes no matmul again, so does the planner "dots"; dp may, if that takes
less predicted time. FLOPs are relative to no remat.
"""

import math
import sys

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._gpt import GPT
from benchmarks._record import record
from jaxmem.targets.cuda.family import Cuda

GIB = 2**30
OPTIONS = dict(Cuda.compiler_options)  # as in Plan.compiler_options
POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
}


def workload(form: str, policy=None):
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


def planned(form, what: str, budget: float, usual: str, flops: int, planner="dp") -> dict:
    """A row: what a planner makes of a budget in GiB."""
    loss, args = workload(form)
    row = {"form": form, "budget": what, "GiB": f"{budget:.3f}", "policy's FLOPs": usual}
    row["planner"] = planner
    options = {"planner": planner, "target": "h200", "compilations": 10}
    try:
        plan = jaxmem.plan(loss, *args, budget=math.ceil(budget * GIB), **options)
    except jaxmem.BudgetError as error:
        none = f"none below {error.lowest / GIB:.3f} GiB"
        return row | {"projected": "", "compiled": none, "FLOPs": "", "predicted extra time": ""}
    return row | {
        "projected": f"{plan.projected_bytes / GIB:.3f} GiB",
        "compiled": f"{plan.compiled_bytes / GIB:.3f} GiB",
        "FLOPs": f"{plan.compiled.flops / flops:.3f}x",
        "predicted extra time": f"{plan.predicted.recompute_share:.1%}",
    }


def main():
    rows = []
    for form in sys.argv[1:] or ("scan", "unrolled"):
        loss, args = workload(form)
        flops = report(loss, args).work.flops
        for name, policy in POLICIES.items():
            usual = report(*workload(form, policy))
            budget = math.ceil(usual.device / GIB * 1000) / 1000
            share = f"{usual.work.flops / flops:.3f}x"
            rows.append(planned(form, name, budget, share, flops))
            print(rows[-1], flush=True)
        if form == "unrolled":  # a scan stays as it is under "dots"
            rows.append(planned(form, name, budget, share, flops, "dots"))
            print(rows[-1], flush=True)
        lowest = 0.0
        try:
            jaxmem.plan(loss, *args, budget="1MiB", target="h200")
        except jaxmem.BudgetError as error:
            lowest = error.lowest / GIB
        for times in (1, 2, 3):
            rows.append(planned(form, f"{times} x the lowest", times * lowest, "", flops))
            print(rows[-1], flush=True)
    record("GPT-2 medium against policies on every layer", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
