"""The planner that makes nothing again but what is cheap: no matmul and no convolution.

What each of them makes is saved, and a region ends right after each: it computes the norms and
activations before it again from what the one before made. Such regions stand in groups, and the
groups in one region, so that what is between two of them, a block's output say, is not kept either.
"""

from jaxmem.planning.layouts import Layout
from jaxmem.planning.rates import Rates
from jaxmem.planning.regions import Region
from jaxmem.planning.variants import Variant
from jaxmem.program import Program

# Chosen. Half and twice: benchmarks/planner/sensitivity.py.
_GROUPS = (1, 3, 6, 12)  # regions in one
_STATISTICS = 1 / 64  # of what it is made of: what norms and losses sum up, saved too


class Dots:
    """Two plans of one program: the plain one, and the least with every matmul done once. Scans
    stay as they are."""

    def __init__(self, program: Program, rates: Rates):
        self.variant = Variant.plain(program, rates)
        self.plain = self.variant.layout(())
        self.kernels = self.variant.program.kernels
        sizes = program.sizes
        self.saved = set()
        for kernel in self.kernels:
            read = max((sizes[value] for value in kernel.sources), default=0)
            self.saved |= {
                value
                for value in kernel.results
                if (not kernel.fused or sizes[value] <= read * _STATISTICS)
                and value != kernel.residuals
            }

    def cheapest_for(self, budget: int) -> Layout | None:
        """The plain plan if it fits, else the least, or None."""
        return next(
            (one for one in (self.plain, self.cheapest_near_minimum()) if one.peak <= budget), None
        )

    def cheapest_near_minimum(self) -> Layout:
        """The least projected peak."""
        leaves = self._leaves()
        found = [self.variant.layout(self._nested(leaves, group)) for group in _GROUPS]
        once = (layout for layout in found if not layout.flops)
        return min([self.plain, *once], key=lambda layout: layout.peak)

    minimum_peak = minimum_at_one_forward = cheapest_near_minimum

    def per_block_layouts(self) -> list[Layout]:
        """None."""
        return []

    def _leaves(self) -> list[list[tuple[int, int]]]:
        """First and last kernels; a row of them ends at each scan, and at what would have to run
        its matmuls again for residuals of its own (a conditional, a rule of the user's)."""
        scans = {*self.variant.program.scans}
        rows: list[list[tuple[int, int]]] = [[]]
        start = 0
        for index, kernel in enumerate(self.kernels):
            if index in scans or (kernel.flops and kernel.residuals is not None):
                rows.append([])
                start = index + 1
            elif kernel.flops:
                rows[-1].append((start, index + 1))
                start = index + 1
        return [row for row in rows if row]

    def _nested(self, rows: list[list[tuple[int, int]]], group: int) -> tuple[Region, ...]:
        regions = []
        for row in rows:
            leaves = [self._region(*span) for span in row]
            groups = [leaves[at : at + group] for at in range(0, len(leaves), group)]
            middle = [self._region(part[0].start, part[-1].stop, part) for part in groups]
            inside = leaves if group == 1 else middle
            regions += [self._region(row[0][0], row[-1][1], inside)] if len(inside) > 1 else inside
        return tuple(regions)

    def _region(self, start: int, stop: int, inside=()) -> Region:
        saved = (v for kernel in self.kernels[start:stop] for v in kernel.results)
        return Region(start, stop, tuple(v for v in saved if v in self.saved), tuple(inside))
