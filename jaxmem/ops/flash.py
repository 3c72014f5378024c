"""Exact attention in memory linear in the length: blocks of queries against blocks of keys."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ops.blocks import BLOCK, accumulation_dtype, block_size, finite, piece
from jaxmem.ops.wide_einsum import tangent_einsum, wide_einsum

# A block's sides are multiples of the one, since matrix units compute whole tiles, and no longer
# than the other. Chosen: half and twice of the first change nothing for 24 heads; of the second,
# for four heads and 16,384 tokens, half takes 34 MiB less and 2.6 times the predicted time, twice
# 156 MiB more and half of the predicted time.
_TILE, _SIDE = 128, 1024
# Queries are [batch, length, groups, heads of a group, width], keys and values [batch, length,
# groups, width]; scores and what is made of them [batch, groups, queries, heads of a group, ...].
_SCORES, _VALUES = "bqghd,bkgd->bgqhk", "bgqhk,bkgd->bgqhd"


def attend(
    query,
    key,
    value,
    others,
    modify: Callable,
    is_causal: bool,
    block: tuple[int, int] | None = None,
    hidden_score: float | None = None,
) -> jax.Array:
    """``softmax(modify(query @ key.T, others)) @ value``, [batch, queries, groups, heads of a
    group, width].

    ``others`` are arrays that `modify` reads, with axes [batch, groups, heads of a group, queries,
    keys], each whole or 1; ``modify(scores, others, row, column)`` gets the same piece of all,
    others broadcast to the scores, and the place of its first element. Of what ``is_causal`` it is
    not asked about blocks above the diagonal: all keys there have ``hidden_score``, which counts
    where a query sees no key before them; None: each does.
    """
    (count, length, groups, heads, _), keys = query.shape, key.shape[1]
    if block is None:
        side = math.isqrt(BLOCK // max(count * groups * heads, 1)) // _TILE * _TILE
        block = (min(max(side, _TILE), _SIDE),) * 2
    if is_causal:  # blocks are square, and their number is even
        keys = min(keys, length)
        size = min(block[0], -(-length // 2))
        size = block_size(-(-length // 2), size)
        sizes = size, size
        counts = (2 * -(-length // (2 * size)),) * 2
    else:
        sizes = block_size(length, block[0]), block_size(keys, block[1])
        counts = -(-length // sizes[0]), -(-keys // sizes[1])
    config = _AttentionConfig(modify, query.dtype, is_causal, sizes, counts, keys)
    rows, columns = (size * number for size, number in zip(sizes, counts, strict=True))
    hidden = None if hidden_score is None else _masked_keys(value, rows, hidden_score)
    out, _, _ = _attend(
        _padded(query, rows, 1),
        _padded(key[:, :keys], columns, 1),
        _padded(value[:, :keys], columns, 1),
        tuple(
            None if other is None else _padded(_padded(other[..., :keys], rows, 3), columns, 4)
            for other in others
        ),
        hidden,
        config,
    )
    return jnp.moveaxis(out[:, :, :length], 1, 2)


class _MaskedKeys(NamedTuple):
    """The keys above the diagonal: for each query the score that all of them have (-inf: there are
    none), how many they are, and the sum of their values. Axes are those of the result's blocks."""

    score: Any
    count: Any
    values: jax.Array


def _masked_keys(value: jax.Array, rows: int, score: float) -> _MaskedKeys:
    keys, wide = value.shape[1], accumulation_dtype(value.dtype)
    behind = jax.lax.cumsum(value.astype(wide), axis=1, reverse=True)[:, 1 : rows + 1]
    behind = jnp.pad(behind, [(0, 0), (0, rows - behind.shape[1]), (0, 0), (0, 0)])
    count = np.maximum(keys - 1 - np.arange(rows), 0).astype(wide).reshape(1, 1, rows, 1)
    scores = np.where(count > 0, wide.type(score), -np.inf)
    return _MaskedKeys(scores, count, jnp.moveaxis(behind, 1, 2)[:, :, :, None])


