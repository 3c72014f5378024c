"""Projected bytes against compiled ones, over the cases that the other benchmarks plan.

    python -m benchmarks.planner.projected                # all of them, an hour on two cores
    python -m benchmarks.planner.projected ViT-B/16 tanh  # these rows; the others stay

For every budget dp's first plan is compiled for an H200: "off" is its compiled bytes beside the
projected ones. Then the budget is divided by that ratio, and the plan for it compiled: "corrected"
is its bytes beside the projected ones, times the ratio where both plans peak at the same kernel in
the same region, as in `jaxmem.plan` ("=" where it is the same plan, which is off by nothing then,
and "none" where nothing is projected to fit any more). Budgets are those of planner.py,
planner_gpt.py and planner_models.py; tanh is 64 layers of tanh(x @ w), 64 MiB each.
"""

import jax
import jax.numpy as jnp

from benchmarks._record import record_parts
from benchmarks.planner.frontiers import TARGET, compiled
from benchmarks.planner.planner import BUDGETS, GIB, workload as resnet50
from benchmarks.planner.planner_gpt import workload as gpt2_medium
from benchmarks.planner.planner_models import CASES as MODELS
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.traced import TracedFunction

SCAN = (5.720, 8.704, 9.659, 14.489, 21.079)
UNROLLED = (5.345, 8.329, 9.370, 14.055, 20.329)


def tanh():
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 64
    return loss, (weights, jax.ShapeDtypeStruct((16384, 1024), jnp.float32))


def half(name):
    """A network at half of its plain peak."""
    loss, args = MODELS[name]()
    return loss, args, (compiled(loss, args).device / 2 / GIB,)


AROUND = (2 * 64 * 4 + 64) / 1024  # GiB of tanh's parameters, gradients and input
CASES = {
    "ResNet50": lambda: (*resnet50(200), BUDGETS),
    "GPT-2 medium, scan": lambda: (*gpt2_medium("scan"), SCAN),
    "GPT-2 medium, unrolled": lambda: (*gpt2_medium("unrolled"), UNROLLED),
    "tanh": lambda: (*tanh(), (AROUND + 520 / 1024, AROUND + 1088 / 1024)),
    **{name: lambda name=name: half(name) for name in MODELS},
}


def rows_of(name):
    loss, args, budgets = CASES[name]()
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    allowed = Constraints.parse(None, 0, TARGET, "dp")
    program = TracedFunction(loss, args, {}, 0, has_aux).program
    boundary, plain = program.boundary_bytes, allowed.plain_layout(program)
    for budget in budgets:
        planner = allowed.planner(program)

        def planned(goal: float, planner=planner):
            """The place where the plan for so many GiB peaks, its projected and compiled bytes;
            None: nothing is projected to fit."""
            layout = planner.cheapest_for(int(goal * GIB) - boundary)
            if layout is None:
                return None
            plan = allowed.write(program, layout, plain)
            return (
                layout.peak_location,
                layout.peak + boundary,
                compiled(plan.apply(loss), args).device,
            )

        row = {"case": name, "budget": f"{budget:.3f} GiB", "projected": "none", "compiled": ""}
        row |= {"off": "", "corrected": ""}
        if first := planned(budget):
            place, projected, device = first
            ratio = device / projected
            row |= {"projected": f"{projected / GIB:.3f} GiB", "off": f"{ratio - 1:+.1%}"}
            row |= {"compiled": f"{device / GIB:.3f} GiB", "corrected": "none"}
            if second := planned(budget / ratio):
                expected = second[1] * (ratio if second[0] == place else 1)
                off = second[2] / expected - 1
                row["corrected"] = "=" if second == first else f"{off:+.1%}"
        print(row, flush=True)
        yield row


def main():
    title, note = "Projected bytes against compiled ones", __doc__.split("\n\n")[2]
    record_parts(title, "case", list(CASES), rows_of, note)


if __name__ == "__main__":
    main()
