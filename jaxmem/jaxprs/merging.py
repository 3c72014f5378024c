"""Equations that compute the same from the same values: XLA merges them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxmem.jaxprs.equations import called_by_rule, operation_of
from jaxmem.jaxprs.linearity import has_linear_derivative
from jaxmem.jaxprs.operands import is_opaque

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal


class CommonSubexpressions:
    """The equations of a program so far, over values that have numbers; those of one that is yet to
    be ``differentiated`` are the same only if the derivative of one is that of both."""

    def __init__(self, differentiated: bool = True) -> None:
        self._differentiated = differentiated
        self._alike: dict[Hashable, _Alike] = collections.defaultdict(_Alike)
        self._same: dict[int, int] = {}

    def lookup(self, equation: JaxprEqn, inputs: Sequence[int | Literal]) -> tuple[int, ...] | None:
        """The results of an earlier equation that computes the same; None: there is none."""
        key = self._key(equation, inputs)
        if not _is_pure(equation) or key not in self._alike:
            return None
        alike = self._alike[key]
        for earlier, outputs in alike.waiting:
            alike.known.setdefault(self._parameters(earlier), outputs)
        alike.waiting.clear()
        found = alike.known.get(self._parameters(equation))
        if found and self._differentiated and not has_linear_derivative(equation):
            return None
        return found

    def insert(
        self, equation: JaxprEqn, inputs: Sequence[int | Literal], outputs: tuple[int, ...]
    ) -> None:
        """Counts an equation in that computes what none has, with its results."""
        if _is_pure(equation):
            self._alike[self._key(equation, inputs)].waiting.append((equation, outputs))

    def alias(self, values: Sequence[int], earlier: Sequence[int]) -> None:
        """Takes values that stay for earlier ones, in what reads them."""
        self._same.update(zip(values, earlier, strict=True))

    def _parameters(self, equation: JaxprEqn) -> Hashable:
        """What is the same of two equations with a `_key` that compute the same. Without a
        derivative only what it computes counts of a `jax.custom_jvp`: JAX traces it anew where a
        rule calls it."""
        called = None if self._differentiated else called_by_rule(equation)
        if called and not called.consts:
            return id(equation.ctx), str(called)
        return parameters_key(equation)

    def _key(self, equation: JaxprEqn, inputs: Sequence[int | Literal]) -> Hashable:
        """What two equations that compute the same have in common, parameters apart: most share it
        with none, and parameters take long to look at."""
        numbers = (self._same.get(x, x) if isinstance(x, int) else literal_key(x) for x in inputs)
        return operation_of(equation), tuple(numbers)


def parameters_key(equation: JaxprEqn) -> Hashable:
    """What is the same of two equations of one operation that do the same to what they read, as
    long as their programs are there."""
    given = frozenset((name, _same(one)) for name, one in equation.params.items())
    return id(equation.ctx), given


def literal_key(literal: Literal) -> Hashable:
    """What is the same of two literals that are the same."""
    return literal.aval, _same(literal.val)


@dataclasses.dataclass
class _Alike:
    """Equations of one key: those whose parameters nobody has asked for yet, and the results of the
    others by their parameters. (Slices of one array are as many as somebody likes.)"""

    waiting: list[tuple[JaxprEqn, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    known: dict[Hashable, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def _is_pure(equation: JaxprEqn) -> bool:
    """Whether it does no more than compute. What has passed a barrier is not the same: XLA takes it
    for another value."""
    return not equation.effects and equation.primitive.name != "optimization_barrier"


def _same(value: Any) -> Hashable:
    """Equal for what is the same to the last bit; arrays and programs are if they are one object.
    (To Python -0.0 is 0.0, and arrays may print alike.)"""
    inexact = isinstance(value, float | complex | np.inexact)
    array = isinstance(value, jax.Array | np.ndarray) and not value.ndim and not is_opaque(value)
    if inexact or array:
        number = np.asarray(value)
        return number.dtype, number.tobytes()
    if type(value) is tuple:
        return tuple(map(_same, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
