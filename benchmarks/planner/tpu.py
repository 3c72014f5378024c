"""Plans for TPUs that are not there, at half of the plain bytes.

    python -m benchmarks.planner.tpu              # all networks, 20 minutes on two cores
    python -m benchmarks.planner.tpu tanh U-Net   # these rows; the others stay

Value and gradient of the loss, with XLA's own rematerialization pass off and its scheduler limited
to the budget. "off" is what is compiled beside what was projected before anything was: of the
plain network, and of dp's first plan for half of its bytes. Then `jaxmem.plan` for that budget,
with five compilations at most; FLOPs are those of matmuls and convolutions in the optimised HLO,
relative to the plain network's.
"""

import jax

import jaxmem
from benchmarks._record import record_parts
from benchmarks.planner.frontiers import compiled
from benchmarks.planner.planner import workload as resnet50
from benchmarks.planner.planner_gpt import workload as gpt2_medium
from benchmarks.planner.planner_models import CASES as MODELS
from benchmarks.planner.projected import tanh
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets.tpu.family import Tpu

CASES = {
    "tanh": tanh,
    "ResNet50": lambda: resnet50(100),
    "GPT-2 medium, scan": lambda: gpt2_medium("scan"),
    "GPT-2 medium, unrolled": lambda: gpt2_medium("unrolled"),
    **MODELS,
}
TARGETS = ("v5e", "v6e")
GIB = 2**30


def first_plan(loss, args, has_aux, target, budget):
    """Projected and compiled bytes of the network, and of dp's plan for a budget, by itself."""
    constraints = Constraints.parse(budget, 0, target, "dp")
    program = TracedFunction(loss, args, {}, 0, has_aux).program
    planner = constraints.planner(program)
    plain = constraints.budget_for(program).total(planner.plain.peak)
    layout = (
        planner.cheapest_for(constraints.budget_for(program).available)
        or planner.cheapest_near_minimum()
    )
    plan = constraints.write(program, layout, constraints.plain_layout(program))
    device = jaxmem.memory(
        jax.value_and_grad(plan.apply(loss), has_aux=has_aux),
        *args,
        target=target,
        compiler_options=plan.compiler_options,
        timeline=False,
    ).device
    return plain, plan.projected_bytes, device


def row(name, target) -> dict:
    loss, args = CASES[name]()
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    plain = compiled(loss, args, target, Tpu().planned_options())
    budget = min(plain.device // 2, jaxmem.target(target).usable_bytes)
    projected_plain, projected, device = first_plan(loss, args, has_aux, target, budget)
    found = {
        "network": name,
        "target": target,
        "plain": f"{plain.device / GIB:.2f} GiB",
        "plain off": f"{plain.device / projected_plain - 1:+.1%}",
        "budget": f"{budget / GIB:.2f} GiB",
        "first plan off": f"{device / projected - 1:+.1%}",
    }
    try:
        plan = jaxmem.plan(loss, *args, budget=budget, target=target, has_aux=has_aux)
    except jaxmem.BudgetError as error:
        return found | {
            "compiled": f"none; at least {error.lowest / GIB:.2f} GiB",
            "FLOPs": "",
            "predicted extra time": "",
        }
    return found | {
        "compiled": f"{plan.compiled_bytes / GIB:.2f} GiB",
        "FLOPs": f"{plan.compiled.flops / plain.work.flops:.3f}x",
        "predicted extra time": f"{plan.predicted.recompute_share:.1%}",
    }


def rows_of(name):
    for target in TARGETS:
        found = row(name, target)
        print(found, flush=True)
        yield found


def main():
    title, note = "Plans for TPUs that are not there", __doc__.split("\n\n")[2]
    record_parts(title, "network", list(CASES), rows_of, note)


if __name__ == "__main__":
    main()
