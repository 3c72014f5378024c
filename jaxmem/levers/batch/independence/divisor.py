"""What the slices of a quotient are weighted by."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.widths import promote_at_least
from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    Kind,
    Sizes,
    is_same,
    sum_or_mean,
)
from jaxmem.levers.batch.independence.ratios import Ratio, drop_quotients, ratio_in


class ParameterOnlyTerms(NamedTuple):
    """What is made of the parameters alone and added to quotients: in the loss, with its gradient,
    and in metrics by their paths."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    gradients: Any


@dataclasses.dataclass(frozen=True)
class Divisor:
    """What the slices of a loss are weighted by.

    Attributes:
        ratios: the loss in the traces for a batch and for a slice.
        of_numerators, of_count: ``"mean"`` or ``"sum"``: what the values that are divided, and the
            count that they are divided by, are over examples.
        has_rest: whether something of the parameters alone is added to the quotients.
        batch: the inputs of the program that are the batch.
        trace: the program of the loss for so many examples.
        metrics: the results that have the same divisor, by the paths of the metrics.
    """

    ratios: tuple[Ratio, Ratio]
    of_numerators: str
    of_count: str
    has_rest: bool
    batch: range
    trace: Callable[[int], jaxprs.FlatJaxpr]
    metrics: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def with_metrics(self, metrics: Mapping[str, tuple[int, "Divisor"]]) -> "Divisor":
        """With metrics that it divides too: which result each is, and what it has as a divisor."""
        rests = [self.has_rest, *(other.has_rest for _, other in metrics.values())]
        places = {path: at for path, (at, _) in metrics.items()}
        return dataclasses.replace(self, metrics=places, has_rest=any(rests))

    def divides(self, other: "Divisor", flats: Sequence[jaxprs.FlatJaxpr]) -> bool:
        """Whether another result is a quotient by the same divisor."""
        return (
            self.of_numerators == other.of_numerators
            and self.of_count == other.of_count
            and all(
                one.has_same_divisor(two, flat)
                for flat, one, two in zip(flats, self.ratios, other.ratios, strict=True)
            )
        )

    def slice_weight(self, part: Any, share: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weight of a slice that has this share of the examples, and its part of the count.

        If a slice is divided by 0, though it does not count zeros alone, nothing tells what was
        divided: its weight is NaN.
        """
        leaves = [leaf for leaf in jax.tree.leaves(part) if jaxprs.is_array(leaf)]
        flat = self.trace(leaves[0].shape[0])
        ratio = _ratio(flat, 0, self.batch)
        wanted = [ratio.count] if ratio.summed is None else [ratio.count, ratio.summed]
        values = _evaluated(flat, wanted, [*flat.consts, *leaves])
        count = values[ratio.count]
        weight = ratio.bounded(count)
        weight = weight.astype(promote_at_least(jnp.float32, weight.dtype))
        empty = ratio.summed is not None and jnp.all(values[wanted[-1]] == 0)
        lost = (weight == 0) | ratio.is_zero(count)
        weight = jnp.where(lost & jnp.logical_not(empty), jnp.nan, weight)
        if jnp.issubdtype(count.dtype, jnp.inexact):
            count = count.astype(promote_at_least(jnp.float32, count.dtype))
        if self.of_numerators == "mean":
            weight = weight * share.astype(weight.dtype)
        if self.of_count == "mean":
            count = count * share.astype(count.dtype)
        return weight, count

    def total_weight(self, count: jax.Array, size: int) -> jax.Array:
        """What the whole batch is divided by if this is counted. It is bounded as slices of a size
        are. (1, where a test says that nothing is divided.)"""
        ratio = _ratio(self.trace(size), 0, self.batch)
        divisor = ratio.bounded(count)
        return jnp.where(ratio.is_zero(count), jnp.ones_like(divisor), divisor)

    def rest(self, params: Any, size: int) -> ParameterOnlyTerms | None:
        """By the program for slices of a size; None: there is none."""
        if not self.has_rest:
            return None
        flat = self.trace(size)
        places = [0, *self.metrics.values()]
        quotients = {one for at in places for one in _ratio(flat, at, self.batch).quotients}
        flat = drop_quotients(flat, quotients)

        def loss(params):
            leaves = [leaf for leaf in jax.tree.leaves(params) if jaxprs.is_array(leaf)]
            inputs = [*flat.consts, *[None] * len(self.batch), *leaves]
            results = [flat.outputs[at] for at in places]
            values = _evaluated(flat, results, inputs)
            found, *others = (jnp.asarray(jaxprs.read(values, one)) for one in results)
            return found, (found, dict(zip(self.metrics, others, strict=True)))

        gradients, (found, metrics) = jax.grad(loss, has_aux=True)(params)
        return ParameterOnlyTerms(found, metrics, gradients)


def _evaluated(flat: jaxprs.FlatJaxpr, wanted: Sequence[Any], inputs: Sequence[Any]) -> dict:
    """The values of a program that some are made of."""
    parts = flat.made_of(wanted)
    values = dict(enumerate(inputs))
    flat.run((step for step in flat.steps if not parts.isdisjoint(step.outputs)), values)
    return values


def _ratio(flat: jaxprs.FlatJaxpr, at: int, batch: range) -> Ratio:
    ratio = ratio_in(flat, flat.outputs[at], batch)
    if ratio is None:
        raise JaxmemError(
            "The loss is the quotient of two sums when it is traced once, and none when it is "
            "traced again with the same shapes: let it be the same function each time."
        )
    return ratio


def divisor_of(
    flats: tuple[jaxprs.FlatJaxpr, jaxprs.FlatJaxpr],
    at: int,
    batch: range,
    params: range,
    kinds: Callable[[Sequence[jaxprs.FlatJaxpr], list[tuple[Any, Any]]], list[Kind]],
    sizes: Sizes,
    trace: Callable[[int], jaxprs.FlatJaxpr],
) -> Divisor | None:
    """What divides a result; None: it is no quotient of two sums over the examples.

    Args:
        flats: the traces.
        at: which result.
        batch, params: the inputs that they are. What is closed over comes before.
        kinds: the kinds of values, given for both of some traces.
        sizes: the numbers of examples of both.
        trace: traces the loss for so many examples.
    """
    one, two = (ratio_in(flat, flat.outputs[at], batch) for flat in flats)
    if one is None or two is None or len(one.numerators) != len(two.numerators):
        return None
    if not (one.is_safe and two.is_safe):
        return None
    if (one.bounds, one.zeros) != (two.bounds, two.zeros):
        return None
    closed_over = range(batch.start)
    for flat, ratio in zip(flats, (one, two), strict=True):
        if not _inputs(flat, ratio.count) <= {*closed_over, *batch}:
            return None
    pairs = [*zip(one.numerators, two.numerators, strict=True), (one.count, two.count)]
    *numerators, count = kinds(flats, pairs)
    over, of_count = {sum_or_mean(one, sizes) for one in numerators}, sum_or_mean(count, sizes)
    of_numerators = over.pop()
    if over or of_numerators is None or of_count is None:
        return None
    others = [
        drop_quotients(flat, {*ratio.quotients})
        for flat, ratio in zip(flats, (one, two), strict=True)
    ]
    results = others[0].outputs[at], others[1].outputs[at]
    (rest,) = kinds(others, [results])
    if not isinstance(rest, BatchInvariant) or rest.uses_rng or not is_same(rest):
        return None
    for flat, result in zip(others, results, strict=True):
        if not _inputs(flat, result) <= {*closed_over, *params}:
            return None
    has_rest = not rest.is_zero
    return Divisor((one, two), of_numerators, of_count, has_rest, batch, trace)


def _inputs(flat: jaxprs.FlatJaxpr, value: Any) -> set[int]:
    """The inputs that a value is made of."""
    return {one for one in flat.made_of([value]) if one < flat.input_count}
