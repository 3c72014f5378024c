"""The question that is asked of the proof, and its answer."""

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.divisor import Divisor, divisor_of
from jaxmem.levers.batch.independence.kinds import (
    DIFFERENT_PROGRAM,
    BatchInvariant,
    Kind,
    NotProved,
    PerExample,
    Sizes,
    first_line,
    is_same,
    mean_growth,
    same_growth,
    sum_or_mean,
)
from jaxmem.levers.batch.independence.layout import Shapes, resized_axes
from jaxmem.levers.batch.independence.states import given_state, state_after
from jaxmem.levers.batch.independence.walk import Walk


class Metric(NamedTuple):
    """What a metric beside the loss is over the examples.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``; ``"weighted"``: as the loss, whose divisor it has;
            ``"rows"``: a row for each example, along the first axis; ``"same"``: nothing of the
            batch; None: ``why`` says what is in the way.
        why: a clause.
        shape, dtype: for the whole batch.
        form: ``"rows"``: along the first axis, and there alone, it has as many as there are
            examples; ``"whole"``: its shape does not depend on the batch; ``"mixed"``: it does.
    """

    reduction: str | None
    why: str
    shape: tuple[int, ...]
    dtype: Any
    form: str

    @property
    def unweighted(self) -> "Metric":
        """Of slices that are not weighted by the divisor."""
        if self.reduction != "weighted":
            return self
        return self._replace(reduction=None, why="it is a mean over something else than examples")


class Proof(NamedTuple):
    """``reduction`` is ``"mean"``, ``"sum"``, ``"weighted"`` (slices are averaged, and weigh what
    the ``divisor`` says), or None where ``why`` says what is in the way. ``metrics`` are those
    beside the loss, by path. ``state`` is a clause that says how the model state may be another
    than after the whole batch; the loss does not hang on that. ``refused`` is what the loss says of
    a slice, if it takes none."""

    reduction: str | None
    why: str = ""
    state: str = ""
    metrics: Mapping[str, Metric] = types.MappingProxyType({})
    divisor: Divisor | None = None
    refused: str = ""


def reduction_of(
    loss: Callable,
    batch: Any,
    slices: Collection[int],
    params: Any,
    model_state: Any = None,
    key: Any = None,
) -> Proof:
    """What a loss is over the examples of a batch, the first axis of its arrays.

    Args:
        loss: ``loss(params, batch, model_state, key)``: a scalar, the new model state and, if they
            are asked for too, metrics.
        batch: arrays, real or abstract, as all arguments may be.
        slices: the sizes of slices for which that is to hold.
        params, model_state, key: as for the loss; from ``key`` each slice draws other numbers.
    """
    leaves = jax.tree.leaves(batch)
    shapes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(shapes) != 1 or () in shapes:
        return Proof(None, "the arrays of the batch have no first axis of examples in common")
    ((size,),) = shapes
    found = Proof("mean")
    arguments = batch, params, model_state, key
    later = _later(loss, jax.tree.map(_abstract, arguments))
    parts = sorted(set(slices) - {size})
    traced: list[jaxprs.FlatJaxpr] = []
    failures: dict[int, str] = {}
    for one in (size, *parts) if parts else ():
        try:
            traced.append(_traced(loss, one, *arguments))
        except Exception as error:
            failures[one] = first_line(error)
    if failures:
        said = next(iter(failures.values()))
        refused = next((text for one, text in failures.items() if one != size), "")
        return Proof(
            None, f"it cannot be traced with a slice of the batch ({said})", refused=refused
        )
    for part, sliced in zip(parts, traced[1:], strict=True):
        proof = _compared(traced[0], sliced, (size, part), arguments, later)
        found = proof if part == parts[0] else _both(found, proof)
        if found.reduction is None and not found.metrics:
            break  # no other size can change that
    return found


def _later(loss: Callable, arguments: tuple) -> Callable[[int], jaxprs.FlatJaxpr]:
    """Traces the loss for so many examples, once, and keeps no array alive until then."""
    return functools.cache(lambda size: _traced(loss, size, *arguments))


