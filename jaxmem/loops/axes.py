"""The axes of a batch, where a function and its derivative are batched apart."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxmem.jaxprs import internals


def in_front(values: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The values as they are. Under `jax.vmap` of any of the operands all have the axis of the
    batch, as their first.

    `jax.vmap` batches a `jax.custom_jvp` and its rule apart, and takes the axes of the first for
    those of the results of the second: both have to put them in the same place.
    """
    return _in_front().bind(*values, *operands, count=len(values)) if values else []


@functools.cache
def _in_front() -> Primitive:
    """Made when it is first bound: its rules are registered with JAX's internals."""
    identity = Primitive("batch_in_front")
    identity.multiple_results = True
    identity.def_impl(lambda *values, count: list(values[:count]))
    identity.def_abstract_eval(lambda *values, count: list(values[:count]))
    internals.ad.primitive_jvps[identity] = lambda values, tangents, count: (
        identity.bind(*values, count=count),
        tangents[:count],
    )
    internals.batching.primitive_batchers[identity] = _batched
    internals.mlir.register_lowering(identity, lambda _, *values, count: list(values[:count]))
    return identity


def _batched(values, axes, *, count: int):
    (size,) = {x.shape[at] for x, at in zip(values, axes, strict=True) if at is not None}
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if at is None else jnp.moveaxis(x, at, 0)
        for x, at in zip(values[:count], axes[:count], strict=True)
    ]
    rest = [x if at is None else jnp.moveaxis(x, at, 0) for x, at in zip(values, axes, strict=True)]
    return _in_front().bind(*moved, *rest[count:], count=count), [0] * count
