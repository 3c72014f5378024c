"""What repeats in a program: stretches of operations that are the same again and again."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxmem.program import Operation, Program

Spans = tuple[tuple[int, int], ...]

# Half and twice, here and below: benchmarks/planner/sensitivity.py.
# Of the price of a block in the dearest row: what blocks of other rows have to cost. Chosen.
_ALIKE = 0.2
# Times the price of a block: no more of it is a block in part, or the first one, which differs from
# the others in what it reads. Chosen.
_PART = 1.2
# Of the price of a block: what repeats inside of it has to cover to be blocks of its own, such as
# the layers of two towers. Chosen.
_INSIDE = 0.5
# Operations: above this, only periods up to so many are looked for (quadratic time). Chosen.
_PERIODS = 2000


def repeating_blocks(
    program: Program,
    prices: Sequence[float],
    crossing: np.ndarray,
    whole: bool = True,
    finer: bool = False,
    coarse: bool = False,
    resized: bool = False,
) -> Spans:
    """Stretches of operations that are the same again and again, the dearest row of them first,
    then those in what is left of the program before and after it; cut where the fewest bytes cross,
    of which ``crossing`` has those before each operation. If not ``whole``, what is left may be a
    part of a block: a row may begin and end with one. ``finer``: where most of a block is blocks
    that repeat, they are those. ``coarse``: blocks are the same whose matmuls and convolutions are,
    such as layers that differ in a mask or an activation. ``resized``: blocks are the same that do
    the same to arrays of other sizes, such as the stages of a pyramid, and so is what is before and
    after them, whatever it costs."""
    chosen = [one for one in program.operations if one.flops or not coarse]
    cuts = _cuts(program, crossing) if coarse else list(range(len(chosen) + 1))
    kinds: dict[tuple, int] = {}
    kind = [kinds.setdefault(_kind(program, one, resized), len(kinds)) for one in chosen]
    price = np.zeros(len(program.operations) + 1)  # before each one, of kernels that are complete
    for kernel, of_kernel in zip(program.kernels, prices, strict=True):
        price[kernel.operations[-1] + 1] += of_kernel
    part = math.inf if resized else 0 if whole else _PART
    found = _Repeating(np.array(kind), np.cumsum(price)[cuts], crossing[cuts], part, finer)
    return tuple((cuts[a], cuts[b]) for a, b in found.between(0, len(kind), 0.0))


def _cuts(program: Program, crossing: np.ndarray) -> list[int]:
    """Where the fewest bytes cross before each operation that has FLOPs and after the one before
    it, and the end."""
    expensive = [number for number, one in enumerate(program.operations) if one.flops]
    pairs = itertools.pairwise([-1, *expensive])
    cuts = [a + 1 + int(np.argmin(crossing[a + 1 : b + 1])) for a, b in pairs]
    return [*cuts, len(program.operations)]


@dataclasses.dataclass(frozen=True)
class _Repeating:
    """``signature`` has a number for each kind of operation; the price and the bytes that cross are
    those before each operation. ``part``: times the price of a block, how much of what is before
    and after a row is a block too."""

    signature: np.ndarray
    price: np.ndarray
    crossing: np.ndarray
    part: float
    finer: bool

    def between(self, start: int, stop: int, least: float) -> Iterator[tuple[int, int]]:
        """The blocks between two operations that cost at least so much each."""
        found = _longest(self.signature[start:stop], self.price[start : stop + 1], least)
        if found is not None:
            first, period, count = found
            yield from self.row(start, stop, start + first, period, count)
        elif 0 < least <= self.cost(start, stop) <= self.part * least / _ALIKE:
            yield start, stop

    def cost(self, start: int, stop: int) -> float:
        return self.price[stop] - self.price[start]

    def row(
        self, start: int, stop: int, begins: int, period: int, count: int
    ) -> list[tuple[int, int]]:
        """The blocks of a stretch that repeats, and of what is before and after it."""
        ends = begins + count * period
        first = self.first_cut(stop, begins, period, count)
        count -= first + count * period > stop
        last = first + count * period
        each = self.cost(first, last) / count
        before = list(self.between(start, first, _ALIKE * each))
        parts = self.inside(first, first + period) if self.finer else [(first, first + period)]
        blocks = [(a + at, b + at) for at in range(0, count * period, period) for a, b in parts]
        taken = bool(before) and before[-1][1] > begins
        little = self.cost(begins, first) <= (_PART - 1) * each
        if blocks[0][0] == first and little and not taken:
            blocks[0] = begins, blocks[0][1]  # with what is before the first cut
        if 0 < 2 * (last - ends) <= period and self.crossing[ends] <= self.crossing[last]:
            # without what the blocks before do not have
            blocks = [(a, min(b, ends)) for a, b in blocks if a < ends]
            last = ends
        return [*before, *blocks, *self.between(last, stop, _ALIKE * each)]

    def first_cut(self, stop: int, begins: int, period: int, count: int) -> int:
        """Where the fewest bytes cross from the blocks to the next ones. (What comes before the
        first may be made of the program's inputs alone, which take no bytes, and the last one hands
        on less.)"""
        cuts = begins + period * np.arange(1, max(count - 1, 2))
        room = stop - begins - count * period
        return begins + min(
            range(period), key=lambda at: (self.crossing[cuts + at].sum(), at > room, at)
        )

    def inside(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The blocks of a block; itself, if most of it has none."""
        parts = list(self.between(start, stop, 0.0))
        covered = sum(self.cost(*part) for part in parts)
        is_row = len(parts) > 1 and covered >= _INSIDE * self.cost(start, stop)
        return parts if is_row else [(start, stop)]


def _kind(program: Program, operation: Operation, resized: bool) -> tuple:
    """What two operations have in common that do the same; if ``resized``, to arrays of other
    sizes, where what is computed is smaller, as large or larger than what it is computed of."""
    sizes = program.sizes
    if resized:
        computed = [sizes[value] for value in operation.inputs if value >= program.input_count]
        # (The first one is computed of the batch.)
        computed = computed or [max((sizes[value] for value in operation.inputs), default=0)]
        pairs = ((sizes[value], of) for value in operation.outputs for of in computed)
        return operation.name, *((size > of) - (size < of) for size, of in pairs)
    made = (sizes[value] for value in operation.outputs)
    return (operation.name, *made, -1, *(sizes[value] for value in operation.inputs))


def _longest(signature: np.ndarray, price: np.ndarray, least: float) -> tuple[int, int, int] | None:
    """The dearest stretch that consists of one period again and again, of a price of at least so
    much each: where it starts, the period, and how often; None: nothing repeats."""
    best, found = 0.0, None
    for period in range(1, min(len(signature) // 2, _PERIODS) + 1):
        same = np.concatenate([[False], signature[:-period] == signature[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, stops = edges[::2], edges[1::2]
        long = stops - starts >= period
        for start, stop in zip(starts[long], stops[long], strict=True):
            times = (stop - start) // period + 1
            covered = price[start + times * period] - price[start]
            # (Twice a period covers the same, but for what sums are rounded to.)
            more = covered > best and not math.isclose(covered, best)
            if more and covered >= least * times:
                best, found = covered, (int(start), period, int(times))
    return found
