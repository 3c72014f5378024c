"""Arithmetic in blocks: loops over pieces of an axis, and matmuls that are wide where they sum."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero


def block_size(total: int, most: int) -> int:
    """The size of the blocks of an axis: a divisor above half of ``most`` where there is one, of
    whole tiles of 64 if possible; else ``most``, and one block is smaller."""
    if total <= most:
        return total
    sizes = range(most, most // 2, -1)
    fitting = [size for size in sizes if total % size == 0]
    return next((size for size in fitting if size % 64 == 0), next(iter(fitting), most))


def fold(fun: Callable, carry: Any, total: int, block: int) -> Any:
    """``carry = fun(carry, start, size)`` over the blocks of an axis, the odd one last."""
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


def accumulation_dtype(*arrays: Any) -> np.dtype:
    """float32, or float64 where an array has it."""
    return np.dtype(jnp.result_type(np.float32, *(array.dtype for array in arrays)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def wide_dot(left: jax.Array, right: jax.Array, dimensions: Any) -> jax.Array:
    """A `jax.lax.dot_general` that comes out in float32 or wider; the matmuls of its derivative are
    in the dtype of its operands, as those of a plain one. (What JAX makes of
    ``preferred_element_type`` alone is a matmul of a float32 cotangent: many times slower.)"""
    wide = accumulation_dtype(left, right)
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=wide)


def _wide_dot_jvp(dimensions, primals, tangents):
    (left, right), (d_left, d_right) = primals, tangents
    out = wide_dot(left, right, dimensions)
    along = zeros = jnp.zeros_like(out)
    if not is_zero(d_left):
        along = narrow_dot(d_left, right, dimensions)
    if not is_zero(d_right):
        other = narrow_dot(left, d_right, dimensions)
        along = other if along is zeros else along + other
    return out, along


wide_dot.defjvp(_wide_dot_jvp, symbolic_zeros=True)


def narrow_dot(left: jax.Array, right: jax.Array, dimensions: Any) -> jax.Array:
    """A `jax.lax.dot_general` that comes out in float32 or wider, and whose transpose takes a
    cotangent rounded to the dtype of its operands."""
    wide = accumulation_dtype(left, right)
    return jax.lax.dot_general(left, right, dimensions).astype(wide)


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is known to be zero when the rule is traced."""
    return isinstance(tangent, SymbolicZero)


def finite(largest: jax.Array) -> jax.Array:
    """What to subtract before exp: where the largest is infinite, nothing."""
    return jnp.where(jnp.isfinite(largest), largest, 0)
