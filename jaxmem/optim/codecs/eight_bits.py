"""Block-wise dynamic 8-bit quantization.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021): each block is scaled by its
largest magnitude, and each value goes to a map that spans seven decades, each with twice as many
evenly spread values as the one below it (64 of them from 0.1 to 1 with a sign, 128 without). An
affine map has the same steps everywhere and turns small second moments into zeros.

Codes are found by arithmetic and not in a table: nested lookups, fused, take XLA for ever.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.optim.codecs.codec import Codec

_DECADES = 7  # of magnitudes: the dynamic map of 8 bits, Dettmers et al. 2021
_UNDERFLOW_THRESHOLD = 2.75e-7  # half way from zero to the smallest magnitude, 5.5e-7
# Half way from the largest value below one.
_SATURATION_THRESHOLD = (1 - 0.45 / 128, 1 - 0.45 / 256)


class Quantized(NamedTuple):
    """An array in 8 bits: ``codes`` in its shape (uint8), ``scales`` of its blocks (float32)."""

    codes: jax.Array
    scales: jax.Array


class EightBits(Codec):
    """Block-wise, with a map without a sign for second moments."""

    kind = Quantized

    def zeros(self, leaf, signed, block):
        """Codes of zeros."""
        return quantize(leaf, signed=signed, block=block)

    def compress(self, leaf, key, signed, block):
        """Codes and scales."""
        return quantize(leaf, signed=signed, block=block)

    def expand(self, small, signed, block):
        """float32."""
        return dequantize(small, signed=signed, block=block)


def table(signed: bool) -> np.ndarray:
    """The values that a block of magnitude 1 can have, in ascending order."""
    codes = Quantized(jnp.arange(256, dtype=jnp.uint8), jnp.ones(1))
    return np.sort(np.asarray(dequantize(codes, signed=signed)))


def quantize(x: jax.Array, *, signed: bool = True, block: int = 256) -> Quantized:
    """The array in 8 bits, block by block along its last axis.

    Where the last axis is shorter than a block, the axes before it are taken with it. A value is
    off by at most half a step of the map times the largest magnitude of its block; zeros and a
    positive value of the largest magnitude stay exact. A block with a NaN or an infinity in it
    becomes NaN. Without a sign, what is not zero does not become zero: it is rounded up to the
    smallest value instead, since second moments divide.

    Args:
        x: floating-point.
        signed: whether there are negative values; without, they become 0.
        block: values that share a scale.

    >>> import jax.numpy as jnp, jaxmem
    >>> x = jnp.asarray([0.0, 0.5, -0.001, 2.0])
    >>> codes, scales = jaxmem.optim.quantize(x)
    >>> codes.dtype, scales
    (dtype('uint8'), Array([2.], dtype=float32))
    >>> values = jaxmem.optim.dequantize(jaxmem.optim.Quantized(codes, scales)).tolist()
    >>> [round(value, 3) for value in values]
    [0.0, 0.495, -0.001, 2.0]
    """
    blocks = _blocks(x.astype(jnp.float32), block)
    # A CPU's maximum, fused, may leave a NaN out.
    nan = jnp.any(jnp.isnan(blocks), axis=-1)
    scales = jnp.where(nan, jnp.nan, jnp.max(jnp.abs(blocks), axis=-1))
    scaled = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    size = jnp.abs(scaled)
    power, count = jnp.full_like(size, 10.0**_DECADES), jnp.full_like(size, 1 if signed else 2)
    for decade in range(1, _DECADES):
        in_decade = size >= 10.0 ** (decade - _DECADES)
        power = jnp.where(in_decade, 10.0 ** (_DECADES - decade), power)
        count = jnp.where(in_decade, 2.0 ** (decade if signed else decade + 1), count)
    place = jnp.clip(jnp.floor((size * power - 1) / 9 * count), 0, count - 1)
    # Decades of 1, 2, 4, ... values after each other: what was before this one is its count less
    # that of the first.
    codes = place + count - (0 if signed else 1)
    if signed:
        codes = jnp.where(size < _UNDERFLOW_THRESHOLD, 0, codes + jnp.where(scaled < 0, 128, 0))
        codes = jnp.where(scaled > _SATURATION_THRESHOLD[0], 128, codes)
    else:
        codes = jnp.where(scaled <= 0, 0, jnp.where(scaled > _SATURATION_THRESHOLD[1], 255, codes))
    return Quantized(_from_blocks(codes.astype(jnp.uint8), x.shape), scales)


def dequantize(quantized: Quantized, *, signed: bool = True, block: int = 256) -> jax.Array:
    """The array again, in float32; the arguments are those of `quantize`."""
    codes, scales = quantized
    shape = codes.shape
    codes = codes.astype(jnp.int32)
    number = (codes & 127) if signed else codes + 1
    exponent = 31 - jax.lax.clz(jnp.maximum(number, 1))
    count = jnp.left_shift(1, exponent).astype(jnp.float32)
    decade = exponent if signed else exponent - 1
    power = jnp.full(codes.shape, 10.0**-_DECADES, jnp.float32)
    for later in range(1, _DECADES):
        power = jnp.where(decade >= later, jnp.float32(10.0 ** (later - _DECADES)), power)
    values = (1 + 9 * (number.astype(jnp.float32) - count + 0.5) / count) * power
    if signed:
        values = jnp.where(codes > 128, -values, values)
    values = jnp.where(codes == (128 if signed else 255), 1, jnp.where(codes == 0, 0, values))
    return _from_blocks(_blocks(values, block) * scales[..., None], shape)


def _rows(shape: tuple[int, ...], block: int) -> tuple[tuple[int, ...], int]:
    """The leading axes, and the length of all the others together: at least a block, if it is."""
    for axis in reversed(range(len(shape))):
        if math.prod(shape[axis:]) >= block or axis == 0:
            return shape[:axis], math.prod(shape[axis:])
    return (), 1


def _blocks(x: Any, block: int) -> Any:
    """The array as [..., blocks, block], zeros at the end."""
    rows, length = _rows(x.shape, block)
    x = x.reshape(*rows, length)
    missing = -length % block
    if missing:
        x = jnp.pad(x, [(0, 0)] * len(rows) + [(0, missing)])
    return x.reshape(*rows, -1, block)


def _from_blocks(blocks: Any, shape: tuple[int, ...]) -> Any:
    """The inverse of `_blocks`."""
    rows, length = _rows(shape, blocks.shape[-1])
    return blocks.reshape(*rows, -1)[..., :length].reshape(shape)
