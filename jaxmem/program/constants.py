"""Values that no derivative is taken of: what is made of frozen parameters, of a batch or of
integers, or is behind a `jax.lax.stop_gradient` or a rounding. JAX keeps nothing for them."""

from collections.abc import Sequence, Set

from jaxmem.jaxprs.flat import FlatJaxpr
from jaxmem.jaxprs.nested import NestedLoop
from jaxmem.jaxprs.operands import has_derivative
from jaxmem.program.costs import derivative_reads


def constant_values(flat: FlatJaxpr, differentiated: Set[int] | None = None) -> set[int]:
    """The numbers of a program's values that do not depend, as JAX differentiates it, on its
    ``differentiated`` inputs (None: all). Of arrays that are closed over no derivative is taken; of
    a tracer one may be."""
    inputs = range(flat.input_count)
    closed_over = flat.arrays_closed_over
    tracers = {*range(len(flat.consts))} - closed_over
    wanted = ({*inputs} if differentiated is None else {*differentiated, *tracers}) - closed_over
    found = {at for at in inputs if at not in wanted or not has_derivative(flat.avals[at])}
    for step in flat.steps:
        if derivative_reads(step) == "flat" or found.issuperset(step.uses):
            found.update(step.outputs)
        else:
            found.update(at for at in step.outputs if not has_derivative(flat.avals[at]))
    return found


def constant_operands(loop: NestedLoop, constant: Sequence[bool]) -> list[bool]:
    """Which operands of a scan are constant in all of its iterations, given those that are in the
    first one: what an iteration hands on may depend on what is differentiated."""
    found = list(constant)
    body, carry = loop.body, loop.carry
    first = body.input_count - len(found)  # the body's own constants come first
    while True:
        wanted = {first + at for at, one in enumerate(found) if not one}
        constants = constant_values(body, {*range(first), *wanted})
        handed_on = body.outputs[: carry.stop - carry.start]
        now = [
            one and (not isinstance(value, int) or value in constants)
            for one, value in zip(found[carry], handed_on, strict=True)
        ]
        if now == found[carry]:
            return found
        found[carry] = now
