"""What is made of a count before a sum is divided by it, as plain data: inside of a
`jax.shard_map` the steps of a trace are others."""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.scalars import Makers, are_alike, number_of

# With a number: what a count is bounded by, or kept from 0 with.
_BOUNDS = {"add": jnp.add, "max": jnp.maximum}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}
_SWAPPED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}


class Test(NamedTuple):
    """A comparison of a count with a number, and whether it holds where something is chosen."""

    name: str
    number: float
    holds: bool

    @property
    def negated(self) -> "Test":
        """The test that chooses where this does not."""
        return self._replace(holds=not self.holds)

    @property
    def is_empty_count_guard(self) -> bool:
        """Whether it chooses by a count of 0, and by none above: a slice has as little only if it
        counts nothing."""
        return self.number == 0 and bool(self.evaluate(0.0)) and not self.evaluate(1.0)

    def evaluate(self, count: Any) -> Any:
        return _COMPARISONS[self.name](count, self.number) == self.holds


class CountTransform(NamedTuple):
    """What is made of a count: a conversion to a dtype or, if there is a number, the result of an
    operation with it: the number instead, where a test chooses that."""

    name: str
    dtype: Any
    number: float | None
    test: Test | None = None

    def of(self, value: Any, count: Any) -> jax.Array:
        """Of what has been made of a count so far."""
        value = jnp.asarray(value, self.dtype)
        if self.number is None:
            return value
        number = jnp.asarray(self.number, self.dtype)
        if self.test is not None:
            return jnp.where(self.test.evaluate(count), number, value)
        return _BOUNDS[self.name](value, number)


def bounds_of(makers: Makers, divisor: int) -> tuple[int, tuple[CountTransform, ...]] | None:
    """The count that a divisor is made of, and how; None: by a test of something else."""
    count, bounds, compared = divisor, [], []
    while (step := makers.get(count)) and (found := _bound(makers, step)):
        bound, count, tested = found
        bounds.append(bound)
        compared.extend(tested)
    if not all(is_count(makers, one, count) for one in compared):
        return None
    return count, tuple(bounds[::-1])


def _bound(makers: Makers, step: jaxprs.FlatStep) -> tuple[CountTransform, int, list[Any]] | None:
    """What a step makes of a count, the count, and what is compared for that; None: it is another
    step."""
    name, cases, compared, test = step.primitive, step.inputs, [], None
    if name == "select_n" and (found := test_of(makers, step)):
        (test, operand), cases = found, step.inputs[1:]
        compared.append(operand)
    elif name not in (*_BOUNDS, "convert_element_type"):
        return None
    numbers = [number_of(makers, one) for one in cases]
    if numbers.count(None) != 1 or not isinstance(cases[numbers.index(None)], int):
        return None
    at = numbers.index(None)
    if test is not None and at == 1:  # the number is the first case
        test = test.negated
    number = next((one for one in numbers if one is not None), None)
    dtype = step.equation.outvars[0].aval.dtype
    return CountTransform(name, dtype, number, test), cases[at], compared


def test_of(makers: Makers, select: jaxprs.FlatStep) -> tuple[Test, Any] | None:
    """What a selection's second case is chosen by, if that is a comparison with a number; and what
    is compared."""
    step = makers.get(select.inputs[0])
    if step is None or step.primitive not in _COMPARISONS:
        return None
    numbers = [number_of(makers, one) for one in step.inputs]
    if numbers.count(None) != 1:
        return None
    at = numbers.index(None)
    name = step.primitive if at == 0 else _SWAPPED.get(step.primitive, step.primitive)
    number = numbers[1 - at]
    assert number is not None
    return Test(name, number, True), step.inputs[at]


def is_count(makers: Makers, value: Any, count: int) -> bool:
    """Whether a value is a count, or a conversion of it to a type that has all its values."""
    while not are_alike(makers, value, count):
        step = makers.get(value) if isinstance(value, int) else None
        if step is None or step.primitive != "convert_element_type":
            return False
        one, other = (v.aval.dtype for v in (step.equation.invars[0], step.equation.outvars[0]))
        exact = jnp.issubdtype(one, jnp.integer) or jnp.promote_types(one, other) == other
        if not exact or not jnp.issubdtype(other, jnp.inexact):
            return False
        value = step.inputs[0]
    return True


def never_zero(bounds: tuple[CountTransform, ...]) -> bool:
    """Whether what is made of a count is above 0, or not 0, whatever the count is."""
    least, other = -math.inf, False  # the least that it may be; whether it is anything but 0
    for name, dtype, number, test in bounds:
        if number is None:
            other &= bool(jnp.issubdtype(dtype, jnp.inexact))
        elif test is not None:
            other, least = bool(test.evaluate(0.0)) and number != 0, min(least, number)
        else:
            other, least = False, max(least, number) if name == "max" else least + number
        if math.isfinite(least):
            least = float(np.asarray(least).astype(dtype))
    return least > 0 or other
