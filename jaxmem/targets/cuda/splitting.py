"""Into how many parts XLA cuts the sums of a matmul whose result has too few tiles for a GPU.

The parts are a matmul with one more batch dimension; their results, in the dtype in which they are
summed, are in memory until they are added up. What decides is XLA's estimate of what that costs, of
which these are the figures (openxla/xla, ``xla/backends/gpu/transforms/splitk_rewriter.cc``). It
agrees with what XLA of jax 0.10.2 and 0.12 makes of 190 matmuls for six GPUs
(tests/test_splitting.py has some of them).
"""

import dataclasses
import functools
import math

_TILE = 128  # rows and columns of a result that one core computes at a time
_MOST = 2048
_FLOP = 100.0  # the price of one, of which those below are multiples


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

    def __call__(
        self, batch: int, rows: int, columns: int, depth: int, itemsize: int, summed: int
    ) -> int:
        """The parts of ``batch`` matmuls of so many rows and columns, each element a sum of
        ``depth`` products. ``itemsize`` are the bytes of an element of operands and result, and
        ``summed`` those of one while it is summed up."""
        return _parts(self, batch, rows, columns, depth, itemsize, summed)

    def price(
        self,
        parts: int,
        *,
        batch: int,
        rows: int,
        columns: int,
        depth: int,
        itemsize: int,
        summed: int,
    ) -> float:
        """What the matmuls cost in so many parts."""
        prices = self._prices
        tall, wide = min(rows, _TILE), min(columns, _TILE)
        tiles = batch * parts * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        # A core computes several small tiles at a time.
        waves = max(tiles * tall * wide / (self.cores * _TILE**2), 1.0)
        computing = 2 * tall * wide * math.ceil(depth / parts) * waves * _FLOP
        results = batch * rows * columns
        read = batch * (rows + columns) * depth * itemsize
        written = parts * results * (summed if parts > 1 else itemsize)
        price = max(computing, (read + written) * prices.moved)
        if parts == 1:
            return price
        return price + prices.kernel + results * (parts * summed + itemsize) * prices.added

    @property
    def _prices(self) -> _Prices:
        if self.capability >= (10, 0):
            return _BLACKWELL
        return _HOPPER if self.capability >= (9, 0) else _EARLIER


@functools.lru_cache(maxsize=4096)
def _parts(
    splitting: Splitting,
    batch: int,
    rows: int,
    columns: int,
    depth: int,
    itemsize: int,
    summed: int,
) -> int:
    price = functools.partial(
        splitting.price,
        batch=batch,
        rows=rows,
        columns=columns,
        depth=depth,
        itemsize=itemsize,
        summed=summed,
    )
    return min((2**power for power in range(_MOST.bit_length())), key=price)