def _abstract(leaf: Any) -> Any:
    """What is traced of an argument, without its numbers."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    return jaxprs.struct_of(jax.typeof(leaf))


def _both(one: Proof, other: Proof) -> Proof:
    """What is proved for two sizes of slices."""
    metrics = dict(one.metrics)
    for path, metric in other.metrics.items():
        before = metrics.setdefault(path, metric)
        if before.reduction not in (None, metric.reduction):
            metrics[path] = metric._replace(reduction=None, why=metric.why or DIFFERENT_PROGRAM.why)
    found = one if one.reduction is None else other
    if one.reduction and other.reduction and not _is_same_rule(one, other):
        found = Proof(None, DIFFERENT_PROGRAM.why)
    return found._replace(metrics=metrics, state=one.state or other.state)


def _is_same_rule(one: Proof, other: Proof) -> bool:
    divisors = [
        proof.divisor and (proof.divisor.of_numerators, proof.divisor.of_count)
        for proof in (one, other)
    ]
    return one.reduction == other.reduction and divisors[0] == divisors[1]


def _traced(loss, size, batch, params, model_state, key) -> jaxprs.FlatJaxpr:
    def resized(leaf):
        return jax.ShapeDtypeStruct((size, *jnp.shape(leaf)[1:]), jnp.result_type(leaf))

    def call(batch, params, model_state, key):
        return loss(params, batch, model_state, key)

    arguments = jax.tree.map(resized, batch), params, model_state, key
    leaves, call = jaxprs.split_arrays(call, arguments, {})
    return jaxprs.flatten(call, leaves, open_regions=True)


def _compared(whole, sliced, sizes: Sizes, arguments: tuple, later: Callable) -> Proof:
    batch, params, state, key = (
        [leaf for leaf in jax.tree.leaves(part) if jaxprs.is_array(leaf)] for part in arguments
    )
    count = len(batch) + len(params)
    first = whole.input_count - count - len(state) - len(key)
    start = first + count
    state_numbers = range(start, start + len(state))
    new_state = zip(*(flat.outputs[1 : 1 + len(state)] for flat in (whole, sliced)), strict=True)
    given: list[Kind] = [*[PerExample(0)] * len(batch), *[BatchInvariant()] * len(params)]
    for number, new in zip(state_numbers, new_state, strict=True):
        given.append(given_state(whole.avals[number], changed=new != (number, number)))
    given += [BatchInvariant(uses_rng=True)] * len(key)

    # Each by itself: one that is another program for a slice says nothing of the others.
    def kinds_in(flats, pairs: list[tuple[Any, Any]], differentiated: bool = False) -> list[Kind]:
        outputs = zip(flats, zip(*pairs, strict=True), strict=True)
        one, two = (dataclasses.replace(flat, outputs=[*made]) for flat, made in outputs)
        return Walk((one, two), sizes, differentiated).kinds(given)

    kinds = functools.partial(kinds_in, (whole, sliced))
    (kind,) = kinds([(whole.outputs[0], sliced.outputs[0])], differentiated=True)
    proof = Proof(None, kind.why) if isinstance(kind, NotProved) else _told(kind, sizes)
    divided = functools.partial(
        divisor_of,
        (whole, sliced),
        batch=range(first, first + len(batch)),
        params=range(first + len(batch), start),
        sizes=sizes,
        trace=later,
    )
    if proof.reduction is None:
        divisor = divided(0, kinds=functools.partial(kinds_in, differentiated=True))
        proof = Proof("weighted", divisor=divisor) if divisor else proof
    proof = proof._replace(state=state_after((whole, sliced), state_numbers, sizes, kinds))
    if whole.out_tree != sliced.out_tree:
        return proof
    metrics, alike = {}, {}  # results that are divided as the loss is
    for path, at in _numbers_of_metrics(whole.out_tree):
        (kind,) = kinds([(whole.outputs[at], sliced.outputs[at])])
        one, two = (flat.aval(flat.outputs[at]) for flat in (whole, sliced))
        metrics[path] = _metric(kind, one, two, sizes)
        if metrics[path].reduction is None and proof.divisor is not None:
            other = divided(at, kinds=kinds_in)
            if other is not None and proof.divisor.divides(other, (whole, sliced)):
                metrics[path] = metrics[path]._replace(reduction="weighted", why="")
                alike[path] = at, other
    divisor = proof.divisor and proof.divisor.with_metrics(alike)
    return proof._replace(metrics=metrics, divisor=divisor)


def _numbers_of_metrics(tree: Any) -> list[tuple[str, int]]:
    """The path of each metric, and which of a function's results it is."""
    results = jax.tree.unflatten(tree, range(tree.num_leaves))
    metrics = results[2] if len(results) > 2 else {}
    leaves = jax.tree_util.tree_leaves_with_path(metrics)
    return [(jax.tree_util.keystr(path), at) for path, at in leaves]


def _metric(kind: Kind, whole: Any, sliced: Any, sizes: Sizes) -> Metric:
    """What a metric of some kind is, of its abstract values for the batch and for a slice."""
    shapes: Shapes = tuple(whole.shape), tuple(sliced.shape)
    form = "whole" if shapes[0] == shapes[1] else "mixed"
    same_rank = len(shapes[0]) == len(shapes[1])
    if same_rank and resized_axes(shapes) == [0] and (shapes[0][0], shapes[1][0]) == sizes:
        form = "rows"
    proof = Proof(None, "it has no row for each example along its first axis")
    if isinstance(kind, NotProved) or not same_rank:
        proof = Proof(None, kind.why if isinstance(kind, NotProved) else DIFFERENT_PROGRAM.why)
    elif form != "whole":
        if _is_rows(kind) and form == "rows":
            proof = Proof("rows")
    elif isinstance(kind, BatchInvariant) and is_same(kind) and not kind.uses_rng:
        proof = Proof("same")
    elif (
        isinstance(kind, BatchInvariant)
        and same_growth(kind.growth, 1 / mean_growth(sizes))
        and not kind.uses_model_state
    ):
        proof = Proof("sum")
    else:
        proof = _told(kind, sizes)
        if proof.reduction == "mean" and not jnp.issubdtype(whole.dtype, jnp.inexact):
            proof = Proof(None, "whole numbers have no mean")
    return Metric(proof.reduction, proof.why, shapes[0], whole.dtype, form)


def _is_rows(kind: Kind) -> bool:
    """Whether a value along whose first axis there is one index for each example has its row."""
    if isinstance(kind, PerExample):
        return kind.axis == 0 and kind.inner in (1, None) and same_growth(kind.growth, 1)
    return is_same(kind)


def _told(kind: Kind, sizes: Sizes) -> Proof:
    if isinstance(kind, BatchInvariant) and same_growth(kind.growth, 1):
        moved = "it uses a model state that each slice changes"
        return Proof(None, moved) if kind.uses_model_state else Proof("mean")
    if reduction := sum_or_mean(kind, sizes):
        return Proof(reduction)
    return Proof(None, "it divides the sum over its examples by another number than theirs")
