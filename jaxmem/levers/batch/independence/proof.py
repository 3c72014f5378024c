"""The question that is asked of the proof, and its answer."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import (
    Each,
    Free,
    Kind,
    Sizes,
    Total,
    Unproved,
    close,
    first_line,
    mean_growth,
)
from jaxmem.levers.batch.independence.walk import Walk


class Proof(NamedTuple):
    """``reduction`` is ``"mean"`` or ``"sum"``, or None where ``why`` says what is in the way."""

    reduction: str | None
    why: str = ""


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
        loss: ``loss(params, batch, model_state, key)``, a scalar and the new model state.
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
    whole: jaxprs.FlatJaxpr | None = None
    for part in sorted(set(slices) - {size}):
        try:
            whole = whole or _traced(loss, size, batch, params, model_state, key)
            sliced = _traced(loss, part, batch, params, model_state, key)
        except Exception as error:
            said = f"it cannot be traced with a slice of the batch ({first_line(error)})"
            return Proof(None, said)
        proof = _compared(whole, sliced, (size, part), (batch, params, model_state, key))
        if proof.reduction is None:
            return proof
        found = proof
    return found


def _traced(loss, size, batch, params, model_state, key) -> jaxprs.FlatJaxpr:
    def resized(leaf):
        return jax.ShapeDtypeStruct((size, *jnp.shape(leaf)[1:]), jnp.result_type(leaf))

    def call(batch, params, model_state, key):
        return loss(params, batch, model_state, key)

    arguments = jax.tree.map(resized, batch), params, model_state, key
    leaves, call = jaxprs.split_arrays(call, arguments, {})
    return jaxprs.flatten(call, leaves, open_regions=True)


def _compared(whole, sliced, sizes: Sizes, arguments: tuple) -> Proof:
    batch, params, state, key = (
        [leaf for leaf in jax.tree.leaves(part) if jaxprs.is_array(leaf)] for part in arguments
    )
    count = len(batch) + len(params)
    first = whole.input_count - count - len(state) - len(key)
    start = first + count
    state_numbers = range(start, start + len(state))
    new_state = whole.outputs[1 : 1 + len(state)]
    given: list[Kind] = [*[Each(0)] * len(batch), *[Free()] * len(params)]
    for number, new in zip(state_numbers, new_state, strict=True):
        given.append(_of_state(whole.avals[number], changed=new != number))
    given += [Free(drawn=True)] * len(key)
    found = Walk((whole, sliced), sizes).kinds(given)
    if isinstance(found[0], Unproved):
        return Proof(None, found[0].why)
    for number, new, kind in zip(state_numbers, new_state, found[1:], strict=True):
        if new == number:
            continue
        exact = not jnp.issubdtype(whole.avals[number].dtype, jnp.inexact)
        if not (exact and isinstance(kind, Free)):
            why = kind.why if isinstance(kind, Unproved) else "each slice changes it"
            return Proof(None, f"its model state is made from the batch: {why}")
    return _told(found[0], sizes)


def _of_state(aval, changed: bool) -> Free:
    """Of a model state: what a step changes is another in each slice, and a key draws others."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return Free(drawn=changed)
    return Free(moved=changed)


def _told(kind: Kind, sizes: Sizes) -> Proof:
    if isinstance(kind, Free) and close(kind.growth, 1):
        moved = "it uses a model state that each slice changes"
        return Proof(None, moved) if kind.moved else Proof("mean")
    if isinstance(kind, Total) and close(kind.growth, mean_growth(sizes)):
        return Proof("mean")
    if isinstance(kind, Total) and close(kind.growth, 1):
        return Proof("sum")
    return Proof(None, "it divides the sum over its examples by another number than theirs")
