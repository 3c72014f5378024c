"""Losses that are one sum over the examples divided by another: means over what a mask leaves.

Slices of such a loss are weighted by what each is divided by. The divisor may be bounded
(``max(mask.sum(), 1)``) after it was summed: so it is the sum that is added up over slices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.widths import at_least
from jaxmem.levers.batch.independence.kinds import Kind, Sizes, of_total
from jaxmem.levers.batch.independence.operation import equal

Makers = Mapping[int, jaxprs.Step]  # of each value of a trace
# Of one operand, whose sum over examples they leave one.
_LINEAR = frozenset("convert_element_type copy copy_p neg reshape squeeze".split())
# With a number: what a sum is bounded by, or kept from 0 with.
_BOUNDS = {"add": jnp.add, "max": jnp.maximum}
_ELEMENTWISE = frozenset("convert_element_type copy".split())
_SAME = _ELEMENTWISE | {"broadcast_in_dim", "reshape"}  # shows the same numbers


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A quotient in one trace of a program.

    Attributes:
        numerators: the values that are divided and added up.
        divisor: what all of them are divided by.
        count: the sum that the divisor is made of,
        bounds: by these, in order.
        summed: what is summed up for it, where that is known.
        masked: whether nothing is divided where that is 0 all over.
    """

    numerators: tuple[int, ...]
    divisor: int
    count: int
    bounds: tuple["Bound", ...]
    summed: int | None
    masked: bool

    @property
    def is_safe(self) -> bool:
        """Whether a slice of which nothing is counted adds what it should: it is not divided by 0,
        or there is nothing to divide."""
        least = -math.inf
        for name, dtype, number in self.bounds:
            if number is not None:
                least = max(least, number) if name == "max" else least + number
            if math.isfinite(least):
                least = float(np.asarray(least).astype(dtype))
        rounded = any(jnp.issubdtype(one.dtype, jnp.integer) for one in self.bounds)
        return least > 0 or (self.masked and not rounded)

    def is_divided_as(self, other: "Ratio", flat: jaxprs.FlatJaxpr) -> bool:
        """Whether another quotient of the program has the same divisor, in some dtype."""
        bounds = [
            [(one.name, one.number) for one in ratio.bounds if one.number is not None]
            for ratio in (self, other)
        ]
        return bounds[0] == bounds[1] and _alike(flat.makers(), self.count, other.count)

    def bounded(self, count: jax.Array) -> jax.Array:
        """The divisor, of its count. (Not by the steps of the trace: inside of a `jax.shard_map`
        they are others.)"""
        for name, dtype, number in self.bounds:
            count = jnp.asarray(count, dtype)
            if number is not None:
                count = _BOUNDS[name](count, jnp.asarray(number, dtype))
        return count


class Bound(NamedTuple):
    """What is made of a count: a conversion to a dtype, or, if there is a number, the result of an
    operation with it."""

    name: str
    dtype: Any
    number: float | None


def ratio_in(flat: jaxprs.FlatJaxpr, result: Any) -> Ratio | None:
    """The quotient that a result of a program is; None: it is none."""
    makers = flat.makers()
    found = _quotients(makers, result)
    if not found or not all(_alike(makers, found[0][1], other) for _, other in found):
        return None
    divisor = found[0][1]
    count, bounds = divisor, []
    while step := makers.get(count):
        numbers = [_number(makers, one) for one in step.inputs]
        bounded = step.primitive in _BOUNDS and len(numbers) == 2 and numbers.count(None) == 1
        if not bounded and (step.primitive != "convert_element_type" or None not in numbers):
            break
        operand = step.inputs[numbers.index(None)]
        if not isinstance(operand, int):
            break
        count, dtype = operand, step.equation.outvars[0].aval.dtype
        number = next((one for one in numbers if one is not None), None)
        bounds.append(Bound(step.primitive, dtype, number))
    numerators = tuple(numerator for numerator, _ in found)
    summed = _summed(makers, count)
    masked = summed is not None and all(_masked(makers, one, summed) for one in numerators)
    return Ratio(numerators, divisor, count, tuple(bounds[::-1]), summed, masked)


