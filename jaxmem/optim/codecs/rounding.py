"""Rounding to bfloat16 that does not lose small updates."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.optim.codecs.codec import Codec


class Bfloat16(Codec):
    """Stochastic rounding."""

    adds_up = True

    def zeros(self, leaf, signed, block):
        """Zeros are zeros."""
        return leaf.astype(jnp.bfloat16)

    def compress(self, leaf, key, signed, block):
        """Up or down by chance."""
        return round_stochastically(leaf, key)

    def expand(self, small, signed, block):
        """As it is: the moments' own dtype is next."""
        return small


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """The array in bfloat16, up or down by chance, so that the mean is the value itself.

    With round-to-nearest an update below half a step of bfloat16 (a 512th of the value) is lost;
    here it happens with the right probability. On integer bits, since XLA elides a cast to
    bfloat16 and back.

    Args:
        x: floating-point; taken as float32. What is not finite stays as it is.
        key: PRNG key.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jnp.full(10_000, 1 + 2**-9)
    >>> rounded = jaxmem.optim.round_stochastically(x, jax.random.key(0))
    >>> sorted(set(rounded.tolist())), round(float(rounded.mean(dtype="float32")), 3)
    ([1.0, 1.0078125], 1.002)
    """
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = _hash(bits, jax.random.bits(key, (), jnp.uint32)) >> 16
    upper = ((bits + noise) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _hash(bits: jax.Array, seed: jax.Array) -> jax.Array:
    """32 random bits for each place of an array: its number and its value, mixed (the finalizer
    of MurmurHash3).

    `jax.random.bits` waits for nothing, so XLA makes all of it before the step, for every
    parameter; the value in the hash is there to be waited for.
    """
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, length in enumerate(bits.shape):
        position = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place * np.uint32(length) + position
    mixed = (place * np.uint32(0x9E3779B9) + seed) ^ (bits * np.uint32(0x27D4EB2F))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return mixed ^ (mixed >> 16)


def round_to_nearest(x: jax.Array) -> jax.Array:
    """The nearest bfloat16 value, as float32, and not elided by XLA."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
