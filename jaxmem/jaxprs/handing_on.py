"""Which values are others that calls, regions, conditionals and loops hand on as they are."""

from jax.extend.core import Literal

from jaxmem.jaxprs.equations import is_region
from jaxmem.jaxprs.flat import FlatJaxpr, Step
from jaxmem.jaxprs.nested import branches_of, called_jaxpr, loop_of

_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "pjit", "jit"})


def origin_of(flat: FlatJaxpr, value: int | Literal) -> int | Literal:
    """What a value is: the one that it was before it was handed on, or itself. A layer that
    `jax.lax.scan` slices and stacks again, say, is what it was."""
    makers = {
        output: (step, place) for step in flat.steps for place, output in enumerate(step.outputs)
    }
    while isinstance(value, int) and value in makers:
        operand = _operand(*makers[value])
        if operand is None:
            return value
        value = operand
    return value


def _operand(step: Step, place: int) -> int | Literal | None:
    """The operand that a step's result is; None: it is another value."""
    if step.primitive in ("scan", "while"):
        loop = loop_of(step.equation)
        at = _input_of(loop.body, place)
        count = loop.carry.stop - loop.carry.start
        # Operands of a while loop begin with those of its condition, which its body has not.
        before = len(step.inputs) - loop.operands
        if place < count:  # each iteration hands it on to the next one
            own = loop.carry.start - before + place
            return step.inputs[before + own] if at == own else None
        # Slices, stacked in their order.
        return step.inputs[at] if at is not None and at >= loop.carry.stop else None
    if step.primitive == "cond":
        found = {_input_of(branch, place) for branch in branches_of(step.equation) or ()}
        at = found.pop() if len(found) == 1 else None
        return None if at is None else step.inputs[1 + at]
    if is_region(step.equation) or step.primitive in _CALLS:
        at = _input_of(called_jaxpr(step.equation), place)
        return None if at is None else step.inputs[at]
    return None


def _input_of(body: FlatJaxpr, place: int) -> int | None:
    """The number of the operand that a body returns there; None: it returns another value."""
    value = origin_of(body, body.outputs[place])
    first = len(body.consts)
    if isinstance(value, int) and first <= value < body.input_count:
        return value - first
    return None