def _number(makers: Makers, value: Any) -> float | None:
    """The real number that an operand is wherever the program runs; None: it is none."""
    if not isinstance(value, int):
        return None if np.ndim(value.val) or np.iscomplexobj(value.val) else float(value.val)
    step = makers.get(value)
    dtype = step.equation.outvars[0].aval.dtype if step else None
    if step is None or step.primitive not in _SAME or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    number = _number(makers, step.inputs[0])
    return None if number is None else float(np.asarray(number).astype(dtype))


def _alike(makers: Makers, one: Any, other: Any) -> bool:
    """Whether two values are computed in the same way from the same ones."""
    pending, seen = [(one, other)], set()
    while pending:
        pair = one, other = pending.pop()
        if not (isinstance(one, int) and isinstance(other, int)):
            if isinstance(one, int) or isinstance(other, int) or not equal(one.val, other.val):
                return False
            continue
        if one == other or pair in seen:
            continue
        seen.add(pair)
        first, second = makers.get(one), makers.get(other)
        if first is None or second is None or first.primitive != second.primitive:
            return False
        places = first.outputs.index(one), second.outputs.index(other)
        given, also = first.equation.params, second.equation.params
        if places[0] != places[1] or given.keys() != also.keys():
            return False
        if not all(equal(given[name], also[name]) for name in given):
            return False
        pending.extend(zip(first.inputs, second.inputs, strict=True))
    return True


def _quotients(makers: Makers, value: Any) -> list[tuple[int, int]]:
    """The numerators and divisors that a value is the sum of, each times a number; none, where it
    is something else."""
    found, seen, pending = [], set(), [value]
    while pending:
        value = pending.pop()
        if isinstance(value, int) and value in seen:
            continue
        step = makers.get(value) if isinstance(value, int) else None
        if step is None or not _is_inexact(step):
            return []
        seen.add(value)
        if step.primitive == "div" and all(isinstance(one, int) for one in step.inputs):
            numerator, divisor = step.inputs
            found.append((numerator, divisor))
        elif step.primitive in ("add", "add_any", "sub"):
            pending.extend(step.inputs)
        elif step.primitive in _LINEAR or _is_multiple(step):
            pending.append(next(step.uses, None))
        else:
            return []
    return found


def _is_inexact(step: jaxprs.Step) -> bool:
    """Whether it is of floating-point numbers: those of integers are rounded."""
    variables = *step.equation.invars, *step.equation.outvars
    return all(jnp.issubdtype(one.aval.dtype, jnp.inexact) for one in variables)


def _is_multiple(step: jaxprs.Step) -> bool:
    """Whether it multiplies a value with a number, or divides it by one."""
    of_one = len(step.inputs) == 2 and len(list(step.uses)) == 1
    divides = step.primitive == "div" and isinstance(step.inputs[0], int)
    return of_one and (step.primitive == "mul" or divides)


def _summed(makers: Makers, count: Any) -> int | None:
    """What is summed up for a count, from all its elements, in one step or in several."""
    summed = None
    while step := makers.get(count) if isinstance(count, int) else None:
        if step.primitive != "reduce_sum" and not (step.primitive in _LINEAR or _is_multiple(step)):
            break
        count = next(step.uses, None)
        summed = count if step.primitive == "reduce_sum" else summed
    return summed


