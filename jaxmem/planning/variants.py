"""A program whose scans are decided, and its plans by the chain of its blocks.

The chain's optimum (`planning.chain`) proposes; its layout (`planning.simulation`), which knows
every skip and every transient, decides.
"""

import bisect
import functools
import math

from jaxmem.planning.blocks import Blocks
from jaxmem.planning.chain import Solution
from jaxmem.planning.layouts import Layout
from jaxmem.planning.loops import checkpointed, plain_option
from jaxmem.planning.options import LoopOption
from jaxmem.planning.per_block import Spans, block_partitions, per_block_regions, policies
from jaxmem.planning.rates import Rates, of_each
from jaxmem.planning.regions import Region, depth, locate
from jaxmem.planning.simulation import simulate_in_time
from jaxmem.program import Program

# What half and twice of each constant change, here and below where nothing else is said, prints
# benchmarks/planner/sensitivity.py (its table: benchmarks/results/planner.md).
_SLOTS = 200  # of the bytes of a chain. Chosen: finer grids take longer and miss other plans
# The chain counts bytes that the layout does not, in a GPT up to 0.7 times as many more. Chosen, of
# 1.25 to 3.2: with less, budgets are not used to the end; with more, the slots are too coarse.
_HEADROOM = 1.5
# Levels of regions in regions. JAX traces a level on top of the Python stack of the one around it;
# and this many reach the root of the sixteenth order of a chain's bytes. Chosen: long chains need
# more than half of it.
_DEPTH = 16
# Memories tried above the largest that fits. Chosen.
_EXTRA_MEMORIES = 3
# Memories tried where the line through the last layout meets the budget, before halves are. Chosen:
# it bounds the time where layouts are far from a line; two or three are enough for the others.
_GUESSES = 5
# A solution serves budgets down to this share of its memory. Chosen: above, more are solved; below,
# the slots of one are too coarse.
_REUSE_FRACTION = 0.7
# Each round of the search for the least peak solves the chain for this share of the last. Chosen.
_SHRINK_FACTOR = 0.9
# Memories from the chain's least on that are tried. Chosen: it bounds the time of planning where
# the layout takes more than the chain counts.
_FLOOR_MEMORIES = 25
_MIN_PROGRESS = 0.95  # of the last peak: worth one more round. Chosen: it bounds the rounds
# Times the least peak: as good, for a lower price. Chosen.
PEAK_TOLERANCE = 1.02


