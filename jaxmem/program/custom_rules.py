"""What the derivative of a fused `jax.custom_jvp` reads, by its rule."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.custom_jvp import called_by, traced_rule
from jaxmem.jaxprs.flat import FlatStep
from jaxmem.jaxprs.flattening import flatten_jaxpr
from jaxmem.jaxprs.operands import differentiable
from jaxmem.program.costs import is_fused

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


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
    """The values that the derivative of a fused `jax.custom_jvp` reads; None: its name tells."""
    if step.primitive != "custom_jvp_call":
        return None
    reading = by_rule(step)
    operands = [step.inputs[at] for at in reading.operands]
    read = [*operands, *(step.outputs[at] for at in reading.results)]
    return frozenset(value for value in read if isinstance(value, int))


def by_rule(step: FlatStep) -> Reading:
    """What the derivative of a fused `jax.custom_jvp` reads by its rule."""
    has_rule = step.primitive == "custom_jvp_call" and is_fused(step.equation)
    return reading_of(step.equation) if has_rule else Reading()


def reading_of(equation: JaxprEqn) -> Reading:
    """What the derivative of a `jax.custom_jvp` by its operands, but for literals, reads of its
    operands and results, and what it computes of them. (JAX keeps what is computed. XLA computes it
    again where it is read.)"""
    real = differentiable(
        [variable.aval for variable in equation.invars],
        [isinstance(operand, internals.Literal) for operand in equation.invars],
    )
    readings = _readings.setdefault(called_by(equation), {})
    if tuple(real) not in readings:
        rule = traced_rule(equation, real)
        every = Reading(frozenset(range(len(equation.invars))))
        readings[tuple(real)] = _reading_of(rule, equation) if rule else every
    return readings[tuple(real)]


def _reading_of(rule: ClosedJaxpr, equation: JaxprEqn) -> Reading:
    flat = flatten_jaxpr(rule, merge=True)
    first, count = len(flat.consts), len(equation.outvars)
    operands = {first + at: at for at in range(len(equation.invars))}
    results = {value: at for at, value in enumerate(flat.outputs[:count])}
    moved = set(range(first + len(operands), flat.input_count))  # what has a tangent in it
    zeros: set[int] = set()  # the tangents of what has none, and what they are multiplied with
    pending: list[int] = []
    for step in flat.steps:
        if not moved.isdisjoint(step.uses):
            moved.update(step.outputs)
            pending.extend(value for value in step.uses if value not in moved | zeros)
        elif _is_zero(step, zeros):
            zeros.update(step.outputs)
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


def _is_zero(step: FlatStep, zeros: Set[int]) -> bool:
    """Whether a step makes zeros, given those that there are."""
    if step.primitive not in ("broadcast_in_dim", "mul"):
        return False
    return any(one in zeros if isinstance(one, int) else not np.any(one.val) for one in step.inputs)