def _masked(makers: Makers, numerator: Any, mask: int) -> bool:
    """Whether a value is 0 where a mask is 0 all over: it adds up sums of products with the mask,
    or, of elements that lie alike, with all that the mask is a product of."""
    of_mask = _factors(makers, mask, exact=True)
    pending: list[Any] = [numerator]
    while pending:
        value = pending.pop()
        step = makers.get(value) if isinstance(value, int) else None
        if step is None:
            return False
        if step.primitive in ("reduce_sum", "dot_general"):
            factors = [pair for one in step.inputs for pair in _factors(makers, one)]
            aligned = step.primitive == "reduce_sum"
            if _have(makers, factors, of_mask, aligned):
                continue
        if step.primitive in ("add", "add_any", "sub"):
            pending.extend(step.inputs)
        elif step.primitive in _LINEAR | {"reduce_sum"} or _is_multiple(step):
            pending.append(step.inputs[0] if len(step.inputs) == 1 else next(step.uses))
        else:
            return False
    return True


def _have(makers: Makers, factors: list, of_mask: list, aligned: bool) -> bool:
    """Whether all factors of a mask are among others; several, if elements lie alike in all."""
    alone = len(of_mask) == 1
    return all(
        any(
            _alike(makers, one, other) and (alone or (aligned and lies and also))
            for other, also in factors
        )
        for one, lies in of_mask
    )


def _factors(makers: Makers, value: Any, exact: bool = False) -> list[tuple[Any, bool]]:
    """What a value is 0 with, whatever its shape and its dtype: its factors, what they are
    conversions of, and itself; and whether their elements lie as the value's do. ``exact``: the
    least of them that are not 0 unless the value is."""
    found, seen, pending = [], set(), [(value, True)]
    while pending:
        value, lies = pending.pop()
        step = makers.get(value) if isinstance(value, int) else None
        if (exact and _number(makers, value)) or (step is not None and (value, lies) in seen):
            continue
        if step is not None:
            seen.add((value, lies))
        under: list[Any] = []
        if step is not None and step.primitive in _SAME and not (exact and _makes_zeros(step)):
            lies_under = lies and step.primitive in _ELEMENTWISE
            under = [(step.inputs[0], lies_under)]
        elif step is not None and step.primitive == "mul":
            under = [(one, lies) for one in step.inputs]
        elif step is not None and not exact and _is_zero_but_where(makers, step):
            under = [(step.inputs[at], lies) for at in (0, 2)]
        if not (exact and under):
            found.append((value, lies))
        pending.extend(under)
    return found


def _makes_zeros(step: jaxprs.Step) -> bool:
    """Whether it is a conversion that may make 0 of something else: to whole numbers, or to fewer
    digits."""
    one, other = (
        variable.aval.dtype for variable in (step.equation.invars[0], step.equation.outvars[0])
    )
    if one == other or jnp.bool_ in (one, other):
        return False
    if jnp.issubdtype(one, jnp.integer):
        return not jnp.issubdtype(other, jnp.inexact) and other.itemsize < one.itemsize
    return not jnp.issubdtype(other, jnp.inexact) or other.itemsize <= one.itemsize


def _is_zero_but_where(makers: Makers, step: jaxprs.Step) -> bool:
    """Whether it is 0 where its condition does not hold."""
    chooses = step.primitive == "select_n" and len(step.inputs) == 3
    return chooses and _number(makers, step.inputs[1]) == 0


