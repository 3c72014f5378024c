"""Values that are all zeros, whatever a program is given."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

import numpy as np

from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.operands import is_opaque

if TYPE_CHECKING:
    from jax.extend.core import Literal

# What they make of zeros is zeros.
_KEPT = frozenset("broadcast_in_dim convert_element_type reshape".split())


def zeros_of(flat: FlatJaxpr) -> set[int]:
    """The values of a program that are all zeros, as far as is seen: literals in other shapes, and
    what is multiplied with them."""
    zeros: set[int] = set()
    for step in flat.steps:
        if _is_zero(step, zeros):
            zeros.update(step.outputs)
    return zeros


def all_among(inputs: Iterable[int | Literal], known: Set[int]) -> bool:
    """Whether each of some operands is a known value or a literal of zeros."""
    return all(one in known if isinstance(one, int) else _is_literal_zero(one) for one in inputs)


def _is_zero(step: FlatStep, zeros: Set[int]) -> bool:
    if step.primitive == "mul":
        return any(all_among([one], zeros) for one in step.inputs)
    return step.primitive in _KEPT and all_among(step.inputs[:1], zeros)


def _is_literal_zero(literal: Literal) -> bool:
    return not is_opaque(literal.val) and not np.any(literal.val)
