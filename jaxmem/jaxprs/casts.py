"""Casts to a wider dtype and back: XLA has what was there before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxmem.jaxprs.flat import FlatStep

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal

_CAST = "convert_element_type"


def widened_from(
    equation: JaxprEqn, inputs: Sequence[int | Literal], makers: Mapping[int, FlatStep]
) -> tuple[int | Literal, ...]:
    """The value that a cast of a wider one brings back to the last bit, alone; else nothing."""
    if equation.primitive.name != _CAST or not isinstance(inputs[0], int):
        return ()
    maker = makers.get(inputs[0])
    if maker is None or maker.primitive != _CAST:
        return ()
    before, wide, after = (
        variable.aval
        for variable in (maker.equation.invars[0], equation.invars[0], equation.outvars[0])
    )
    brought_back = before.dtype == after.dtype and _holds(wide.dtype, before.dtype)
    return maker.inputs if brought_back else ()


def _holds(wide, narrow) -> bool:
    """Whether one dtype has every value of another."""
    try:
        return np.can_cast(narrow, wide, "safe")
    except TypeError:  # of a dtype that is no number
        return False


def without_unread_casts(
    steps: Sequence[FlatStep], outputs: Sequence[int | Literal]
) -> list[FlatStep]:
    """Steps without the casts whose results nothing reads."""
    read = {value for value in outputs if isinstance(value, int)}
    read.update(value for step in steps for value in step.uses)
    return [one for one in steps if one.primitive != _CAST or not read.isdisjoint(one.outputs)]