@dataclasses.dataclass(frozen=True)
class Divisor:
    """What the slices of a loss are weighted by.

    Attributes:
        ratios: the loss in the traces for a batch and for a slice.
        of_numerators, of_count: ``"mean"`` or ``"sum"``: what the values that are divided, and the
            count that they are divided by, are over examples.
        trace: the program of the loss for so many examples.
    """

    ratios: tuple[Ratio, Ratio]
    of_numerators: str
    of_count: str
    trace: Callable[[int], jaxprs.FlatJaxpr]

    def divides(self, other: "Divisor | None", flats: Sequence[jaxprs.FlatJaxpr]) -> bool:
        """Whether another result is a quotient by the same divisor."""
        return (
            other is not None
            and self.of_numerators == other.of_numerators
            and self.of_count == other.of_count
            and all(
                one.is_divided_as(two, flat)
                for flat, one, two in zip(flats, self.ratios, other.ratios, strict=True)
            )
        )

    def afresh(self) -> "Divisor":
        """For one call: what the loss closes over may be another value now, or a tracer. It is
        traced once for each size of slices."""
        return dataclasses.replace(self, trace=functools.cache(self.trace))

    def of_slice(self, part: Any, share: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weight of a slice that has this share of the examples, and its part of the count.

        If a slice is divided by 0, though it does not count zeros alone, nothing tells what was
        divided: its weight is NaN.
        """
        leaves = [leaf for leaf in jax.tree.leaves(part) if jaxprs.is_array(leaf)]
        flat = self.trace(leaves[0].shape[0])
        ratio = _of_loss(flat)
        wanted = [ratio.count] if ratio.summed is None else [ratio.count, ratio.summed]
        parts = flat.made_of(wanted)
        values = dict(enumerate([*flat.consts, *leaves]))
        flat.run((step for step in flat.steps if not parts.isdisjoint(step.outputs)), values)
        count = values[ratio.count]
        weight = jnp.asarray(ratio.bounded(count))
        weight = weight.astype(at_least(jnp.float32, weight.dtype))
        empty = ratio.summed is not None and jnp.all(values[wanted[-1]] == 0)
        weight = jnp.where((weight == 0) & jnp.logical_not(empty), jnp.nan, weight)
        if jnp.issubdtype(count.dtype, jnp.inexact):
            count = count.astype(at_least(jnp.float32, count.dtype))
        if self.of_numerators == "mean":
            weight = weight * share.astype(weight.dtype)
        if self.of_count == "mean":
            count = count * share.astype(count.dtype)
        return weight, count

    def of_all(self, count: jax.Array, size: int) -> jax.Array:
        """What the whole batch is divided by if this is counted. It is bounded as slices of a size
        are."""
        return _of_loss(self.trace(size)).bounded(count)


def _of_loss(flat: jaxprs.FlatJaxpr) -> Ratio:
    ratio = ratio_in(flat, flat.outputs[0])
    if ratio is None:
        raise JaxmemError(
            "The loss is no longer the quotient of two sums that it was when it was first traced "
            "with these shapes. Make a new jaxmem.microbatch of what it is now."
        )
    return ratio


def divisor_of(
    flats: Sequence[jaxprs.FlatJaxpr],
    results: tuple[Any, Any],
    allowed: range,
    kinds: Callable[[list[tuple[Any, Any]]], list[Kind]],
    sizes: Sizes,
    trace: Callable[[int], jaxprs.FlatJaxpr],
) -> Divisor | None:
    """What divides a result; None: it is no quotient of two sums over the examples.

    Args:
        flats: the traces.
        results: the result in both.
        allowed: the inputs that a count may be made of: the batch, and what is closed over.
        kinds: the kinds of values, given for both traces.
        sizes: the numbers of examples of both.
        trace: traces the loss for so many examples.
    """
    one, two = (ratio_in(flat, result) for flat, result in zip(flats, results, strict=True))
    if one is None or two is None or len(one.numerators) != len(two.numerators):
        return None
    if not (one.is_safe and two.is_safe):
        return None
    if one.bounds != two.bounds:
        return None
    for flat, ratio in zip(flats, (one, two), strict=True):
        made_of = flat.made_of([ratio.count])
        if any(value < flat.input_count and value not in allowed for value in made_of):
            return None
    *numerators, count = kinds(
        [*zip(one.numerators, two.numerators, strict=True), (one.count, two.count)]
    )
    over, of_count = {of_total(one, sizes) for one in numerators}, of_total(count, sizes)
    of_numerators = over.pop()
    if over or of_numerators is None or of_count is None:
        return None
    return Divisor((one, two), of_numerators, of_count, trace)