def _padded(array, size: int, axis: int):
    if array.shape[axis] in (1, size):
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)


@dataclasses.dataclass(frozen=True)
class _AttentionConfig:
    """``dtype`` is that of matmuls, ``block`` and ``counts`` are of queries and keys; ``keys`` are
    not padding."""

    modify: Callable
    dtype: Any
    is_causal: bool
    block: tuple[int, int]
    counts: tuple[int, int]
    keys: int

    def loop(self, add: Callable, start: Sequence[jax.Array]) -> list[jax.Array]:
        """``carry = add(carry, row, column)`` over the blocks of each row of blocks, from
        ``start``; the rows of blocks joined along the queries. Of what ``add`` makes nothing is
        kept.

        Causal ones are two by two, the first with the last: so many blocks on and below the
        diagonal are in each two, and none above it is computed.
        """
        rows, columns = self.counts
        members = 2 if self.is_causal else 1
        add = jax.checkpoint(add)

        def of_group(group):
            def step(carry, slot):
                first = (slot <= group) | (not self.is_causal)
                member = jnp.where(first, 0, 1)
                row = jnp.where(first, group, rows - 1 - group)
                column = jnp.where(first, slot, slot - group - 1)
                own = [jax.lax.dynamic_index_in_dim(x, member, 0, False) for x in carry]
                own = add(own, row * self.block[0], column * self.block[1])
                return [
                    jax.lax.dynamic_update_index_in_dim(x, new, member, 0)
                    for x, new in zip(carry, own, strict=True)
                ], None

            carry = [jnp.broadcast_to(x, (members, *x.shape)) for x in start]
            return jax.lax.scan(step, carry, jnp.arange(columns + members - 1))[0]

        def joined(blocks):
            blocks = [blocks[:, 0], *([blocks[::-1, 1]] if self.is_causal else [])]
            blocks = jnp.moveaxis(jnp.concatenate(blocks), 0, 2)
            return blocks.reshape(*blocks.shape[:2], -1, *blocks.shape[4:])

        return list(map(joined, jax.lax.map(of_group, jnp.arange(rows // members))))


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _attend(
    query, key, value, others, hidden: _MaskedKeys | None, config: _AttentionConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result, and of each query and head the largest score and the sum of exp(score -
    largest)."""

    def add(carry, row, column):
        largest, total, out = carry
        rows, keys, values, *rest = _operands((query, key, value, *others), row, column, config)
        scores = _scores(rows, keys, rest, row, column, config)
        new = jnp.maximum(largest, scores.max(-1))
        shrink = jnp.exp(largest - finite(new))
        shares = jnp.exp(scores - finite(new)[..., None])
        seen = wide_einsum(_VALUES, shares, values, config.dtype)
        return new, total * shrink + shares.sum(-1), out * shrink[..., None] + seen

    zeros = _zeros(query, key, value, others, config)
    start = zeros[..., 0] - jnp.inf, zeros[..., 0], zeros
    largest, total, out = config.loop(add, start)
    if hidden is not None:
        new = jnp.maximum(largest, hidden.score)
        shrink, share = (jnp.exp(x - finite(new)) for x in (largest, hidden.score))
        largest, total = new, total * shrink + hidden.count * share
        out = out * shrink[..., None] + hidden.values * share[..., None]
    return (out / total[..., None]).astype(query.dtype), finite(largest), total


def _attend_jvp(config: _AttentionConfig, primals, tangents):
    query, key, value, others, hidden = primals
    found = out, largest, total = _attend(query, key, value, others, hidden, config)
    # Cotangents add up over blocks.
    wide = accumulation_dtype(query.dtype)
    tangents = [
        None if tangent is None or jaxprs.is_zero(tangent) else tangent.astype(wide)
        for tangent in (*tangents[:3], *tangents[3], tangents[4] and tangents[4].values)
    ]
    *tangents, d_hidden = tangents

    # Linear in the tangents: of all the rest the loop keeps nothing.
    def add(carry, row, column):
        operands = _operands((query, key, value, *others), row, column, config)
        along = _operands(tangents, row, column, config)
        scores, d_scores = _scores_jvp(operands, along, row, column, config)
        own_largest, own_total = (
            piece(x, row, config.block[0], 2)[..., None] for x in (largest, total)
        )
        shares = jnp.exp(scores - own_largest) / own_total
        d_out, d_total = carry
        if d_scores is not None:
            d_shares = shares * d_scores
            d_total += d_shares.sum(-1)
            d_out += tangent_einsum(_VALUES, d_shares, operands[2], config.dtype)
        if along[2] is not None:
            d_out += tangent_einsum(_VALUES, shares, along[2], config.dtype)
        return d_out, d_total

    zeros = _zeros(query, key, value, others, config)
    d_out, d_total = config.loop(add, (zeros, zeros[..., 0]))
    if d_hidden is not None:
        share = jnp.exp(hidden.score - largest) / total
        d_out += d_hidden * share[..., None]
    d_out -= out.astype(wide) * d_total[..., None]
    return found, (d_out.astype(out.dtype), jnp.zeros_like(largest), d_total * total)


_attend.defjvp(_attend_jvp, symbolic_zeros=True)


def _zeros(query, key, value, others, config: _AttentionConfig) -> jax.Array:
    """A block of the result."""
    batch, _, groups, heads, _ = query.shape
    shape = (batch, groups, config.block[0], heads, value.shape[-1])
    zeros = jnp.zeros(shape, accumulation_dtype(query.dtype))
    return jaxprs.match_varying_axes(zeros, query, key, value, *others)


def _piece(array, at, size: int, axis: int):
    if array is None or array.shape[axis] == 1 != size:
        return array
    return piece(array, at, size, axis)


def _operands(arrays, row, column, config: _AttentionConfig) -> list[Any]:
    """Blocks of queries, keys, values and others, floats as float32 or wider."""
    (height, width), (query, *by_key), others = config.block, arrays[:3], arrays[3:]
    pieces = [_piece(query, row, height, 1)]
    pieces += [_piece(array, column, width, 1) for array in by_key]
    pieces += [_piece(_piece(x, row, height, 3), column, width, 4) for x in others]
    wide = accumulation_dtype(config.dtype)
    # Positions and numbers of segments are compared as they are.
    return [x if x is None else widened(x, wide) for x in pieces]


def widened(array: jax.Array, dtype) -> jax.Array:
    """Floats in a dtype, all else as it is."""
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _scores(rows, keys, others, row, column, config: _AttentionConfig) -> jax.Array:
    scores = wide_einsum(_SCORES, rows, keys, config.dtype)
    others = [
        None if other is None else jnp.broadcast_to(jnp.moveaxis(other, 2, 3), scores.shape)
        for other in others
    ]
    scores = config.modify(scores, others, row, column)
    if config.keys < config.counts[1] * config.block[1]:
        places = column + jax.lax.broadcasted_iota(np.int32, scores.shape, 4)
        scores = jnp.where(places < config.keys, scores, -jnp.inf)
    return scores


def _scores_jvp(operands, tangents, row, column, config: _AttentionConfig):
    """`_scores` along tangents, of which None is zero."""
    given = [at for at, tangent in enumerate(tangents) if tangent is not None and at != 2]

    def of_given(*chosen):
        arrays = dict(enumerate(operands)) | dict(zip(given, chosen, strict=True))
        rows, key, _, *others = arrays.values()
        return _scores(rows, key, others, row, column, config)

    if not given:
        return of_given(), None
    return jax.jvp(of_given, [operands[at] for at in given], [tangents[at] for at in given])
