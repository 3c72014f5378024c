"""Which carries of a loop are sums.

A carry is a sum where each round only adds to it or scales it, as totals, running means, moving
averages and linear recurrences do. In 16 bits such a sum stops growing: 256 + 1 is 256 in bfloat16.
A carry that also goes through a matmul or another function on its way, as the residual stream of a
scan over layers does, is no sum: it may be in 16 bits, which is where the memory is saved.
"""

import enum
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.mixed_precision.rules import LAYOUT, SEPARATE


class CarryDependence(enum.IntEnum):
    """How a value depends on a carry; of two ways the greater counts."""

    MOVED = 0  # the carry's own numbers, chosen or laid out anew
    SUMMED = 1  # added to, or scaled
    OTHER = 2


CarryDependences = dict[int, CarryDependence]  # by the number of the carry

_MOVES = LAYOUT | frozenset(
    """abs broadcast_in_dim clamp concatenate convert_element_type copy copy_p dynamic_slice
    dynamic_update_slice gather max min name neg pad reduce_max reduce_min reduce_precision scatter
    select_n sharding_constraint split""".split()
)
_SUMS = frozenset("add add_any cumsum reduce_sum scatter-add scatter_add sub".split())


def summed_carries(loop: jaxprs.NestedLoop, count: int) -> list[bool]:
    """For each of a loop's ``count`` carries whether it is a sum: it depends on itself, perhaps
    through other carries and rounds, and nowhere on that way otherwise than by sums."""
    consts: list[CarryDependences] = [{}] * (loop.body_consts.stop - loop.body_consts.start)
    carry: list[CarryDependences] = [{i: CarryDependence.MOVED} for i in range(count)]
    slices: list[CarryDependences] = [{}] * (loop.body.input_count - len(consts) - count)
    into = _through(loop.body, [*consts, *carry, *slices])[:count]
    before = [set(ways) for ways in into]  # the carries that a carry depends on, in any round
    while True:
        further = [found.union(*(before[j] for j in found)) for found in before]
        if further == before:
            break
        before = further

    def is_sum(carry: int) -> bool:
        circle = {j for j in before[carry] if carry in before[j]}
        ways = [way for j in circle for i, way in into[j].items() if i in circle]
        return max(ways, default=CarryDependence.MOVED) == CarryDependence.SUMMED

    return list(map(is_sum, range(count)))


def _through(flat: jaxprs.FlatJaxpr, inputs: Sequence[CarryDependences]) -> list[CarryDependences]:
    values = dict(enumerate(inputs))

    def of(operand) -> CarryDependences:
        return values[operand] if isinstance(operand, int) else {}

    for step in flat.steps:
        operands = list(map(of, step.inputs))
        results = _through_step(step, operands) if any(operands) else [{}] * len(step.outputs)
        for output, ways in zip(step.outputs, results, strict=True):
            # What comparisons and indices do is a choice among numbers, no change of them.
            inexact = jnp.issubdtype(flat.avals[output].dtype, jnp.inexact)
            values[output] = ways if inexact else {}
    return list(map(of, flat.outputs))


def _through_step(
    step: jaxprs.FlatStep, operands: list[CarryDependences]
) -> list[CarryDependences]:
    name, equation = step.primitive, step.equation
    if name in ("scan", "while"):
        return _through_loop(jaxprs.loop_of(equation), operands)
    if name == "cond" and (branches := jaxprs.branches_of(equation)):
        each = [_through(branch, operands[1:]) for branch in branches]
        return [_joined(ways) for ways in zip(*each, strict=True)]
    if jaxprs.is_region(equation) or name.startswith(("custom_jvp", "custom_vjp")):
        return _through(jaxprs.called_jaxpr(equation), operands)
    if name in SEPARATE:
        return operands
    return [_operation(name, operands)] * len(step.outputs)


def _operation(name: str, operands: list[CarryDependences]) -> CarryDependences:
    ways = _joined(operands)
    if name in _MOVES:
        return ways
    if name not in ("mul", "div", *_SUMS):
        return dict.fromkeys(ways, CarryDependence.OTHER)
    ways = {carry: max(way, CarryDependence.SUMMED) for carry, way in ways.items()}
    if name in ("mul", "div"):
        first, second = operands
        squares = second if name == "div" else first.keys() & second.keys()
        ways |= dict.fromkeys(squares, CarryDependence.OTHER)
    return ways


def _through_loop(
    loop: jaxprs.NestedLoop, operands: list[CarryDependences]
) -> list[CarryDependences]:
    """Of a loop inside the body, whose own carry takes on ways until they stay the same."""
    consts, carry = operands[loop.body_consts], operands[loop.carry]
    slices = operands[loop.carry.stop :] if loop.condition is None else []
    while True:
        results = _through(loop.body, [*consts, *carry, *slices])
        further = [_joined(pair) for pair in zip(carry, results, strict=False)]
        if further == carry:
            return [*carry, *results[len(carry) :]]
        carry = further


def _joined(several: Sequence[CarryDependences]) -> CarryDependences:
    def join(first: CarryDependences, second: CarryDependences) -> CarryDependences:
        return first | {i: max(way, first.get(i, way)) for i, way in second.items()}

    return functools.reduce(join, several, {})
