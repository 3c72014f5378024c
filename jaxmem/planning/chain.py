"""The least recompute of a chain of blocks in a given memory: the optimum over nested regions.

The persistent recursion of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, "Optimal
checkpointing for heterogeneous chains"; Griewank's and Chen's schemes are special cases), with two
additions: a region comes with the set of values that it saves, picked from a few levels, and what
crosses a cut is what is really read after it, so that skips count once.

Everything here is numbers; memory is counted in slots, ints.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Blocks ``0`` to ``n - 1`` in order, and levels of saved sets, from nothing to much.

    Attributes:
        recompute_cost: [levels, n] price of running a block again for its own backward pass.
        recompute_and_forward_cost: [levels, n] price of doing so and of making what later blocks
            read of it.
        backward_peak: [levels, n] memory of the block's backward pass, beyond what is kept before
            it.
        activation_bytes: [levels, n] what a block that is not recomputed leaves behind.
        forward_cost: [levels, n, n + 1] price of running blocks i to k - 1 for what later blocks
            read.
        checkpoint_bytes: [levels, n, n + 1] what blocks i to k - 1 leave behind as a region: what
            later blocks read, and what is saved.
    """

    recompute_cost: np.ndarray
    recompute_and_forward_cost: np.ndarray
    backward_peak: np.ndarray
    activation_bytes: np.ndarray
    forward_cost: np.ndarray
    checkpoint_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class ChainRegion:
    """Blocks ``start`` to ``stop - 1`` under a region that saves what ``level`` says."""

    start: int
    stop: int
    level: int
    inner: "tuple[ChainRegion, ...]"


