"""Which values are others that calls, regions, conditionals and loops hand on as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxmem.jaxprs.equations import CUSTOM_RULES, is_region
from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.nested import branches_of, called_jaxpr, loop_of

if TYPE_CHECKING:
    from jax.extend.core import Literal


def resolve_passthrough(flat: FlatJaxpr) -> list[int | Literal]:
    """What each result is: the value that it was before it was handed on, or itself. A layer that
    `jax.lax.scan` slices and stacks again, say, is what it was."""
    makers = {
        output: (step, place) for step in flat.steps for place, output in enumerate(step.outputs)
    }
    operands: dict[int, list[int | Literal | None]] = {}  # by a step's id

    def origin(value: int | Literal) -> int | Literal:
        while isinstance(value, int) and value in makers:
            step, place = makers[value]
            if id(step) not in operands:
                operands[id(step)] = _operands(step)
            operand = operands[id(step)][place]
            if operand is None:
                return value
            value = operand
        return value

    return [origin(output) for output in flat.outputs]


def _operands(step: FlatStep) -> list[int | Literal | None]:
    """The operand that each of a step's results is; None: it is another value."""
    found: list[int | None] = [None] * len(step.outputs)
    if step.primitive in ("scan", "while"):
        loop = loop_of(step.equation)
        count = loop.carry.stop - loop.carry.start
        # Operands of a while loop begin with those of its condition, which its body has not.
        before = len(step.inputs) - loop.operands
        for place, at in enumerate(_inputs(loop.body)):
            at = None if at is None else before + at
            if place < count:  # each iteration hands it on to the next one
                found[place] = at if at == loop.carry.start + place else None
            elif at is not None and at >= loop.carry.stop:  # slices, stacked in their order
                found[place] = at
    elif step.primitive == "cond":
        branches = map(_inputs, branches_of(step.equation) or ())
        for place, same in enumerate(zip(*branches, strict=True)):
            if same[0] is not None and len(set(same)) == 1:
                found[place] = 1 + same[0]
    elif is_region(step.equation) or step.primitive in CUSTOM_RULES:
        found = _inputs(called_jaxpr(step.equation))
    return [None if at is None else step.inputs[at] for at in found]


def _inputs(body: FlatJaxpr) -> list[int | None]:
    """The number of the operand that each result of a body is; None: it is another value."""
    first = len(body.consts)
    return [
        value - first if isinstance(value, int) and first <= value < body.input_count else None
        for value in resolve_passthrough(body)
    ]
