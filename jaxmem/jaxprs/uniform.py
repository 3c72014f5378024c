"""Closed-over arrays of one value (a mask of ones, a first state of zeros): compilers have that
value in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var

# Elements that are looked at before the others. Chosen: most arrays differ in them.
_FIRST = 64
# Bytes of an array that is fetched from an accelerator to be looked at. Chosen: larger ones are
# weights, whose values differ.
_FETCHED = 64 * 2**20


def part_uniform(
    constants: Iterable[tuple[Var, Any]],
) -> tuple[list[JaxprEqn], list[tuple[Var, Any]]]:
    """Of the constants of a jaxpr, each with its variable: what makes those of one value, and the
    others."""
    made, kept = [], []
    for variable, value in constants:
        element = _element_of(value)
        if element is None:
            kept.append((variable, value))
            continue
        aval = variable.aval
        (equation,) = jax.make_jaxpr(
            lambda e=element, a=aval: jax.lax.full(a.shape, e, a.dtype)
        )().eqns
        made.append(equation.replace(outvars=[variable]))
    return made, kept


def _element_of(value: Any) -> np.generic | None:
    """The element that all others of an array on one device are equal to, by their bits."""
    if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
        return None
    if not value.ndim or value.size < 2 or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    if isinstance(value, jax.Array) and not _is_at_hand(value):
        return None
    elements = np.ravel(np.asarray(value))
    for some in (elements[:_FIRST], elements):
        bits = np.ascontiguousarray(some).view(np.uint8).reshape(some.size, -1)
        if (bits != bits[0]).any():
            return None
    return elements[0]


def _is_at_hand(array: jax.Array) -> bool:
    if array.is_deleted() or len(array.devices()) > 1:
        return False
    (device,) = array.devices()
    return device.platform == "cpu" or array.nbytes <= _FETCHED