class Variant:
    """A program whose scans are decided."""

    def __init__(self, program: Program, rates: Rates, options: list[LoopOption]):
        decided = zip(program.loops, options, strict=True)
        found = {n: (o.residuals, o.inside, o.loop is not None) for n, o in decided}
        self.program = program.with_loops(found) if found else program  # its kernels are known
        self.options = options
        self.loops = tuple(option.loop for option in options if option.loop)
        self.loops_price = sum(option.price for option in options)
        self.loops_seconds = sum(option.seconds for option in options)
        # At the scan that takes the most, some of it in the memory of gradients that are to come.
        lent = program.boundary_bytes - program.input_bytes
        self.least = max((option.bytes for option in options), default=0) - lent
        self.seconds = of_each(self.program, rates.seconds)
        self.prices = of_each(self.program, rates.price)
        self._blocks: Blocks | None = None
        self._solved: tuple[int, Solution] | None = None
        self._layouts: dict[tuple[Region, ...], Layout] = {}

    @classmethod
    def plain(cls, program: Program, rates: Rates) -> "Variant":
        """The program with its scans as JAX differentiates them."""
        return cls(program, rates, [plain_option(program, loop) for loop in program.loops])

    @classmethod
    def checkpointed(cls, program: Program, rates: Rates) -> "dict[str, list[Variant]]":
        """The program with one region on the body of each scan, as its author would place them, by
        policy."""
        menus = [checkpointed(program, scan, rates) for scan in program.scans]
        if not menus or not all(menus):
            return {}
        as_they_are = {number: [plain_option(program, number)] for number in program.maps}
        found: dict[str, list[Variant]] = {}
        for name in menus[0]:
            # One of a scan without scans in it.
            known = {n: menu[name] for n, menu in zip(program.scans, menus, strict=True)}
            ways = [(known | as_they_are)[number] for number in program.loops]
            count = max(map(len, ways))
            found[name] = [
                cls(program, rates, [one[min(at, len(one) - 1)] for one in ways])
                for at in range(count)
            ]
        return found

    @property
    def blocks(self) -> Blocks:
        if self._blocks is None:
            self._blocks = Blocks(self.program, self.prices)
        return self._blocks

    def layout(self, regions: tuple[Region, ...]) -> Layout:
        """The program with those regions."""
        if regions not in self._layouts:
            self._layouts[regions] = self._layout(regions)
        return self._layouts[regions]

    def _layout(self, regions: tuple[Region, ...]) -> Layout:
        cost, live = simulate_in_time(self.program, regions)
        kernels = self.program.kernels
        again = {number: times - 1 for number, times in cost.runs.items() if times > 1}
        options = dict(zip(self.program.loops, self.options, strict=True))
        inside = options[cost.at].peak_location if cost.at in options else ()
        return Layout(
            regions,
            self.loops,
            cost.peak,
            (*locate(regions, cost.at), *inside),
            dict(cost.runs),
            sum(kernels[k].flops * n for k, n in again.items())
            + sum(option.flops for option in self.options),
            sum(kernels[k].moved * n for k, n in again.items())
            + sum(option.moved for option in self.options),
            sum(self.seconds[k] * n for k, n in again.items()) + self.loops_seconds,
            sum(self.prices[k] * n for k, n in again.items()) + self.loops_price,
            tuple((option.loop.kernel, option.host) for option in self.options if option.loop),
            live,
        )

    def solution(self, budget: int) -> tuple[int, Solution]:
        """The chain's solution for memories up to the budget and some more, and its slot."""
        if self._solved:
            slot, solution = self._solved
            if (
                _REUSE_FRACTION * solution.slots * slot
                <= budget * _HEADROOM
                <= solution.slots * slot
            ):
                return self._solved
        slot = max(int(budget * _HEADROOM / _SLOTS) + 1, 1)
        self._solved = slot, Solution(self.blocks.chain(slot), _SLOTS)
        return self._solved

    def cheapest_for(self, budget: int) -> Layout | None:
        plain = self.layout(())
        if plain.peak <= budget:
            return plain
        slot, solution = self.solution(budget)
        # The memories at which the chain's plan changes; the largest whose layout fits, and some
        # above it: layouts do not quite grow with the chain's memory.
        memories = solution.steps()
        low, high = 0, len(memories)
        wanted, guesses = budget // slot, _GUESSES
        tried: list[Layout | None] = []
        while low < high:
            guess = min(max(bisect.bisect_left(memories, wanted), low), high - 1)
            at = least = guess if guesses > 0 else (low + high) // 2
            # Of a memory whose plan is nested too deep the plan for less memory tells.
            while (layout := self.proposed(solution, memories[least])) is None and least > low:
                least -= 1
            over = layout.peak - budget if layout else 0
            wanted, guesses = memories[least] - math.ceil(over / slot), guesses - 1 if layout else 0
            low, high = (low, least) if over > 0 else (at + 1, high)
            tried.append(layout)
        more = memories[low + 1 : low + 1 + _EXTRA_MEMORIES]
        tried += [self.proposed(solution, memory) for memory in more]
        fits = [layout for layout in tried if layout and layout.peak <= budget]
        price = min((layout.price for layout in fits), default=math.inf)
        fits += self.per_block_layouts_for(budget, price)
        return min(fits, key=lambda layout: (layout.price, layout.peak), default=None)

    @functools.cached_property
    def per_block_choices(self) -> list[tuple[Spans, frozenset[int]]]:
        """One region on each block, as an author would place them: blocks, and what is saved."""
        saved = policies(self.program).values()
        return [
            (s, v)
            for s in block_partitions(self.program, self.prices)
            for v in dict.fromkeys(saved)
        ]

    def per_block_layout(self, spans: Spans, saved: frozenset[int]) -> Layout:
        return self.layout(per_block_regions(self.program, spans, saved))

    def per_block_layouts_for(self, budget: int, price: float) -> list[Layout]:
        """Rows of regions that fit and cost less than a price, each on as many blocks from the
        first on as the budget asks for."""
        found, plain = [], self.layout(())
        for spans, saved in self.per_block_choices:
            whole = self.per_block_layout(spans, saved)
            if whole.peak > budget:
                continue
            found.append(whole)
            count = len(spans)
            share = (plain.peak - budget) / max(plain.peak - whole.peak, 1)
            least = max(math.ceil(share * count), 1)
            if least < count and whole.price * least / count < price:
                part = self.per_block_layout(spans[:least], saved)
                if part.peak <= budget:
                    found.append(part)
        return [layout for layout in found if layout.price < price]

    def proposed(self, solution: Solution, memory: int) -> Layout | None:
        """What the chain's plan for a memory really is; None: nested too deep."""
        regions = self.blocks.regions(solution.chain_regions(memory))
        return self.layout(regions) if depth(regions) <= _DEPTH else None

    def smallest_in(self, seconds: float) -> Layout:
        """The least projected peak that is found to take so much more time at most."""
        best = self.layout(())
        price = (
            seconds * sum(self.prices) / (sum(self.seconds) or 1)
        )  # of that much time, by and large
        while True:
            _, solution = self.solution(best.peak)
            memories = solution.steps()
            found: list[Layout] = [best]

            def in_time(memory: int, found=found, solution=solution) -> bool:
                """Tries a memory; whether it takes no more time than that."""
                layout = self.proposed(solution, memory)
                if layout is None:
                    return solution.price(memory) <= price
                if layout.seconds <= seconds:
                    found.append(layout)
                return layout.seconds <= seconds

            at = bisect.bisect_left(memories, True, key=in_time)
            for memory in memories[max(at - _EXTRA_MEMORIES, 0) : at]:
                in_time(memory)
            lower = min(found, key=lambda layout: layout.peak)
            if lower.peak >= _MIN_PROGRESS * best.peak:
                close = self.cheapest_for(lower.peak)
                return close if close and close.seconds <= seconds else lower
            best = lower

    def minimum_peak(self) -> Layout:
        best = self.layout(())
        while True:
            _, solution = self.solution(int(best.peak * _SHRINK_FACTOR))
            low = solution.minimum_memory()
            memories = range(low, min(low + _FLOOR_MEMORIES, solution.slots + 1))
            found = [lay for memory in memories if (lay := self.proposed(solution, memory))]
            lower = min(found, key=lambda layout: layout.peak, default=best)
            if lower.peak >= _MIN_PROGRESS * best.peak:
                lowest = min(lower.peak, best.peak)
                close = self.cheapest_for(int(PEAK_TOLERANCE * lowest))
                return close or min(lower, best, key=lambda layout: layout.peak)
            best = lower