class Solution:
    """The lowest price for every memory up to ``slots``."""

    def __init__(self, chain: Chain, slots: int):
        self.chain = chain
        self.slots = slots
        self.levels, self.count = chain.recompute_cost.shape
        # By number of blocks, [level, start, slots + 1 + memory]; what is below is out of memory.
        self.pad = slots + 1
        self.tables: list[np.ndarray] = []
        self._found: dict[tuple[int, int], tuple[int, int | None, int]] = {}
        self._fill()
        self._solve_top_level()

    def _fill(self) -> None:
        chain, pad, memory = self.chain, self.pad, np.arange(self.slots + 1)
        levels = np.arange(self.levels)[:, None]
        activation_bytes = np.minimum(chain.activation_bytes, pad)
        checkpoint_bytes = np.minimum(chain.checkpoint_bytes, pad)
        shifted: list[np.ndarray] = []  # by number of blocks, the prices where so much less is left
        regions: list[np.ndarray] = []  # those of a region of so many blocks, and of running them
        for length in range(self.count + 1):
            start = np.arange(self.count - length + 1)
            table = np.full((self.levels, len(start), pad + len(memory)), np.inf, np.float32)
            self.tables.append(table)
            shifted.append(self._shifted(table))
            if not length:
                table[:, :, pad:] = 0
                regions.append(table[:, :, pad:])
                continue
            run = chain.recompute_cost if length == 1 else chain.recompute_and_forward_cost
            used = activation_bytes[:, start] * (length > 1)
            best = shifted[length - 1][levels, start + 1, used]
            best += run[:, start, None]
            best[chain.backward_peak[:, start, None] > memory] = np.inf
            for split in range(1, length):
                used = checkpoint_bytes[:, start, start + split]
                price = shifted[length - split][levels, start + split, used]
                price += regions[split][:, : len(start)]
                np.minimum(best, price, out=best)
            table[:, :, pad:] = best
            forward_cost = chain.forward_cost[:, start, start + length, None].astype(np.float32)
            regions.append(best + forward_cost)

    def _shifted(self, table: np.ndarray) -> np.ndarray:
        """[level, start, used]: the prices of a table, by memory, where so much less is left; a
        view."""
        windows = np.lib.stride_tricks.sliding_window_view
        return windows(table, self.slots + 1, -1)[:, :, ::-1]

    def _solve_top_level(self) -> None:
        """[start, pad + memory]: the whole chain from a block on, whose forward pass is the first:
        running it costs nothing extra."""
        self.top = np.full((self.count + 1, self.pad + self.slots + 1), np.inf, dtype=np.float32)
        self.top[self.count, self.pad :] = 0
        for start in reversed(range(self.count)):
            alone, _, regions, _ = self._transitions(start, np.arange(self.slots + 1))
            self.top[start, self.pad :] = np.minimum(alone, regions.min((0, 1), initial=np.inf))

    def _transitions(self, start: int, memory) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
        """Ways to go on at the top level within a memory, or each of several: the price of a block
        that runs in no region, and what it uses; [level, stop]: those of regions from it on."""
        chain, top, at = self.chain, self.top, self.pad + memory
        used = 0 if start + 1 == self.count else int(chain.activation_bytes[0, start])
        rest = top[start + 1, at - min(used, self.pad)]
        alone = np.where(chain.backward_peak[0, start] <= memory, rest, np.inf)
        stops = range(start + 1, self.count)
        uses = chain.checkpoint_bytes[:, start, start + 1 : self.count]
        regions = np.full((*uses.shape, *np.shape(memory)), np.inf, np.float32)
        for number, stop in enumerate(stops):
            shifted = np.subtract.outer(at, np.minimum(uses[:, number], self.pad)).T
            regions[:, number] = top[stop, shifted] + self.tables[stop - start][:, start, at]
        return alone, used, regions, uses

    def _best(self, start: int, memory: int) -> tuple[int, int | None, int]:
        """The way of the lowest price: its end, level or None, and the memory used; of several the
        first to end."""
        found = self._found.get((start, memory))
        if found is None:
            alone, used, regions, uses = self._transitions(start, memory)
            found = start + 1, None, used
            if (lowest := regions.min(initial=np.inf)) < alone:
                stop, level = map(int, np.argwhere(lowest == regions.T)[0])
                found = start + 1 + stop, level, int(uses[level, stop])
            self._found[start, memory] = found
        return found

    def price(self, memory: int) -> float:
        """The lowest price within a memory; infinite if nothing fits."""
        return float(self.top[0, self.pad + memory])

    def prices(self, level: int) -> np.ndarray:
        """By memory, the price of running all blocks again under a region."""
        return self.tables[self.count][level, 0, self.pad :]

    def minimum_memory(self) -> int:
        """The least memory that anything fits in, or ``slots + 1``."""
        fits = np.flatnonzero(np.isfinite(self.top[0, self.pad :]))
        return int(fits[0]) if len(fits) else self.slots + 1

    def steps(self) -> list[int]:
        """The memories from which on something has a lower price, in order."""
        prices = self.top[0, self.pad - 1 :]
        return [int(memory) for memory in np.flatnonzero(prices[1:] < prices[:-1])]

    def chain_regions(self, memory: int) -> tuple[ChainRegion, ...]:
        """The regions that reach `price`."""
        found, start = [], 0
        while start < self.count:
            stop, level, used = self._best(start, memory)
            if level is not None:
                inner = self.inner(level, start, stop, memory)
                found.append(ChainRegion(start, stop, level, inner))
            start, memory = stop, memory - used
        return tuple(found)

    def inner(self, level: int, start: int, stop: int, memory: int) -> tuple[ChainRegion, ...]:
        chain, pad = self.chain, self.pad
        found = []

        def price_of(start: int, stop: int, memory: int, used: int = 0) -> float:
            return self.tables[stop - start][level, start, pad + memory - min(used, pad)]

        while start < stop:
            last = start + 1 == stop
            run = (chain.recompute_cost if last else chain.recompute_and_forward_cost)[level, start]
            used = 0 if last else int(chain.activation_bytes[level, start])
            best = np.inf
            if chain.backward_peak[level, start] <= memory:
                best = price_of(start + 1, stop, memory, used) + run
            choice = None
            for middle in range(start + 1, stop):
                price = price_of(
                    middle, stop, memory, int(chain.checkpoint_bytes[level, start, middle])
                )
                price += price_of(start, middle, memory)
                price += chain.forward_cost[level, start, middle]
                if price < best:
                    best, choice = price, middle
            if choice is None:
                start, memory = start + 1, memory - used
            else:
                inner = self.inner(level, start, choice, memory)
                found.append(ChainRegion(start, choice, level, inner))
                memory -= int(chain.checkpoint_bytes[level, start, choice])
                start = choice
        return tuple(found)
