"""ResNet50 (fp32, 224x224, SGD with momentum) on an 11 GB RTX 2080 Ti: the largest batches.

    python -m benchmarks.memory.largest_batch                 # all of them, an hour on two cores
    python -m benchmarks.memory.largest_batch '`jaxmem.fit`'  # this row; the others stay

MegEngine's demonstration carried on. Every batch is a multiple of 8, found by `max_batch_size`: it
was compiled and fits, and so was the next one in the table, which does not.
"""

import functools

import flax.linen as nn
import jax

import jaxmem
from benchmarks._models import example
from benchmarks._record import record_parts

Block = example("resnet50").Block
plan_step = example("resnet50", "train").plan_step

TARGET = "rtx-2080-ti"
NO_PASS = {"xla_disable_hlo_passes": "rematerialization"}
# bfloat16 is widened to float32 on this GPU: a plan has to know it. Options as in
# `Plan.compiler_options`.
ON_TARGET = functools.partial(jaxmem.remat, target=TARGET)
ROUNDED = NO_PASS | {"xla_allow_excess_precision": False}
AT_200, FIT, DP = "dp within the GPU, batch 200", "`jaxmem.fit`", '`jaxmem.remat(planner="dp")`'
LIKELY = 648  # where the search of fit begins: dp's largest
CASES: list[tuple[str, dict]] = [
    ("plain JAX, XLA's own pass off", {"compiler_options": NO_PASS}),
    ("plain JAX, XLA's own pass on (the default)", {}),
    ("`nn.remat` on every block", {"block": nn.remat(Block, static_argnums=(2,))}),
    ('`jaxmem.remat(planner="sqrt")`', {"remat": "sqrt", "compiler_options": NO_PASS}),
    (DP, {"remat": "dp", "compiler_options": NO_PASS}),
    ("dp, bf16", {"remat": ON_TARGET, "precision": "bf16", "compiler_options": ROUNDED}),
    ("dp, fp16", {"remat": "dp", "precision": "fp16", "compiler_options": NO_PASS}),
]


@functools.cache
def flops_of_an_image() -> float:
    step, args = plan_step(8, compiler_options=NO_PASS)
    return jaxmem.memory(step, *args, target=TARGET, timeline=False).work.flops / 8


def row(name: str, batch: int, too_large: int | None, report: jaxmem.MemoryReport) -> dict:
    return {
        "step": name,
        "largest batch": batch,
        "does not fit": too_large or "",
        "compiled": jaxmem.format_bytes(report.device),
        "FLOPs an image": f"{report.work.flops / batch / flops_of_an_image():.2f}x",
    }


def largest(name: str, changes: dict) -> dict:
    step, _ = plan_step(8, **changes)

    def make_args(batch):
        return plan_step(batch, **changes)[1]

    found = jaxmem.max_batch_size(step, make_args, target=TARGET)
    print(found, flush=True)
    return row(name, found.size, found.too_large, found.report)


def at_200() -> dict:
    """MegEngine's own batch, under dp told to use the GPU's bytes."""
    step, (state, batch) = plan_step(200)
    momentum = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))

    def loss(params, batch, model_state):
        value, *others = step.loss(params, batch, model_state)
        return value, others

    plan = jaxmem.plan(
        loss,
        *(state.params, batch, state.model_state),
        budget="100%",
        reserved=momentum,
        target=TARGET,
        has_aux=True,
    )
    step, args = plan_step(200, remat=plan.apply, compiler_options=NO_PASS)
    return row(AT_200, 200, None, jaxmem.memory(step, *args, target=TARGET))


def fitted(size: int) -> dict:
    """`jaxmem.fit` on batches that are a twentieth larger or smaller than one another, from
    ``size`` on: the largest for which it finds a step."""
    found, too_large = None, 0
    while not (found and too_large):
        step, (state, batch) = plan_step(size)
        try:
            step = jaxmem.fit(
                step.settings.loss_fn,
                step.settings.optimizer,
                state.params,
                batch,
                model_state=state.model_state,
                target=TARGET,
            )
            found, size = (size, step.fitting), -(-size * 21 // 160) * 8
        except jaxmem.BudgetError:
            too_large, size = size, size * 20 // 168 * 8
    print(found[1].chosen.levers, found[1].chosen.remat, flush=True)
    return row(FIT, found[0], too_large, found[1].report)


def main():
    budget = jaxmem.format_bytes(jaxmem.target(TARGET).usable_bytes)
    title = "ResNet50 on an 11 GB RTX 2080 Ti: the largest batch"
    note = (
        f"Budget {budget}, the GPU's memory less its CUDA context. FLOPs are those of matmuls and "
        "convolutions in the optimised program, per image, beside plain JAX's at batch 8."
    )
    names = [AT_200, *dict(CASES), FIT]

    def rows_of(name):
        if name == AT_200:
            yield at_200()
        else:
            yield fitted(LIKELY) if name == FIT else largest(name, dict(CASES)[name])

    record_parts(title, "step", names, rows_of, note)


if __name__ == "__main__":
    main()
