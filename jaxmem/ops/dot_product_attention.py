"""`jax.nn.dot_product_attention` in memory linear in the length."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.ops.blocks import accumulation_dtype
from jaxmem.ops.flash import attend


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | None = None,
    block: tuple[int, int] | None = None,
) -> jax.Array:
    """``softmax(query @ key.T * scale + bias) @ value`` without the matrix of scores.

    Takes what `jax.nn.dot_product_attention` takes, but for windows, lengths and
    ``return_residual``, and gives what it gives, on any backend, in memory linear in the length:
    scores exist a block at a time, in the forward pass and again in the backward pass. One matmul
    of six is done twice (1.17x the FLOPs), and of causal scores about half are never computed. What
    is kept is the result and two numbers a query and head.
    The algorithm is that of Rabe and Staats 2021 and Dao et al. 2022, "FlashAttention", as loops of
    plain JAX operations.

    Scores, their softmax and all sums are float32 (float64 for float64). Works under ``jit``,
    ``grad``, ``jvp``, ``vmap``, ``scan`` and in higher derivatives, as plain JAX does.

    Args:
        query: ``[..., queries, heads, width]``, or ``[queries, heads, width]``.
        key: ``[..., keys, key heads, width]``; heads are a multiple of key heads, and as many
            successive heads share one of the keys (grouped queries).
        value: ``[..., keys, key heads, value width]``.
        bias: added to the scores; of a shape that broadcasts to ``[..., heads, queries, keys]``.
        mask: bool, of such a shape; where it is False a key is not attended to. A query that may
            attend to no key attends to all alike.
        scale: of the scores; None: ``width ** -0.5``.
        is_causal: a query attends to the keys up to its own place.
        implementation: None or ``"xla"``: the above. ``"cudnn"``: cuDNN's kernel, through
            `jax.nn.dot_product_attention`: faster on the devices that have it, bfloat16 and float16
            only, no ``jvp`` or second derivatives. With axes of a mesh that are not those of a
            `jax.shard_map` it is not compiled for devices that are absent.
        block: queries and keys of one block; None: up to 1024 of each, fewer where there are many
            heads.

    Returns:
        ``[..., queries, heads, value width]``, in the dtype of ``query``.

    Raises:
        JaxmemError: shapes or dtypes that do not match.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.random.normal(jax.random.key(0), (2, 64, 4, 16), "float32")
    >>> out = jaxmem.ops.attention(x, x, x, is_causal=True)
    >>> plain = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    >>> bool(jnp.allclose(out, plain, atol=1e-5))
    True
    """
    _check(query, key, value, bias, mask, implementation, block)
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, implementation="cudnn"
        )
    shape = *query.shape[:-1], value.shape[-1]
    if not key.shape[-3] or not math.prod(shape):  # a sum of nothing
        return jnp.zeros(shape, query.dtype)
    (out,) = jaxprs.in_automatic_axes(
        functools.partial(_attention, scale=scale, is_causal=is_causal, block=block), [query]
    )(query, key, value, bias, mask)
    return out


def _attention(query, key, value, bias, mask, scale, is_causal, block) -> list[jax.Array]:
    batch, (length, heads, width) = query.shape[:-3], query.shape[-3:]
    (keys, groups, _), count = key.shape[-3:], math.prod(batch)
    factor = width**-0.5 if scale is None else scale
    # As in JAX's splash attention: with any score added to it, it is no infinity.
    lowest = -0.7 * float(jnp.finfo(accumulation_dtype(query.dtype)).max)

    def of_scores(matrix):
        """[batch, groups, heads of a group, queries, keys], each axis whole or 1."""
        matrix = matrix.reshape((1,) * (len(batch) + 3 - matrix.ndim) + matrix.shape)
        whole = batch if math.prod(matrix.shape[:-3]) > 1 else (1,) * len(batch)
        matrix = jnp.broadcast_to(matrix, (*whole, *matrix.shape[-3:]))
        split = (groups, heads // groups) if matrix.shape[-3] > 1 else (1, 1)
        return matrix.reshape(math.prod(whole), *split, *matrix.shape[-2:])

    def modify(scores, others, row, column):
        bias, mask = others
        scores *= factor
        if bias is not None:
            scores += bias.astype(scores.dtype)
        if mask is not None:
            scores = jnp.where(mask, scores, lowest)
        if is_causal:
            places = (jax.lax.broadcasted_iota(np.int32, scores.shape, axis) for axis in (2, 4))
            row_place, column_place = places
            scores = jnp.where(column + column_place > row + row_place, -jnp.inf, scores)
        return scores

    out = attend(
        query.reshape(count, length, groups, heads // groups, width),
        key.reshape(count, keys, groups, width),
        value.reshape(count, keys, groups, value.shape[-1]),
        tuple(None if matrix is None else of_scores(matrix) for matrix in (bias, mask)),
        modify,
        is_causal,
        block,
        # Without a mask and a bias each query sees a key, its own if no other.
        lowest if is_causal and (bias is not None or mask is not None) else None,
    )
    return [out.reshape(*batch, length, heads, value.shape[-1])]


def _check(query, key, value, bias, mask, implementation, block) -> None:
    shapes = [jnp.shape(array) for array in (query, key, value)]
    listed = ", ".join(
        f"{name} {list(shape)}"
        for name, shape in zip(("query", "key", "value"), shapes, strict=True)
    )
    lengths = {len(shape) for shape in shapes}
    if lengths != {max(lengths)} or max(lengths) < 3:
        raise JaxmemError(
            "attention takes query, key and value of one number of axes, [..., length, heads, "
            f"width]; got {listed}."
        )
    (_, heads, width), (keys, groups, key_width) = shapes[0][-3:], shapes[1][-3:]
    batches = {shape[:-3] for shape in shapes}
    if len(batches) > 1 or width != key_width or shapes[2][-3:-1] != (keys, groups):
        raise JaxmemError(
            "attention takes query [..., queries, heads, width], key [..., keys, key heads, width] "
            f"and value [..., keys, key heads, value width]; got {listed}."
        )
    if not width:
        raise JaxmemError(
            f"attention takes queries and keys of a width of at least 1; got {listed}."
        )
    if groups == 0 or heads % groups:
        raise JaxmemError(
            f"The heads of query must be a multiple of those of key; got {heads} and {groups}."
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise JaxmemError(
            f"query, key and value must have one dtype; got {query.dtype}, {key.dtype} and "
            f"{value.dtype}. Cast them first."
        )
    scores = (*shapes[0][:-3], heads, shapes[0][-3], keys)
    for name, matrix in ("bias", bias), ("mask", mask):
        if matrix is None:
            continue
        shape = jnp.shape(matrix)
        try:
            fits = np.broadcast_shapes(shape, scores) == scores
        except ValueError:
            fits = False
        if not fits:
            raise JaxmemError(
                f"{name} must broadcast to [..., heads, queries, keys], here {list(scores)}; its "
                f"shape is {list(shape)}."
            )
    if mask is not None and mask.dtype != np.bool_:
        raise JaxmemError(
            f"mask must be bool, True where a key is attended to; got {mask.dtype}. What is added "
            "to the scores goes in as bias."
        )
    check_implementation(implementation)
    if block is not None and min(block) < 1:
        raise JaxmemError(f"block= takes queries and keys of at least 1; got {block}.")


def check_implementation(name: str | None) -> None:
    """Raises `JaxmemError` for an implementation of attention that there is not."""
    if name not in (None, "xla", "cudnn"):
        raise JaxmemError(f"implementation is None, 'xla' or 'cudnn'; got {name!r}.")
