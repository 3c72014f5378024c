"""Equations that compute the same from the same values: XLA merges them."""

from __future__ import annotations

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
        self._alike: dict[Hashable, list[tuple[JaxprEqn, tuple[int, ...]]]] = {}
        self._same: dict[int, int] = {}

    def lookup(self, equation: JaxprEqn, inputs: Sequence[int | Literal]) -> tuple[int, ...] | None:
        """The results of an earlier equation that computes the same; None: there is none."""
        if not _is_pure(equation):
            return None
        for earlier, outputs in self._alike.get(self._key(equation, inputs), ()):
            alike = self._parameters(earlier) == self._parameters(equation)
            if alike and earlier.ctx is equation.ctx:
                once = not self._differentiated or has_linear_derivative(equation)
                return outputs if once else None
        return None

    def insert(
        self, equation: JaxprEqn, inputs: Sequence[int | Literal], outputs: tuple[int, ...]
    ) -> None:
        """Counts an equation in that computes what none has, with its results."""
        if _is_pure(equation):
            self._alike.setdefault(self._key(equation, inputs), []).append((equation, outputs))

    def alias(self, values: Sequence[int], earlier: Sequence[int]) -> None:
        """Takes values that stay for earlier ones, in what reads them."""
        self._same.update(zip(values, earlier, strict=True))

    def _parameters(self, equation: JaxprEqn) -> Any:
        """What is compared of two equations. Without a derivative only what it computes counts of a
        `jax.custom_jvp`: JAX traces it anew where a rule calls it."""
        called = None if self._differentiated else called_by_rule(equation)
        if called and not called.consts:
            return str(called)
        return {name: _same(value) for name, value in equation.params.items()}

    def _key(self, equation: JaxprEqn, inputs: Sequence[int | Literal]) -> Hashable:
        """What two equations that compute the same have in common, parameters apart: few share it,
        and parameters take long to compare."""
        numbers = (
            self._same.get(x, x) if isinstance(x, int) else (x.aval, _same(x.val)) for x in inputs
        )
        return operation_of(equation), tuple(numbers)


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
