"""How far plans are from the least that any schedule recomputes.

    python -m benchmarks.planner.bound          # all networks, 5 minutes on two cores
    python -m benchmarks.planner.bound U-Net    # these rows; the others stay

Projected: nothing is compiled. For each network and some shares of its plain bytes: FLOPs of
matmuls and convolutions that dp's plan recomputes, those that every schedule within as many bytes
recomputes at least (`Plan.bound`), and how far the step with the plan is above the least step, all
in shares of the plain step. "looked at twice" is the same with twice as many moments in the bound;
"seconds" are those of CPU that the bound takes.
"""

import time

import jax

import jaxmem
from benchmarks._record import record_parts
from benchmarks.planner.frontiers import NETWORKS
from benchmarks.planner.planner_gpt import workload as gpt2_medium
from jaxmem.planning import bound
from jaxmem.rematerialization.bounds import graph_of
from jaxmem.rematerialization.traced import TracedFunction

PROBLEMS = {**NETWORKS, "GPT-2 medium, scan": lambda: gpt2_medium("scan")}
SHARES = (0.75, 0.5, 0.35)


def rows_of(name):
    loss, args = PROBLEMS[name]()
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    options = {"target": "h200", "has_aux": has_aux, "compilations": 0}
    plain = jaxmem.plan(loss, *args, **options).plain_bytes
    traced = TracedFunction(loss, args, {}, 0, has_aux)
    graph = graph_of(traced)
    for share in SHARES:
        budget = int(share * plain)
        try:
            plan = jaxmem.plan(loss, *args, budget=budget, **options)
        except jaxmem.BudgetError as error:
            plan = jaxmem.plan(loss, *args, budget=error.lowest, **options)
        began = time.process_time()
        found = plan.bound
        seconds = time.process_time() - began
        twice = looked_at_twice(graph, plan.budget - traced.program.input_bytes)
        row = {
            "network": name,
            "of plain": f"{plan.budget / plain:.1%}",
            "recomputed": f"{plan.predicted.recompute_flops / graph.flops:.2%}",
            "at least": f"{found.recompute_flops / graph.flops:.2%}",
            "above the least": f"{found.above:.2%}",
            "at least, looked at twice": f"{twice / graph.flops:.2%}",
            "seconds": f"{seconds:.1f}",
        }
        print(row, flush=True)
        yield row


def looked_at_twice(graph, room):
    looks, moments = bound._CANDIDATE_CUTS, bound._SOLVED_CUTS
    bound._CANDIDATE_CUTS, bound._SOLVED_CUTS = 2 * looks, 2 * moments
    try:
        return bound.least_recomputed(graph, room)
    finally:
        bound._CANDIDATE_CUTS, bound._SOLVED_CUTS = looks, moments


def main():
    title, note = (
        "Plans above the least of any schedule",
        " ".join(__doc__.split("\n\n")[2].split()),
    )
    record_parts(title, "network", list(PROBLEMS), rows_of, note)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
