"""What the derivative of a fused `jax.custom_jvp` or `jax.custom_vjp` reads, by its rule."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.custom_jvp import called_by, traced_rule
from jaxmem.jaxprs.custom_vjp import traced_rules
from jaxmem.jaxprs.equations import CUSTOM_RULES, CUSTOM_VJPS, operation_of
from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.flattening import flatten_jaxpr
from jaxmem.jaxprs.operands import differentiable
from jaxmem.jaxprs.zeros import zeros_of
from jaxmem.program.costs import is_fused

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What the derivative by a rule reads.

    Attributes:
        operands, results: the places of those that it reads.
        computed: the primitives by which it makes of them what the results are not made of, before
            it knows a tangent.
    """

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    computed: tuple[str, ...] = ()


# By the places of the operands that have a tangent.
_Readings = dict[tuple[int, ...], Reading]
_readings: weakref.WeakKeyDictionary[Any, _Readings] = weakref.WeakKeyDictionary()


def read_by_rule(step: FlatStep) -> frozenset[int] | None:
    """The values that the derivative of a fused operation with a rule of its own reads; None: its
    name tells."""
    if step.primitive not in CUSTOM_RULES:
        return None
    reading = by_rule(step)
    operands = [step.inputs[at] for at in reading.operands]
    read = [*operands, *(step.outputs[at] for at in reading.results)]
    return frozenset(value for value in read if isinstance(value, int))


def by_rule(step: FlatStep) -> Reading:
    """What the derivative of a fused operation reads by a rule of its own."""
    has_rule = step.primitive in CUSTOM_RULES and is_fused(step.equation)
    return reading_of(step.equation) if has_rule else Reading()


def reading_of(equation: JaxprEqn) -> Reading:
    """What the derivative by a rule, taken by the operands, but for literals, reads of operands and
    results, and what it computes of them. (JAX keeps what is computed. XLA computes it again where
    it is read.)"""
    real = differentiable(
        [variable.aval for variable in equation.invars],
        [isinstance(operand, internals.Literal) for operand in equation.invars],
    )
    readings = _readings.setdefault(called_by(equation), {})
    if tuple(real) not in readings:
        by_cotangents = operation_of(equation) in CUSTOM_VJPS
        readings[tuple(real)] = (
            _reading_by_cotangents(equation)
            if by_cotangents
            else _reading_by_tangents(equation, real)
        )
    return readings[tuple(real)]


def _reading_by_cotangents(equation: JaxprEqn) -> Reading:
    rules = traced_rules(equation)
    assert rules is not None
    results = {value: at for at, value in enumerate(rules.results)}
    operands = {value: at for at, value in enumerate(rules.operands)}
    return _reading_of(rules.flat, operands, results, set(rules.cotangents))


def _reading_by_tangents(equation: JaxprEqn, real: Sequence[int]) -> Reading:
    rule = traced_rule(equation, real)
    if rule is None:
        return Reading(frozenset(range(len(equation.invars))))
    flat = flatten_jaxpr(rule, merge=True)
    first, count = len(flat.consts), len(equation.outvars)
    operands = {first + at: at for at in range(len(equation.invars))}
    results = {value: at for at, value in enumerate(flat.outputs[:count])}
    tangents = set(range(first + len(operands), flat.input_count))
    return _reading_of(flat, operands, results, tangents)


def _reading_of(
    flat: FlatJaxpr, operands: dict[int, int], results: dict[Any, int], moved: set[int]
) -> Reading:
    """What is read of operands and results, by number the places of which, to make something of the
    tangents or cotangents ``moved``."""
    zeros = zeros_of(flat)  # the tangents of what has none, and what they are multiplied with
    pending: list[int] = []
    for step in flat.steps:
        if not moved.isdisjoint(step.uses):
            moved.update(step.outputs)
            pending.extend(value for value in step.uses if value not in moved | zeros)
    makers, seen, own = flat.makers(), set(), flat.made_of(results)
    computed: dict[int, str] = {}
    while pending:
        if (value := pending.pop()) in seen:
            continue
        seen.add(value)
        if value in makers and value not in results:
            pending.extend(makers[value].uses)
            if value not in own:
                computed[value] = makers[value].primitive
    return Reading(
        frozenset(operands[value] for value in seen & operands.keys()),
        frozenset(results[value] for value in seen & results.keys()),
        tuple(computed.values()),
    )
