"""Plans of networks that no constant of the planner was chosen by, for an H100 that is not there.

    python -m benchmarks.planner.held_out                 # all of them, an hour on two cores
    python -m benchmarks.planner.held_out "LSTM (Flax)"   # these rows; the others stay

They are of other packages, which ``pip install -e ".[held-out]"`` installs, or written as papers
describe them, where there is none. Nothing in jaxmem is chosen by these figures: what they show to
be wrong is mended where its cause is, and each cause has a test of its own. For each network: the
step as it is; each policy of `jax.checkpoint_policies` on each of its repeated blocks; and plans,
for half of the bytes of the step, and for the bytes of each policy. "off" are the compiled bytes
beside what was projected before anything was compiled: of the step, and of the first plan. FLOPs
are those of matmuls and convolutions in the compiled program, relative to the step's. "above the
least" is how far the plan is from the bound on every schedule in its budget (`Plan.bound`).
"planning" are CPU seconds of tracing the function and planning it once, beside those that the
compiler takes.
"""

import sys
import time

import jax

import jaxmem
from benchmarks._held_out import NETWORKS as OF_PACKAGES
from benchmarks._held_out_plain import NETWORKS as PLAIN
from benchmarks._record import record_parts
from benchmarks.planner.frontiers import compiled
from benchmarks.planner.planner_gpt import POLICIES

NETWORKS = {**OF_PACKAGES, **PLAIN}
# Those whose authors have regions round their blocks: what is planned has them.
WITH_REGIONS = {"Gemma-like, scan over regions (plain JAX)"}
GIB = 2**30
TARGET = "h100"
COMPILATIONS = 5  # for each plan, as is the default


def step_of(workload):
    loss, args = workload
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    return loss, args, has_aux


def as_written(loss, args, has_aux):
    """Projected bytes of the step as JAX differentiates it."""
    plan = jaxmem.plan(loss, *args, budget="100%", target=TARGET, has_aux=has_aux, compilations=0)
    return plan.plain_bytes


def rows_of(name):
    """The rows of one network: the plain step, the policies, the plans."""
    make = NETWORKS[name]
    plain = compiled(*make(), TARGET)
    written = make(POLICIES["nothing_saveable"] if name in WITH_REGIONS else None)
    loss, args, has_aux = step_of(written)
    began = time.monotonic()

    def row(step, device, flops, **more):
        found = {
            "network": name,
            "step": step,
            "GiB": f"{device / GIB:.3f}",
            "of plain": f"{device / plain.device:.1%}",
            "FLOPs": f"{flops / plain.work.flops:.3f}x",
            "off": "",
            "above the least": "",
            "planning": "",
        } | more
        print(f"{time.monotonic() - began:.0f} s", found, flush=True)
        return found

    def planned(budget, compilations=COMPILATIONS):
        options = {"target": TARGET, "has_aux": has_aux, "compilations": compilations}
        return jaxmem.plan(loss, *args, budget=budget, **options)

    def plan_row(step, budget):
        cpu = time.process_time()
        try:
            first = planned(budget, compilations=0)
        except jaxmem.BudgetError as error:
            first = None
            print(f"not projected to fit: {error}", flush=True)
        cpu = time.process_time() - cpu
        try:
            plan, said = planned(budget), step
        except jaxmem.BudgetError as error:
            plan, said = planned(error.lowest), f"{step}: none, the lowest"
        off = compiled_first(first) / first.projected_bytes - 1 if first else None
        return row(
            said,
            plan.compiled_bytes,
            plan.compiled.flops,
            off="not projected to fit" if off is None else f"{off:+.1%}",
            **{"above the least": f"{plan.bound.above:.1%}", "planning": f"{cpu:.1f} s"},
        )

    def compiled_first(plan):
        return compiled(plan.apply(loss), args, TARGET, plan.compiler_options).device

    projected = as_written(loss, args, has_aux)
    yield row("plain", plain.device, plain.work.flops, off=f"{plain.device / projected - 1:+.1%}")
    yield plan_row("jaxmem, half", plain.device // 2)
    rivals: dict[int, str] = {}  # the first policy of so many bytes
    for policy, function in POLICIES.items():
        workload = make(function)
        if workload is None:
            continue
        report = compiled(*workload, TARGET)
        rivals.setdefault(report.device, policy)
        yield row(f"`{policy}` on each block", report.device, report.work.flops)
    for device, policy in rivals.items():
        if device < 0.98 * plain.device:
            yield plan_row(f"jaxmem, as `{policy}`", device)


def main():
    title, note = "Held-out networks", " ".join(__doc__.split("\n\n")[2].split())
    record_parts(title, "network", list(NETWORKS), rows_of, note)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.setrecursionlimit(10_000)
    main()
