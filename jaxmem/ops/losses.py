"""Cross-entropy of a projection, without the logits: blocks of rows and of the vocabulary."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.ops.blocks import BLOCK, accumulation_dtype, block_size, finite, fold, map_blocks, piece
from jaxmem.ops.wide_einsum import wide_einsum

# Columns of a block of logits, at least. Chosen, to keep a device busy: for 65,536 tokens and
# 50,304 words half changes nothing, and twice takes 3.1 times the temporary bytes.
_COLUMNS = 512


def softmax_cross_entropy(
    hidden: jax.Array,
    weights: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    soft_cap: float | None = None,
    vocabulary_axis: int = 1,
    axis_name: str | tuple[str, ...] | None = None,
    block: tuple[int, int] | None = None,
) -> jax.Array:
    """The cross-entropy of ``softmax(hidden @ weights)``, a block of logits at a time.

    A plain loss holds its logits and their gradient, several arrays of tokens x vocabulary. Here
    they exist a block at a time in the forward pass, and again in the backward pass: one matmul of
    four is done twice (1.33x the FLOPs of the loss), and nothing is kept but two numbers a token.
    The idea is that of Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models".

    Matmuls are in the dtype of ``hidden``, to which the weights are cast block by block; logits,
    sums and what adds up over blocks are float32 (float64 for float64). Works under ``jit``,
    ``grad``, ``jvp``, ``vmap``, ``scan`` and in higher derivatives, as plain JAX does.

    Args:
        hidden: ``[..., width]``.
        weights: ``[width, vocabulary]``, the kernel of a ``Dense``; with ``vocabulary_axis=0``,
            ``[vocabulary, width]``, an embedding (its transpose would be a copy).
        labels: integers ``[...]`` below the vocabulary; one outside of it makes the loss NaN.
        bias: ``[vocabulary]``.
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
        z_loss: times ``logsumexp(logits) ** 2``, added to each loss (Chowdhery et al. 2022).
        ignore_index: the label of tokens whose loss is 0.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
        axis_name: inside `jax.shard_map`, the mesh axis over which the vocabulary (``weights`` and
            ``bias``) is split; labels are numbers in the whole vocabulary.
        block: rows and columns of logits at a time; None: 128 MiB of float32, or half of the bytes
            of ``hidden`` (of 16 bits) where that is more.

    Returns:
        The loss of each token, ``[...]``, in float32 (float64 for float64). Take their mean, over
        those not ignored.

    Raises:
        JaxmemError: shapes that do not match, labels that are no integers, or an option out of
            its range.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> hidden, weights = jnp.ones((4, 8), "float32"), jnp.ones((8, 100), "float32")
    >>> losses = jaxmem.ops.softmax_cross_entropy(hidden, weights, jnp.arange(4))
    >>> print(losses.shape, round(float(losses[0]), 3))  # log(100)
    (4,) 4.605
    """
    axis = vocabulary_axis
    _check(hidden, weights, labels, bias, axis, label_smoothing, soft_cap, block)

    def losses(hidden, weights, labels, bias):
        shape, labels = labels.shape, labels.reshape(-1)
        hidden = hidden.reshape(labels.size, hidden.shape[-1])
        with_mean = label_smoothing > 0
        found = statistics(
            hidden, weights, bias, labels, axis, soft_cap, axis_name, with_mean, block
        )
        # The largest logit is taken from each before log(sum) is added: both may be of any size.
        loss = (found.largest - found.chosen) * (1 - label_smoothing)
        loss += jnp.log(found.total)
        if label_smoothing:
            loss += (found.largest - found.mean) * label_smoothing
        if z_loss:
            loss += z_loss * jnp.square(found.largest + jnp.log(found.total))
        if ignore_index is not None:
            loss = jnp.where(labels == ignore_index, 0, loss)
        return [loss.reshape(shape)]

    (loss,) = jaxprs.in_automatic_axes(losses, [labels])(hidden, weights, labels, bias)
    return loss


def statistics(
    hidden, weights, bias, labels, axis, soft_cap, axis_name=None, with_mean=False, block=None
) -> "LogitStatistics":
    """What a loss is made of, for ``hidden`` of two axes and labels of one."""
    if labels.dtype.itemsize < 4:  # numbers of columns may be larger
        labels = labels.astype(np.int32)
    block = _blocks(hidden, weights, axis, block)
    config = _LossConfig(hidden.dtype, block, axis, soft_cap, axis_name, with_mean)
    return _statistics(hidden, weights, bias, labels, config)


def _blocks(hidden, weights, axis: int, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of a block of logits."""
    rows, columns = len(hidden), weights.shape[axis]
    if block is None:
        # Chosen: a quarter of what the rows take anyway (benchmarks/levers/ops.py).
        logits = max(BLOCK, hidden.size // 4)
        most = max(logits // max(rows, 1), _COLUMNS)
        block = (logits // min(most, columns), most)
    return block_size(rows, block[0]), block_size(columns, block[1])


def _check(hidden, weights, labels, bias, axis, label_smoothing, soft_cap, block) -> None:
    if axis not in (0, 1):
        raise JaxmemError(f"vocabulary_axis is the axis of weights, 0 or 1; got {axis}.")
    shapes = {
        name: jnp.shape(array)
        for name, array in [("hidden", hidden), ("weights", weights), ("labels", labels)]
    }
    order = ("width", "vocabulary") if axis else ("vocabulary", "width")
    wide, deep = shapes["hidden"], shapes["weights"]
    if len(deep) != 2 or not wide or (wide[-1], *wide[:-1]) != (deep[1 - axis], *shapes["labels"]):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise JaxmemError(
            f"softmax_cross_entropy takes hidden [..., width], weights [{', '.join(order)}] and "
            f"labels [...]; got {listed}. vocabulary_axis= tells which axis of weights is which."
        )
    if not deep[axis]:
        raise JaxmemError(
            f"softmax_cross_entropy needs a vocabulary of at least 1; the weights are {list(deep)}."
        )
    if bias is not None and jnp.shape(bias) != deep[axis : axis + 1]:
        raise JaxmemError(
            f"The bias must have one number for each of the {deep[axis]} columns of weights; its "
            f"shape is {list(jnp.shape(bias))}."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise JaxmemError(
            f"labels must be integers, the number of the right column of each row; got "
            f"{labels.dtype}. Of one-hot labels, take jnp.argmax(labels, -1)."
        )
    if not 0 <= label_smoothing <= 1:
        raise JaxmemError(f"label_smoothing is a share between 0 and 1; got {label_smoothing}.")
    if soft_cap is not None and not soft_cap > 0:
        raise JaxmemError(f"soft_cap must be above 0, or None for no cap; got {soft_cap}.")
    if block is not None and min(block) < 1:
        raise JaxmemError(f"block= takes rows and columns of at least 1; got {block}.")


@dataclasses.dataclass(frozen=True)
class _LossConfig:
    """``dtype`` is that of matmuls."""

    dtype: Any
    block: tuple[int, int]
    axis: int
    soft_cap: float | None
    axis_name: Any
    with_mean: bool


class LogitStatistics(NamedTuple):
    """Of each row of logits: the largest, the sum of exp(logit - largest), the one of the label,
    and their mean (zero where it is not asked for)."""

    largest: jax.Array
    total: jax.Array
    chosen: jax.Array
    mean: jax.Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _statistics(hidden, weights, bias, labels, config: _LossConfig) -> LogitStatistics:
    columns = weights.shape[config.axis]

    def of_rows(at, size):
        rows = piece(hidden, at, size)
        row_labels = piece(labels, at, size)

        def add(carry, at, size):
            largest, total, chosen, mean = carry
            logits = _logits(
                _widened(config, rows, *_parts((weights, bias), at, size, config)), config
            )
            new = jnp.maximum(largest, logits.max(-1))
            total = total * jnp.exp(largest - finite(new))
            total += jnp.exp(logits - finite(new)[:, None]).sum(-1)
            right = _is_label(row_labels, at, size, columns, config)
            chosen += jnp.where(right, logits, 0).sum(-1)
            if config.with_mean:
                mean += logits.sum(-1)
            return new, total, chosen, mean

        zeros = _zeros(size, hidden, weights, bias, labels)
        return fold(add, (zeros - jnp.inf, zeros, zeros, zeros), columns, config.block[1])

    largest, total, chosen, mean = map_blocks(of_rows, labels.size, config.block[0])
    if config.axis_name is not None:
        local, largest = largest, jax.lax.pmax(largest, config.axis_name)
        total *= jnp.exp(local - finite(largest))
        total, chosen, mean = jax.lax.psum((total, chosen, mean), config.axis_name)
    columns = _all_columns(columns, config)
    known = (labels >= 0) & (labels < columns)
    return LogitStatistics(
        finite(largest), total, jnp.where(known, chosen, jnp.nan), mean / columns
    )


def _statistics_jvp(config: _LossConfig, primals, tangents):
    hidden, weights, bias, labels = primals
    *tangents, _ = tangents
    found = _statistics(hidden, weights, bias, labels, config)
    columns, wide = weights.shape[config.axis], accumulation_dtype(hidden.dtype)
    # Cotangents of hidden and bias add up over blocks, those of weights where there are several
    # blocks of rows.
    summed = [wide, wide if config.block[0] < labels.size else weights.dtype, wide]
    d_hidden, *d_parameters = (
        None if tangent is None or jaxprs.is_zero(tangent) else tangent.astype(dtype)
        for tangent, dtype in zip(tangents, summed, strict=True)
    )

    def of_rows(at, size):
        # Linear in the tangents: of all the rest `fold` keeps nothing.
        def add(carry, column, width):
            rows, row_labels, largest = (
                piece(array, at, size) for array in (hidden, labels, found.largest)
            )
            d_rows = None
            if d_hidden is not None:
                d_rows = piece(d_hidden, at, size)
            operands = _widened(config, rows, *_parts((weights, bias), column, width, config))
            along = _widened(config, d_rows, *_parts(d_parameters, column, width, config))
            logits, along = _logits_jvp(operands, along, config)
            d_total, d_chosen, d_mean = carry
            d_total += (jnp.exp(logits - largest[:, None]) * along).sum(-1)
            right = _is_label(row_labels, column, width, columns, config)
            d_chosen += jnp.where(right, along, 0).sum(-1)
            if config.with_mean:
                d_mean += along.sum(-1)
            return d_total, d_chosen, d_mean

        zeros = _zeros(size, hidden, weights, bias, labels)
        return fold(add, (zeros, zeros, zeros), columns, config.block[1])

    d_total, d_chosen, d_mean = map_blocks(of_rows, labels.size, config.block[0])
    if config.axis_name is not None:
        d_total, d_chosen, d_mean = jax.lax.psum((d_total, d_chosen, d_mean), config.axis_name)
    columns = _all_columns(columns, config)
    d_found = LogitStatistics(jnp.zeros_like(found.largest), d_total, d_chosen, d_mean / columns)
    return found, d_found


_statistics.defjvp(_statistics_jvp, symbolic_zeros=True)


def _zeros(size: int, hidden, *others) -> jax.Array:
    """A number for each row."""
    return jaxprs.match_varying_axes(
        jnp.zeros(size, accumulation_dtype(hidden.dtype)), hidden, *others
    )


def _parts(parameters, at, size: int, config: _LossConfig) -> list[Any]:
    """Columns of weights and bias."""
    return [
        None if array is None else piece(array, at, size, axis)
        for array, axis in zip(parameters, (config.axis, 0), strict=True)
    ]


def _widened(config: _LossConfig, *arrays: Any) -> list[Any]:
    wide = accumulation_dtype(config.dtype)
    return [x if x is None else x.astype(wide) for x in arrays]


def _logits(operands: Iterable[Any], config: _LossConfig) -> jax.Array:
    rows, weights, bias = operands
    spec = "rw,wc->rc" if config.axis else "rw,cw->rc"
    logits = wide_einsum(spec, rows, weights, config.dtype)
    if bias is not None:
        logits += bias.astype(logits.dtype)[None]
    if config.soft_cap is not None:
        logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
    return logits


def _logits_jvp(primals, tangents, config: _LossConfig):
    """`_logits` along tangents, of which None is zero."""
    given = [index for index, tangent in enumerate(tangents) if tangent is not None]

    def of_given(*arrays):
        operands = dict(enumerate(primals)) | dict(zip(given, arrays, strict=True))
        return _logits(operands.values(), config)

    return jax.jvp(of_given, [primals[i] for i in given], [tangents[i] for i in given])


def _is_label(labels, at, size: int, columns: int, config: _LossConfig) -> jax.Array:
    """Where in a block of columns the label of each row is."""
    if config.axis_name is not None:
        at = at + jax.lax.axis_index(config.axis_name) * columns
    numbers = jnp.asarray(at, labels.dtype) + jnp.arange(size, dtype=labels.dtype)
    return labels[:, None] == numbers[None]


def _all_columns(columns: int, config: _LossConfig) -> int:
    return columns if config.axis_name is None else columns * jax.lax.axis_size(config.axis_name)
