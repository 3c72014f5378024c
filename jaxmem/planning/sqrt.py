"""Chen's sqrt(N) planner (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

The program is cut into a row of regions that keep only what crosses their ends; the last one is
not wrapped, since its backward pass follows at once. Chen places the cuts by a greedy sweep and a
search over its threshold, which on N equal layers gives sqrt(N) regions. Here the sweep is exact:
for a peak P, a shortest path over the candidate cuts finds the least bytes to keep such that every
region fits beside what is kept before it; a bisection finds the least P.
"""

import functools
import itertools

import numpy as np

from jaxmem.planning.layouts import Layout
from jaxmem.planning.rates import Rates
from jaxmem.planning.regions import Region
from jaxmem.planning.variants import Variant
from jaxmem.program import Program

# Chosen: they bound the time of planning. Half and twice: benchmarks/planner/sensitivity.py.
_CANDIDATES = 800
_TRIES = 6


class Sqrt:
    """Rows of regions for one program. Scans stay as they are."""

    def __init__(self, program: Program, rates: Rates):
        self.variant = Variant.plain(program, rates)
        self.chain = _Chain(self.variant.program)
        self.plain = self.variant.layout(())

    def cheapest_for(self, budget: int) -> Layout | None:
        """The least recompute whose projected peak is at most ``budget`` bytes, or None."""
        if self.plain.peak <= budget:
            return self.plain
        limit: float = budget
        for _ in range(_TRIES):
            ends = self.chain.least_recompute(limit)
            if ends is None:
                break
            layout = self.variant.layout(self.chain.regions(ends))
            if layout.peak <= budget:
                return layout
            limit *= 0.99 * budget / layout.peak  # chosen: a little less than would do
        # The chain's bytes are not the layout's: it may fit all the same.
        least = self.cheapest_near_minimum()
        return least if least.peak <= budget else None

    def cheapest_near_minimum(self) -> Layout:
        """The least projected peak."""
        return self._minimum

    def per_block_layouts(self) -> list[Layout]:
        """None: every plan is a row of regions."""
        return []

    @functools.cached_property
    def _minimum(self) -> Layout:
        ends = self.chain.least_recompute(self.chain.least_peak()) or []
        layout = self.variant.layout(self.chain.regions(ends))
        return min(layout, self.plain, key=lambda layout: layout.peak)

    minimum_peak = cheapest_near_minimum
    # No region is nested: one more forward pass at most.
    minimum_at_one_forward = cheapest_near_minimum


class _Chain:
    """A program as a chain of candidate cuts, with the bytes of every stretch between two."""

    def __init__(self, program: Program):
        self.program = program
        kernels = program.kernels
        count = len(kernels)
        values = np.array([v for kernel in kernels for v in kernel.results], dtype=np.int64)
        sizes = np.asarray(program.sizes, dtype=np.float64)[values]
        made = np.asarray(program.made, dtype=np.int64)[values]
        last = np.asarray(program.last_used, dtype=np.int64)[values]
        crossing = np.zeros(count + 2)
        np.add.at(crossing, made, sizes)
        np.subtract.at(crossing, last, sizes)
        expensive = np.array([not kernel.fused for kernel in kernels], dtype=bool)
        self.cuts = _candidates(np.cumsum(crossing)[: count + 1], expensive)
        size = len(self.cuts)

        slot = np.searchsorted(self.cuts, made)

        def between(counted: set[int]) -> np.ndarray:
            """[i, k]: bytes of the counted values made between two cuts, and the largest of them
            once more: its cotangent stands beside it."""
            bytes_of = np.where([value in counted for value in values.tolist()], sizes, 0)
            sums, largest = np.zeros(size), np.zeros(size)
            np.add.at(sums, slot, bytes_of)
            np.maximum.at(largest, slot, bytes_of)
            total = np.cumsum(sums)
            table = total[None, :] - total[:, None]
            for start in range(size):
                table[start, start + 1 :] += np.maximum.accumulate(largest[start + 1 :])
            return table

        # A region that is recomputed has all of its materialised values in memory; what is not
        # wrapped keeps its residuals, which are fewer.
        self.inside = between(set(values.tolist()))
        self.unwrapped = between({v for kernel in kernels for v in kernel.reads})[:, -1]
        # kept[i, k]: bytes made between two cuts that are read after the second
        self.kept = np.zeros((size, size))
        for end in range(1, size - 1):
            alive = last > self.cuts[end]
            made_in = np.zeros(size)
            np.add.at(made_in, slot[alive & (slot <= end)], sizes[alive & (slot <= end)])
            self.kept[:end, end] = np.cumsum(made_in[::-1])[::-1][1 : end + 1]
        flops = np.zeros(count + 1)
        flops[1:] = np.cumsum([kernel.flops for kernel in kernels])
        self.flops = flops[self.cuts]

    def reach(self, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Least bytes kept to reach each cut with every region below ``limit``; and from where."""
        size = len(self.cuts)
        least = np.full(size, np.inf)
        least[0] = 0
        origin = np.zeros(size, dtype=np.int64)
        for end in range(1, size - 1):
            total = least[:end] + self.kept[:end, end]
            total[total + self.inside[:end, end] > limit] = np.inf
            origin[end] = np.argmin(total)
            least[end] = total[origin[end]]
        return least, origin

    def least_recompute(self, limit: float) -> list[int] | None:
        """Ends of the regions whose unwrapped rest starts earliest, or None if none fits."""
        least, origin = self.reach(limit)
        fits = np.flatnonzero(least[:-1] + self.unwrapped[:-1] <= limit)
        if not len(fits):
            return None
        end, ends = int(fits[np.argmin(self.flops[fits])]), []
        while end:
            ends.append(end)
            end = int(origin[end])
        return ends[::-1]

    def least_peak(self) -> int:
        """The least peak that regions can reach, to the byte."""
        low, high = 0, self.peak([])
        while low < high:
            middle = (low + high) // 2
            if self.least_recompute(middle) is None:
                low = middle + 1
            else:
                high = middle
        return high

    def peaks(self, ends: list[int]) -> list[int]:
        """Projected peak in the backward pass of each region, the unwrapped rest last."""
        kept, peaks, start = 0.0, [], 0
        for end in ends:
            kept += self.kept[start, end]
            peaks.append(int(kept + self.inside[start, end]))
            start = end
        return [*peaks, int(kept + self.unwrapped[start])]

    def peak(self, ends: list[int]) -> int:
        return max(self.peaks(ends))

    def regions(self, ends: list[int]) -> tuple[Region, ...]:
        cuts = [0, *(int(self.cuts[end]) for end in ends)]
        return tuple(Region(start, stop) for start, stop in itertools.pairwise(cuts))


def _candidates(crossing: np.ndarray, expensive: np.ndarray) -> np.ndarray:
    """Where to consider cutting: right after expensive operations, whose results are in memory
    anyway, and at the local minima of live bytes (of a level stretch, at its ends and before
    expensive operations). A long program keeps the lowest point of each stretch.
    """
    inner = np.arange(1, len(crossing) - 1)
    before, at_cut, after = crossing[inner - 1], crossing[inner], crossing[inner + 1]
    level = (at_cut == before) & (at_cut == after)
    least = (at_cut <= before) & (at_cut <= after)
    low = inner[expensive[inner - 1] | (least & (~level | expensive[inner]))]
    if len(low) > _CANDIDATES:
        stretches = np.array_split(low, _CANDIDATES)
        low = np.array([stretch[np.argmin(crossing[stretch])] for stretch in stretches])
    return np.concatenate([[0], low, [len(crossing) - 1]]).astype(np.int64)
