"""Losses that are one sum over the examples divided by another: means over what a mask leaves.

Slices of such a loss are weighted by what each is divided by. The divisor may be bounded
(``max(mask.sum(), 1)``) after it was summed: so it is the sum that is added up over slices.
"""

import dataclasses
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.jaxprs import internals
from jaxmem.levers.batch.independence.bounds import (
    CountTransform,
    Test,
    bounds_of,
    is_count,
    never_zero,
    test_of,
)
from jaxmem.levers.batch.independence.masks import is_masked, summed_for
from jaxmem.levers.batch.independence.scalars import (
    LINEAR,
    Makers,
    are_alike,
    is_inexact,
    is_multiple,
    number_of,
)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A quotient in one trace of a program.

    Attributes:
        numerators: the values that are divided and added up.
        quotients: what each of them becomes, 0 by a test among it.
        count: the sum that their divisor is made of,
        bounds: by these, in order.
        zeros: tests of the count, by which the quotients are 0.
        summed: what is summed up for it, where that is known.
        masked: whether nothing is divided where that is 0 all over.
    """

    numerators: tuple[int, ...]
    quotients: tuple[int, ...]
    count: int
    bounds: tuple[CountTransform, ...]
    zeros: tuple[Test, ...]
    summed: int | None
    masked: bool

    @property
    def is_safe(self) -> bool:
        """Whether a slice of which nothing is counted adds what it should: it is not divided by 0,
        or there is nothing to divide."""
        rounded = any(jnp.issubdtype(one.dtype, jnp.integer) for one in self.bounds)
        empty = self.masked and not rounded
        return empty or (never_zero(self.bounds) and not self.zeros)

    def has_same_divisor(self, other: "Ratio", flat: jaxprs.FlatJaxpr) -> bool:
        """Whether another quotient of the program has the same divisor, in some dtype."""
        bounds = [
            [(one.name, one.number, one.test) for one in ratio.bounds if one.number is not None]
            for ratio in (self, other)
        ]
        same = bounds[0] == bounds[1] and self.zeros == other.zeros
        return same and are_alike(flat.makers(), self.count, other.count)

    def bounded(self, count: jax.Array) -> jax.Array:
        """The divisor, of its count."""
        value = count
        for bound in self.bounds:
            value = bound.of(value, count)
        return jnp.asarray(value)

    def is_zero(self, count: jax.Array) -> jax.Array:
        """Whether a test says that the quotients of this count are 0."""
        return jnp.any(jnp.asarray([False, *(test.evaluate(count) for test in self.zeros)]))


class _Quotient(NamedTuple):
    numerator: int
    divisor: int
    result: int
    tests: tuple[tuple[Test, Any], ...]  # where it is 0, by what is compared


def ratio_in(flat: jaxprs.FlatJaxpr, result: Any, batch: range) -> Ratio | None:
    """The quotients that a result of a program is the sum of, beside what has nothing of the batch,
    those of its inputs; None: it is something else."""
    makers = flat.makers()
    found = _quotients(makers, result, _made_of(flat, batch))
    if not found:
        return None
    first = found[0]
    if not all(are_alike(makers, first.divisor, other.divisor) for other in found):
        return None
    bounded = bounds_of(makers, first.divisor)
    if bounded is None:
        return None
    count, bounds = bounded
    zeros = tuple(test for test, _ in first.tests)
    if not all(test.is_empty_count_guard for test in zeros):
        return None
    for one in found:
        if tuple(test for test, _ in one.tests) != zeros:
            return None
        if not all(is_count(makers, compared, count) for _, compared in one.tests):
            return None
    numerators = tuple(one.numerator for one in found)
    summed = summed_for(makers, count)
    masked = summed is not None and all(is_masked(makers, one, summed) for one in numerators)
    quotients = tuple(one.result for one in found)
    return Ratio(numerators, quotients, count, bounds, zeros, summed, masked)


def _quotients(makers: Makers, value: Any, of_batch: Set[int]) -> list[_Quotient]:
    """The quotients by something of the batch that a value is the sum of, each times a number,
    beside what has nothing of the batch. None, where it is something else."""
    found: list[_Quotient] = []
    # With the tests by which a value is 0, and the value that is chosen by the first of them.
    pending: list[tuple[Any, tuple, int | None]] = [(value, (), None)]
    seen = set()
    while pending:
        value, tests, chosen = pending.pop()
        step = makers.get(value) if isinstance(value, int) else None
        if step is not None:
            if (value, tests) in seen:
                continue
            seen.add((value, tests))
        divided = _division(makers, step) if step else None
        tested = _zero_guard(makers, step) if step else None
        if step is None or not is_inexact(step) or value not in of_batch:
            if tests:  # it would be 0 by them too
                return []
        elif divided is not None and divided[1] in of_batch:
            found.append(_Quotient(*divided, value if chosen is None else chosen, tests))
        elif step.primitive in ("add", "add_any", "sub"):
            pending.extend((operand, tests, chosen) for operand in step.inputs)
        elif step.primitive in LINEAR or is_multiple(step):
            pending.append((next(step.uses), tests, chosen))
        elif tested is not None:
            test, compared, operand = tested
            chosen = value if chosen is None else chosen
            pending.append((operand, (*tests, (test, compared)), chosen))
        else:
            return []
    return found


def _made_of(flat: jaxprs.FlatJaxpr, inputs: range) -> set[int]:
    """The values that have something of some inputs."""
    found = set(inputs)
    for step in flat.steps:
        if not found.isdisjoint(step.uses):
            found.update(step.outputs)
    return found


def _division(makers: Makers, step: jaxprs.FlatStep) -> tuple[int, int] | None:
    """The numerator and the divisor of a division by a value, or of a product with such a part of
    a number."""
    if not all(isinstance(one, int) for one in step.inputs):
        return None
    if step.primitive == "div":
        return step.inputs[0], step.inputs[1]
    if step.primitive == "mul":
        for at, part in enumerate(step.inputs):
            maker = makers.get(part)
            if maker is not None and maker.primitive == "div":
                number, divisor = maker.inputs
                if number_of(makers, number) is not None and isinstance(divisor, int):
                    return step.inputs[1 - at], divisor
    return None


def _zero_guard(makers: Makers, step: jaxprs.FlatStep) -> tuple[Test, Any, Any] | None:
    """Of a selection between 0 and a value: the test that chooses 0, what that compares, and the
    value."""
    if step.primitive != "select_n" or len(step.inputs) != 3:
        return None
    tested = test_of(makers, step)
    cases = [number_of(makers, one) for one in step.inputs[1:]]
    if tested is None or cases.count(0.0) != 1:
        return None
    test, compared = tested
    at = cases.index(0.0)
    return (test if at == 1 else test.negated), compared, step.inputs[2 - at]


def drop_quotients(flat: jaxprs.FlatJaxpr, quotients: set[int]) -> jaxprs.FlatJaxpr:
    """A program with 0 in the place of quotients."""

    def known(value: Any) -> Any:
        if not isinstance(value, int) or value not in quotients:
            return value
        aval = flat.avals[value]
        return internals.Literal(np.zeros(aval.shape, aval.dtype), aval)

    steps = tuple(
        dataclasses.replace(step, inputs=tuple(map(known, step.inputs))) for step in flat.steps
    )
    return dataclasses.replace(flat, steps=steps, outputs=tuple(map(known, flat.outputs)))
