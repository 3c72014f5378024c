"""Into how many parts XLA cuts the sums of a matmul whose result has too few tiles for a GPU.

The parts are a matmul with one more batch dimension; their results, in the dtype in which they are
summed, are in memory until they are added up. What decides is XLA's estimate of what that costs, of
which these are the figures (openxla/xla, ``xla/backends/gpu/transforms/splitk_rewriter.cc``). It
agrees with what XLA of jax 0.10.2 and 0.12 makes of 200 matmuls for five GPUs
(tests/test_splitting.py has some of them).
"""

import dataclasses
import functools
import math

from jaxmem.targets.matmul import Matmul

# Derived from that file. Rows and columns of a result that one core computes at a time, the most
# parts, and the price of a FLOP, which those below are multiples of.
_TILE = 128
_MOST = 2048
_FLOP = 100.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Prices:
    """Of a byte that a matmul moves, of one that is moved to add parts up, and of a kernel more."""

    moved: float
    added: float
    kernel: float


_BLACKWELL = _Prices(0.0848863, 189.711, 1.21563e8)
_HOPPER = _Prices(0.194136, 193.1384, 4.36e7)
_EARLIER = _Prices(0.0666955, 467.815, 5.65307e7)


@dataclasses.dataclass(frozen=True, slots=True)
class Splitting:
    """Of a GPU with so many cores."""

    cores: int
    capability: tuple[int, int]

    def __call__(self, one: Matmul) -> int:
        """The parts of the sums of a matmul."""
        return _parts(self, one)

    def price(self, one: Matmul, parts: int) -> float:
        """What a matmul costs in so many parts."""
        prices = self._prices
        tall, wide = min(one.rows, _TILE), min(one.columns, _TILE)
        tiles = one.batch * parts * math.ceil(one.rows / _TILE) * math.ceil(one.columns / _TILE)
        # A core computes several small tiles at a time.
        waves = max(tiles * tall * wide / (self.cores * _TILE**2), 1.0)
        computing = 2 * tall * wide * math.ceil(one.depth / parts) * waves * _FLOP
        results = one.batch * one.rows * one.columns
        read = one.batch * (one.rows + one.columns) * one.depth * one.itemsize
        written = parts * results * (one.summed if parts > 1 else one.itemsize)
        price = max(computing, (read + written) * prices.moved)
        if parts == 1:
            return price
        added = results * (parts * one.summed + one.itemsize)
        return price + prices.kernel + added * prices.added

    @property
    def _prices(self) -> _Prices:
        if self.capability >= (10, 0):
            return _BLACKWELL
        return _HOPPER if self.capability >= (9, 0) else _EARLIER


@functools.lru_cache(maxsize=4096)
def _parts(splitting: Splitting, one: Matmul) -> int:
    counts = (2**power for power in range(_MOST.bit_length()))
    return min(counts, key=functools.partial(splitting.price, one))
