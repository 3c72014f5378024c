"""Arithmetic in blocks: loops over pieces of an axis, and what their sums need.

What a sum adds up of a block is made in a `jax.checkpoint`, in forward passes too. Where a loop
around them is differentiated, JAX looks for what is the same at each of its turns, such as masks,
makes it before, and keeps it: of all blocks that is as large as what blocks are there to avoid.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.ground.widths import promote_at_least

# Elements of a block of scores or logits: 128 MiB of float32 at a time. Chosen: half and twice take
# 64 MiB less and 128 MiB more.
BLOCK = 2**25


def block_size(total: int, most: int) -> int:
    """The size of the blocks of an axis: a divisor above half of ``most`` where there is one, of
    whole tiles of 64 (chosen: the least that kernels of matmuls have) if possible; else ``most``,
    and one block is smaller. At least 1."""
    if total <= most:
        return max(total, 1)
    sizes = range(most, most // 2, -1)
    fitting = [size for size in sizes if total % size == 0]
    return next((size for size in fitting if size % 64 == 0), next(iter(fitting), most))


def fold(fun: Callable, carry: Any, total: int, block: int) -> Any:
    """``carry = fun(carry, start, size)`` over the blocks of an axis, the odd one last; of what
    ``fun`` makes nothing is kept."""
    fun = jax.checkpoint(fun, static_argnums=2)
    count, rest = divmod(total, block)
    if count == 1:
        carry = fun(carry, 0, block)
    elif count:
        starts = jnp.arange(count) * block
        carry, _ = jax.lax.scan(lambda carry, at: (fun(carry, at, block), None), carry, starts)
    return fun(carry, count * block, rest) if rest else carry


def map_blocks(fun: Callable, total: int, block: int) -> Any:
    """``fun(start, size)`` for each block, the arrays that it returns joined along the first
    axis."""
    count, rest = divmod(total, block)
    if count <= 1 and not rest:
        return fun(0, total)
    whole = jax.lax.map(lambda at: fun(at, block), jnp.arange(count) * block)
    joined = jax.tree.map(lambda pieces: pieces.reshape(-1, *pieces.shape[2:]), whole)
    if not rest:
        return joined
    last = fun(count * block, rest)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), joined, last)


def piece(array: jax.Array, at: Any, size: int, axis: int = 0) -> jax.Array:
    """So many elements of an axis, from a place on; where these are all, the array as it is, whose
    cotangent is then no piece of zeros."""
    if size == array.shape[axis]:
        return array
    return jax.lax.dynamic_slice_in_dim(array, at, size, axis)


def accumulation_dtype(dtype: Any) -> np.dtype:
    """float32, or float64 for that."""
    return promote_at_least(np.float32, dtype)


def finite(largest: jax.Array) -> jax.Array:
    """What to subtract before exp: where the largest is infinite, nothing."""
    return jnp.where(jnp.isfinite(largest), largest, 0)
