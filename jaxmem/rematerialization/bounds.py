"""How near a plan is to the least that any schedule of its function recomputes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.budget import Budget
from jaxmem.ground.bytes import format_bytes
from jaxmem.planning.bound import least_recomputed
from jaxmem.program import Graph, read_graph
from jaxmem.rematerialization.traced import TracedFunction


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What every schedule of a function's operations and of their derivatives has to do, in so many
    bytes: no plan, and no other way to choose what is kept, recomputes less.

    Attributes:
        bytes: all of them, with what is reserved. Schedules may have as much more as the memories
            of the chip hold, on targets that have such.
        flops: the least of ``value_and_grad(fun)``: each matmul and convolution once, and
            ``recompute_flops`` more.
        recompute_flops: the least that is recomputed.
        above: what the plan does more than that, of ``flops``.
    """

    bytes: int
    flops: int
    recompute_flops: int
    above: float

    def __str__(self) -> str:
        return (
            f"at most {self.above:.1%} above the least FLOPs that any schedule within "
            f"{format_bytes(self.bytes)} needs"
        )


def bound_of(plan: Any) -> Bound | None:
    """The bound of a plan that has its function."""
    if plan._call is None or plan.predicted.host_bytes:
        return None
    fun, args, kwargs, how = plan._call
    traced = TracedFunction(fun, args, kwargs, how["argnums"], how["has_aux"], target=how["target"])
    if traced.shards(traced.flat).mesh is not None:
        return None
    graph = graph_of(traced)
    allowed = plan.budget or plan.compiled_bytes or plan.projected_bytes
    room = Budget(allowed, plan.reserved + traced.program.input_bytes).available
    assert room is not None
    # What waits in the memories of the chip is there, and not in the budget.
    if plan.planned_for.family:
        room += plan.planned_for.compiler.chip_bytes
    least, again = least_recomputed(graph, room), plan.predicted.recompute_flops
    # Of compiled programs XLA's own count: it may find something to leave out.
    compiled = plan.compiled and plan.compiled.flops
    once = max(compiled - again, 1) if compiled else graph.flops
    above = max((once + again) / max(once + least, 1) - 1, 0.0)
    return Bound(allowed, once + least, least, above)


def graph_of(traced: TracedFunction) -> Graph:
    """The step of a function, value and gradients, with the user's own regions written in place.
    What returns no scalar is differentiated as the sum of all that it returns."""
    flat = traced.flat

    def summed(*leaves):
        values = dict(enumerate([*flat.consts, *leaves]))
        flat.run(flat.steps, values)
        found = [jaxprs.read(values, output) for output in flat.outputs]
        results = traced.value(jax.tree.unflatten(flat.out_tree, found))
        of_loss = jax.tree.leaves(results[0] if traced.has_aux else results)
        real = [leaf.sum() for leaf in of_loss if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum(real).real, results

    step = jax.value_and_grad(summed, traced.differentiable, has_aux=True)
    return read_graph(jaxprs.flatten_jaxpr(jax.make_jaxpr(step)(*traced.leaves)))
