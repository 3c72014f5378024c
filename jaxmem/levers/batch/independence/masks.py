"""Sums of masks, and sums that a mask leaves nothing of."""

from typing import Any

import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.scalars import (
    ELEMENTWISE,
    LINEAR,
    SAME,
    Makers,
    are_alike,
    is_multiple,
    number_of,
)


def summed_for(makers: Makers, count: Any) -> int | None:
    """What is summed up for a count, from all its elements, in one step or in several."""
    summed = None
    while step := makers.get(count) if isinstance(count, int) else None:
        if step.primitive != "reduce_sum" and not (step.primitive in LINEAR or is_multiple(step)):
            break
        count = next(step.uses, None)
        summed = count if step.primitive == "reduce_sum" else summed
    return summed


def is_masked(makers: Makers, numerator: Any, mask: int) -> bool:
    """Whether a value is 0 where a mask is 0 all over: it adds up sums of products with the mask,
    or, of elements that lie alike, with all that the mask is a product of."""
    of_mask = _mask_factors(makers, mask, exact=True)
    pending: list[Any] = [numerator]
    while pending:
        value = pending.pop()
        step = makers.get(value) if isinstance(value, int) else None
        if step is None:
            return False
        if step.primitive in ("reduce_sum", "dot_general"):
            factors = [pair for one in step.inputs for pair in _mask_factors(makers, one)]
            aligned = step.primitive == "reduce_sum"
            if _contains_factors(makers, factors, of_mask, aligned):
                continue
        if step.primitive in ("add", "add_any", "sub"):
            pending.extend(step.inputs)
        elif step.primitive in LINEAR | {"reduce_sum"} or is_multiple(step):
            pending.append(step.inputs[0] if len(step.inputs) == 1 else next(step.uses))
        else:
            return False
    return True


def _contains_factors(makers: Makers, factors: list, of_mask: list, aligned: bool) -> bool:
    """Whether all factors of a mask are among others; several, if elements lie alike in all."""
    alone = len(of_mask) == 1
    return all(
        any(
            are_alike(makers, one, other) and (alone or (aligned and in_order and also))
            for other, also in factors
        )
        for one, in_order in of_mask
    )


def _mask_factors(makers: Makers, value: Any, exact: bool = False) -> list[tuple[Any, bool]]:
    """What a value is 0 with, whatever its shape and its dtype: its factors, what they are
    conversions of, and itself; and whether their elements lie as the value's do. ``exact``: the
    least of them that are not 0 unless the value is."""
    found, seen, pending = [], set(), [(value, True)]
    while pending:
        value, in_order = pending.pop()
        step = makers.get(value) if isinstance(value, int) else None
        if (exact and number_of(makers, value)) or (step is not None and (value, in_order) in seen):
            continue
        if step is not None:
            seen.add((value, in_order))
        under: list[Any] = []
        if step is not None and step.primitive in SAME and not (exact and _makes_zeros(step)):
            in_order_under = in_order and step.primitive in ELEMENTWISE
            under = [(step.inputs[0], in_order_under)]
        elif step is not None and step.primitive == "mul":
            under = [(one, in_order) for one in step.inputs]
        elif step is not None and not exact and _is_masked_select(makers, step):
            under = [(step.inputs[at], in_order) for at in (0, 2)]
        if not (exact and under):
            found.append((value, in_order))
        pending.extend(under)
    return found


def _makes_zeros(step: jaxprs.FlatStep) -> bool:
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


def _is_masked_select(makers: Makers, step: jaxprs.FlatStep) -> bool:
    """Whether it is 0 where its condition does not hold."""
    chooses = step.primitive == "select_n" and len(step.inputs) == 3
    return chooses and number_of(makers, step.inputs[1]) == 0
