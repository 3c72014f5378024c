"""Bytes of abstract arrays on each device, whole and in slices."""

import math
from typing import Any

import jax

_MOST_SLICES = 64  # chosen: seven counts to search; at half six, at twice eight


def slice_counts(batch: Any, devices: int) -> list[int]:
    """Counts of microbatches: 1, and the next divisors of each device's part that are twice as
    many."""
    sizes = {leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        return [1]  # nothing to cut along
    size, counts = sizes.pop() // devices, [1]
    for count in range(2, min(size, _MOST_SLICES) + 1):
        if size % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return counts


def slice_of(leaf: Any, count: int) -> jax.ShapeDtypeStruct:
    if count == 1:
        return leaf
    shape = (leaf.shape[0] // count, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)


def _shard_shape(leaf: Any) -> tuple[int, ...]:
    """An abstract array's shape on each device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def whole(leaf: Any) -> jax.ShapeDtypeStruct:
    """An abstract array on one device."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def bytes_of(tree: Any) -> int:
    """Of abstract arrays, on each device."""
    return sum(
        math.prod(_shard_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def bytes_together(tree: Any) -> int:
    """Of abstract arrays, as if one device had all of each."""
    return bytes_of(jax.tree.map(whole, tree))


def bytes_in_float32(gradients: Any) -> int:
    """Bytes on each device of the gradients' sum over microbatches."""
    return sum(
        math.prod(_shard_shape(leaf)) * max(leaf.dtype.itemsize, 4)
        for leaf in jax.tree.leaves(gradients)
    )
