"""The axes of a batch, where a function and its derivative are batched apart."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.barriers import is_linear

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def in_front(values: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The values as they are. Under `jax.vmap` of any of the operands all have the axis of the
    batch, as their first.

    `jax.vmap` batches a `jax.custom_jvp` and its rule apart, and takes the axes of the first for
    those of the results of the second: both have to put them in the same place.
    """
    # Each by itself: what nothing reads is not made.
    return [_in_front().bind(value, *operands) for value in values]


@functools.cache
def _in_front() -> Primitive:
    """Made when it is first bound: its rules are registered with JAX's internals."""
    identity = internals.Primitive("batch_in_front")
    identity.def_impl(lambda value, *operands: value)
    identity.def_abstract_eval(lambda value, *operands: value)
    internals.ad.primitive_jvps[identity] = lambda values, tangents: (
        identity.bind(*values),
        tangents[0],
    )
    internals.ad.primitive_transposes[identity] = _transposed
    if internals.optional("batching"):
        internals.batching.primitive_batchers[identity] = _batched
    internals.mlir.register_lowering(identity, lambda _, value, *operands: [value])
    return identity


def _transposed(cotangent, value, *operands):
    """The value's alone: the operands are there for their axes."""
    own = cotangent if is_linear(value) else None
    return [own, *[None] * len(operands)]


def _batched(values, axes):
    (size,) = {x.shape[at] for x, at in zip(values, axes, strict=True) if at is not None}
    front = [
        x if at is None else jnp.moveaxis(x, at, 0) for x, at in zip(values, axes, strict=True)
    ]
    if axes[0] is None:
        front[0] = jnp.broadcast_to(values[0], (size, *values[0].shape))
    return _in_front().bind(*front), 0
