"""A program cut into a chain of blocks, for the planners that work on chains."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from jaxmem.planning.chain import Chain, ChainRegion
from jaxmem.planning.regions import Region
from jaxmem.planning.simulation import simulate_block
from jaxmem.program import Program, gradient_size

# Blocks of a chain. Chosen: the time of planning grows with the square. What half and twice change,
# here and below: benchmarks/planner/sensitivity.py.
_BLOCKS = 96
# Of the bytes of all values. Chosen.
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 2 / 5, 11 / 20, 3 / 4)
# Of the largest value: saved in any case. Chosen.
TINY = 1 / 4096


class Blocks:
    """A program cut into a chain of blocks, and its levels of saved sets.

    Values are saved in the order of the price of making one again for its bytes; there
    are at most so many ``levels`` of that, and ``sets`` of values beside them. With ``gradients``
    the bytes of a block's backward pass count those of the program's inputs.
    """

    def __init__(
        self,
        program: Program,
        prices: Sequence[float],
        levels: int = len(_SHARES),
        sets: Sequence[frozenset[int]] = (),
        gradients: bool = False,
    ):
        self.program = program
        self.gradients = gradients
        self.prices = prices
        kernels = program.kernels
        self.made = program.made
        self.last = program.last_used
        self.values = [value for kernel in kernels for value in kernel.results]
        spared = {value for kernel in kernels for value in kernel.reusable_results}
        self.cuts = _cuts(program)
        largest = max((program.sizes[value] for value in self.values), default=0)
        self.density = {}
        for kernel, price in zip(kernels, prices, strict=True):
            for value in kernel.results:
                size = program.sizes[value]
                tiny = size <= largest * TINY
                self.density[value] = np.inf if tiny else price / size
                if value == kernel.residuals or not (tiny or value in spared):
                    self.density[value] = -np.inf  # nothing that a region can save, or gains by
        ranks = (
            frozenset(v for v in self.values if self.density[v] >= least)
            for least in self._thresholds(levels)
        )
        self.levels = list(dict.fromkeys([*ranks, *sets]))

    def can_be_saved(self, value: int) -> bool:
        """Whether a region may save it, and gains by that; what is tiny is saved anyway."""
        return bool(np.isfinite(self.density[value]))

    def _thresholds(self, most: int) -> list[float]:
        """Least densities of the levels, the first of which saves only what is tiny: all that
        there are if they are few, else those that part the bytes of the values."""
        ranked = sorted(
            filter(self.can_be_saved, self.values),
            key=lambda value: -self.density[value],
        )
        found = sorted({self.density[value] for value in ranked}, reverse=True)
        if len(found) > most:
            total = np.cumsum([self.program.sizes[value] for value in ranked])
            at = np.searchsorted(total, total[-1] * np.array(_SHARES))
            found = sorted({self.density[ranked[index]] for index in at}, reverse=True)
        return [np.inf, *found]

    def chain(self, slot: int) -> Chain:
        """The chain with memory in slots of so many bytes."""

        def slots(array: np.ndarray) -> np.ndarray:
            return np.ceil(array / slot).astype(np.int64)

        found = self._in_bytes
        return dataclasses.replace(
            found,
            backward_peak=slots(found.backward_peak),
            activation_bytes=slots(found.activation_bytes),
            checkpoint_bytes=slots(found.checkpoint_bytes),
        )

    @functools.cached_property
    def _in_bytes(self) -> Chain:
        count, levels = len(self.cuts) - 1, len(self.levels)
        recompute, recompute_and_forward = np.zeros((levels, count)), np.zeros((levels, count))
        inside, activations = np.zeros((levels, count)), np.zeros((levels, count))
        forward, checkpoints = (np.zeros((levels, count, count + 1)) for _ in range(2))
        live = self._live_gradients() + self._passing_cotangents()
        for level, saved in enumerate(self.levels):
            for block, (start, stop) in enumerate(itertools.pairwise(self.cuts)):
                need, cross, stay = self._block(start, stop, saved)
                recompute[level, block] = self._price(start, stop, need, saved)
                recompute_and_forward[level, block] = self._price(start, stop, need | cross, saved)
                activations[level, block] = self._bytes(stay)
                cost = simulate_block(self.program, start, stop, saved, (), self.gradients)
                inside[level, block] = cost.peak + live[block]
            forward[level], checkpoints[level] = self._between(saved)
        return Chain(recompute, recompute_and_forward, inside, activations, forward, checkpoints)

    def _live_gradients(self) -> np.ndarray:
        """By block, bytes of gradients that are there in its backward pass, its own among them,
        where they are no results."""
        program, found = self.program, np.zeros(len(self.cuts) - 1)
        become = program.input_gradients.become
        trained = {value for value in range(program.input_count) if program.active[value]}
        if become == "updates":
            for value in trained:
                last = int(np.searchsorted(self.cuts, self.last[value])) - 1
                found[: last + 1] += gradient_size(program, value)
        if become == "summands":  # each for one kernel
            for block, (start, stop) in enumerate(itertools.pairwise(self.cuts)):
                read = {value for kernel in program.kernels[start:stop] for value in kernel.sources}
                sizes = (gradient_size(program, value) for value in trained & read)
                found[block] = max(sizes, default=0)
        return found

    def _passing_cotangents(self) -> np.ndarray:
        """By block, bytes of cotangents that later blocks have made and that only earlier ones
        read: those of skips."""
        program, found = self.program, np.zeros(len(self.cuts) - 1)
        of = program.cotangent_of
        for block, (start, stop) in enumerate(itertools.pairwise(self.cuts)):
            own = {of[v] for kernel in program.kernels[start:stop] for v in kernel.sources}
            passing = {
                of[value]
                for value in self.values
                if self.made[value] <= start and self.last[value] > stop and program.active[value]
            }
            found[block] = self._bytes(passing - own)
        return found

    def _bytes(self, values) -> int:
        return sum(self.program.sizes[value] for value in values)

    def _block(self, start: int, stop: int, saved: frozenset[int]):
        """Of a block: unsaved values that its derivatives read, unsaved ones that later kernels
        read, and what stays of it if it is not recomputed."""
        kernels = self.program.kernels[start:stop]
        own = {value for kernel in kernels for value in kernel.results}
        need = own.intersection(value for kernel in kernels for value in kernel.reads)
        cross = {value for value in own if self.last[value] > stop}
        return need - saved, cross - saved, need | cross | (own & saved)

    def _price(self, start: int, stop: int, wanted: set[int], saved: frozenset[int]) -> float:
        """Time to make values of a block from what enters it and from what is saved."""
        wanted, price = set(wanted), 0.0
        for index in reversed(range(start, stop)):
            kernel = self.program.kernels[index]
            if not wanted.isdisjoint(kernel.results):
                price += self.prices[index]
                wanted.update(value for value in kernel.sources if value not in saved)
        return price

    def _between(self, saved: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """[start, stop]: price of running from one cut to another for what is read after it, and
        the bytes of that and of what is saved between them."""
        program, cuts = self.program, self.cuts
        count = len(cuts) - 1
        forward, checkpoints = np.zeros((count, count + 1)), np.zeros((count, count + 1))
        block_of = np.searchsorted(cuts, [self.made[value] for value in self.values]) - 1
        sizes = np.array([program.sizes[value] for value in self.values], dtype=np.float64)
        last = np.array([self.last[value] for value in self.values])
        # For a cut and what is wanted there: the prices from all cuts before it. Mostly what is
        # wanted at one cut leads to the same at the one before.
        known: dict[tuple[int, frozenset[int]], np.ndarray] = {}
        is_saved = np.array([value in saved for value in self.values], dtype=bool)
        for stop in range(1, count + 1):
            end = cuts[stop]
            earlier = block_of < stop
            activations = np.zeros(count)
            resident = earlier & (is_saved | (last > end))
            np.add.at(activations, block_of[resident], sizes[resident])
            checkpoints[:, stop] = np.cumsum(activations[::-1])[::-1]
            crossing = earlier & ~is_saved & (last > end)
            wanted = {self.values[index] for index in np.flatnonzero(crossing)}
            self._walk(stop, wanted, saved, forward[:, stop], known)
        return forward, checkpoints

    def _walk(self, stop: int, wanted: set[int], saved: frozenset[int], prices, known) -> None:
        """Fills in the prices to make what is wanted at a cut, from each of the cuts before it."""
        passed, price, kernels = [], 0.0, self.program.kernels
        for block in reversed(range(stop)):
            key = (block + 1, frozenset(wanted))
            if key in known:
                prices[: block + 1] = price + known[key]
                break
            passed.append((key, price))
            for index in reversed(range(self.cuts[block], self.cuts[block + 1])):
                kernel = kernels[index]
                if not wanted.isdisjoint(kernel.results):
                    price += self.prices[index]
                    wanted.difference_update(kernel.results)
                    wanted.update(value for value in kernel.sources if value not in saved)
            prices[block] = price
        for (cut, needed), before in passed:
            known[cut, needed] = prices[:cut] - before

    def regions(self, stretches: Sequence[ChainRegion]) -> tuple[Region, ...]:
        """Stretches of the chain as regions of the program."""
        return tuple(
            Region(
                start := self.cuts[stretch.start],
                stop := self.cuts[stretch.stop],
                saved=tuple(
                    value
                    for kernel in self.program.kernels[start:stop]
                    for value in kernel.results
                    if value in self.levels[stretch.level]
                ),
                regions=self.regions(stretch.inner),
            )
            for stretch in stretches
        )


def _cuts(program: Program) -> list[int]:
    """Kernels before which to consider cutting: after those of expensive operations, whose results
    are in memory anyway, and at the local minima of live bytes. A long program keeps the lowest
    point of each stretch."""
    kernels, sizes = program.kernels, program.sizes
    count = len(kernels)
    alive = np.zeros(count + 2, dtype=np.int64)
    for kernel in kernels:
        for value in kernel.results:
            alive[program.made[value]] += sizes[value]
            alive[program.last_used[value]] -= sizes[value]
    alive = np.cumsum(alive)[: count + 1]
    inner = np.arange(1, count)
    expensive = np.array([kernel.flops > 0 for kernel in kernels], dtype=bool)
    low = (alive[inner] < alive[inner - 1]) & (alive[inner] < alive[inner + 1])
    found = inner[expensive[inner - 1] | low] if count else inner
    if len(found) > _BLOCKS:
        stretches = np.array_split(found, _BLOCKS)
        found = np.array([stretch[np.argmin(alive[stretch])] for stretch in stretches])
    return [0, *map(int, found), count] if count else [0]
