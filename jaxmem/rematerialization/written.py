"""What a function costs as it is written, with the regions that its author has placed."""

from collections.abc import Iterator

from jaxmem import jaxprs
from jaxmem.planning import Rates, Variant, simulate_block
from jaxmem.program import Program
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.plan import Written
from jaxmem.rematerialization.traced import TracedFunction


def written(traced: TracedFunction, constraints: Constraints) -> Written | None:
    """The cost of a traced function with its own regions; None: it has none."""
    if not traced.program.opened:
        return None
    flat = jaxprs.flatten_jaxpr(traced.closed, traced.out_tree)
    program = traced.read(flat)
    again = list(_again(flat, program, constraints.rates))
    budget, program = constraints.budget_for(program), constraints.as_run(program)
    return Written(
        budget.total(Variant.plain(program, constraints.rates).layout(()).peak),
        sum(flops for flops, _ in again),
        sum(seconds for _, seconds in again),
        constraints.rates.forward(constraints.as_run(traced.program)),
    )


def _again(flat: jaxprs.FlatJaxpr, program: Program, rates: Rates) -> Iterator[tuple[int, float]]:
    """FLOPs and seconds of what each region runs again in the backward pass."""
    for step, operation in zip(flat.steps, program.operations, strict=True):
        body = operation.body
        if body is None:
            continue
        if not operation.is_region:
            for flops, seconds in _again(jaxprs.loop_of(step.equation).body, body, rates):
                yield operation.length * flops, operation.length * seconds
            continue
        called = jaxprs.called_jaxpr(step.equation)
        runs = simulate_block(body, 0, len(body.kernels), _saved(step, called)).runs
        kernels = [(body.kernels[number], times) for number, times in runs.items()]
        yield (
            sum(kernel.flops * times for kernel, times in kernels),
            sum(rates.seconds(kernel) * times for kernel, times in kernels),
        )


def _saved(step: jaxprs.Step, called: jaxprs.FlatJaxpr) -> set[int]:
    """The values of a region that its policy saves, or sends to host memory."""
    saved: set[int] = set()
    for inner in called.steps:
        if jaxprs.policy_saves(step.equation, inner.equation):
            saved.update(inner.outputs)
            if inner.primitive == "name":  # what is named is as good as saved
                saved.update(inner.uses)
    return saved
