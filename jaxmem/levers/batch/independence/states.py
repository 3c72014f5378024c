"""What becomes of a model state that slices of a batch change one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.batch_invariant import RANDOM
from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    BatchReduction,
    Kind,
    NotProved,
    Sizes,
    is_same,
    mean_growth,
    same_growth,
)

Flats = tuple[jaxprs.FlatJaxpr, jaxprs.FlatJaxpr]
Makers = Mapping[int, jaxprs.FlatStep]  # of each value of a trace
COUNTS = "it counts calls, and each slice is one"
CHANGES = "each slice changes it"
_SUMMED = jnp.integer, jnp.inexact


def given_state(aval: Any, changed: bool) -> BatchInvariant:
    """Of a model state: what a step changes is another in each slice, and a key draws others."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return BatchInvariant(uses_rng=changed)
    return BatchInvariant(uses_model_state=changed)


def state_after(
    flats: Flats, numbers: Sequence[int], sizes: Sizes, kinds_of: Callable[[list], list[Kind]]
) -> str:
    """How the state after the slices is another than after the whole batch, as a clause.

    Args:
        flats: traces for the batch and for a slice, whose results after the first are the new
            state.
        numbers: of the state's inputs, in both.
        sizes: the numbers of examples of both.
        kinds_of: the kinds of some values, which are given for both traces.
    """
    made = zip(*(flat.outputs[1 : 1 + len(numbers)] for flat in flats), strict=True)
    pairs = zip(numbers, made, strict=True)
    changed = [(number, pair) for number, pair in pairs if pair != (number, number)]
    if not changed:
        return ""
    # A count of what is in the batch comes to the same: look at what is added.
    makers = [flat.makers() for flat in flats]
    added = [_added(makers, number, pair) for number, pair in changed]
    looked_at = [one or pair for one, (_, pair) in zip(added, changed, strict=True)]
    kinds = kinds_of(looked_at)
    for (number, _), one, kind in zip(changed, added, kinds, strict=True):
        said = _of_added(kind, sizes) if one else _of_new(kind)
        if said and not (isinstance(kind, BatchInvariant) and _draws(flats[0].steps, {number})):
            return said
    return ""


def _of_added(kind: Kind, sizes: Sizes) -> str:
    """Of a state that something of this kind is added to."""
    if isinstance(kind, BatchInvariant) and kind.uses_rng:
        return CHANGES
    if isinstance(kind, BatchInvariant) and not kind.uses_model_state:
        counts_examples = same_growth(kind.growth, 1 / mean_growth(sizes))
        return "" if kind.is_zero or counts_examples else COUNTS
    if isinstance(kind, BatchReduction) and same_growth(kind.growth, 1):
        return ""
    return _of_new(kind) or CHANGES


def _of_new(kind: Kind) -> str:
    """Of a state whose new value is of this kind."""
    if is_same(kind):
        return ""
    if isinstance(kind, BatchInvariant) and kind.uses_model_state:
        return CHANGES
    why = f": {kind.why}" if isinstance(kind, NotProved) else ""
    return f"it is made from the batch{why}"


def _added(makers: Sequence[Makers], number: int, new: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """What is added to an input of both traces for its new value."""
    found = [_other_term(of_trace, number, one) for of_trace, one in zip(makers, new, strict=True)]
    return None if None in found else (found[0], found[1])


def _other_term(makers: Makers, number: int, value: Any) -> Any:
    made = _converted(makers, value)
    step = makers.get(made) if made is not None else None
    if step is None or step.primitive not in ("add", "add_any"):
        return None
    one, other = step.inputs
    if _converted(makers, one) == number:
        return other
    return one if _converted(makers, other) == number else None


def _converted(makers: Makers, value: Any) -> int | None:
    """The number of what a value is, or was before conversions that sums may pass through."""
    while isinstance(value, int) and value in makers:
        step = makers[value]
        if step.primitive != "convert_element_type":
            break
        dtypes = [one.aval.dtype for one in (*step.equation.invars, *step.equation.outvars)]
        if not any(all(jnp.issubdtype(one, kind) for one in dtypes) for kind in _SUMMED):
            break
        value = step.inputs[0]
    return value if isinstance(value, int) else None


def _draws(steps: Sequence[jaxprs.FlatStep], made: set[int]) -> bool:
    """Whether random numbers are drawn by a count, so that each slice should have its own."""
    for step in steps:
        if not made.isdisjoint(step.uses):
            if _is_random(step.equation):
                return True
            made.update(step.outputs)
    return False


def _is_random(equation: Any) -> bool:
    inner = (one for jaxpr in jaxprs.inner_jaxprs(equation) for one in jaxpr.eqns)
    return equation.primitive.name in RANDOM or any(map(_is_random, inner))
