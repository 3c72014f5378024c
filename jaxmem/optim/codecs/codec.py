"""What a codec of optimizer state says of itself."""

import abc
from typing import Any

import jax


class Codec(abc.ABC):
    """A way to keep a moment in fewer bits. To add one: a subclass in a file of its own, and an
    entry of `CODECS` in ``jaxmem/optim/codecs/__init__.py``; `jaxmem.optim.small_moments` takes its
    name as ``dtype=``.

    Attributes:
        kind: the class of what `compress` returns, where it is a pytree; None: an array.
        adds_up: whether what is added counts, however small it is beside the sum (rounding by
            chance); if not, sums that are never scaled down stay as they are.
    """

    kind: type | None = None
    adds_up: bool = False

    @abc.abstractmethod
    def zeros(self, leaf: jax.Array, signed: bool, block: int) -> Any:
        """A leaf of a new state, compressed."""

    @abc.abstractmethod
    def compress(self, leaf: jax.Array, key: jax.Array, signed: bool, block: int) -> Any:
        """A leaf; ``signed``: it may have negative values (first moments have), ``block``: values
        that share a scale, where the codec has scales."""

    @abc.abstractmethod
    def expand(self, small: Any, signed: bool, block: int) -> jax.Array:
        """What was compressed, in a floating-point dtype."""
