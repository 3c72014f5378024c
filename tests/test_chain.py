"""The chain's optimum against every plan there is, on random chains of up to eight blocks."""

import functools

import numpy as np
import pytest

from jaxmem.planning.chain import Chain, ChainRegion, Solution


def random_chain(seed: int) -> tuple[Chain, int]:
    random = np.random.default_rng(seed)
    count, levels = int(random.integers(1, 9)), int(random.integers(1, 4))
    most = int(random.choice([3, 12, 40]))

    def draw(*shape):
        return random.integers(0, most, shape)

    again = draw(levels, count)
    chain = Chain(
        again,
        again + draw(levels, count),
        1 + draw(levels, count),
        draw(levels, count),
        draw(levels, count, count + 1),
        draw(levels, count, count + 1),
    )
    return chain, int(random.integers(1, 6 * most))


def every_plan(chain: Chain) -> dict[int, int]:
    """Least time of every peak that a plan can have: all trees of regions, written out as (peak,
    time) pairs without a notion of a budget. Of plans for the same stretch only those that another
    is not better than in both are gone on with, which changes no minimum."""
    levels, count = chain.recompute_cost.shape

    def front(plans):
        best: dict[int, int] = {}
        for peak, time in sorted(plans):
            if not best or time < min(best.values()):
                best[peak] = time
        return tuple(best.items())

    def after(live, plans, peak_before, time_before):
        return [(max(live + peak, peak_before), time + time_before) for peak, time in plans]

    @functools.cache
    def inner(level, start, stop):
        """The backward pass of a stretch under a region, what enters it at hand."""
        last = start + 1 == stop
        inside = chain.backward_peak[level, start]
        run = (chain.recompute_cost if last else chain.recompute_and_forward_cost)[level, start]
        live = 0 if last else chain.activation_bytes[level, start]
        rest = ((0, 0),) if last else inner(level, start + 1, stop)
        plans = after(live, rest, inside, run)
        for middle in range(start + 1, stop):
            for peak, time in inner(level, start, middle):
                plans += after(
                    chain.checkpoint_bytes[level, start, middle],
                    inner(level, middle, stop),
                    peak,
                    time + chain.forward_cost[level, start, middle],
                )
        return front(plans)

    @functools.cache
    def top(start):
        if start == count:
            return ((0, 0),)
        last = start + 1 == count
        plans = after(
            0 if last else chain.activation_bytes[0, start],
            top(start + 1),
            chain.backward_peak[0, start],
            0,
        )
        for stop in range(start + 1, count):
            for level in range(levels):
                for peak, time in inner(level, start, stop):
                    plans += after(
                        chain.checkpoint_bytes[level, start, stop], top(stop), peak, time
                    )
        return front(plans)

    return dict(top(0))


def walk(chain: Chain, stretches, start, stop, level=None) -> tuple[int, int]:
    """Peak and time of a plan, block by block, as its backward pass goes."""
    live = peak = time = 0
    pieces, at = [], start
    for stretch in stretches:
        pieces += [*range(at, stretch.start), stretch]
        at = stretch.stop
    pieces += range(at, stop)
    for piece in pieces:
        if isinstance(piece, ChainRegion):
            inside, spent = walk(chain, piece.inner, piece.start, piece.stop, piece.level)
            peak = max(peak, live + inside)
            live += chain.checkpoint_bytes[piece.level, piece.start, piece.stop]
            time += spent
            if level is not None:
                time += chain.forward_cost[level, piece.start, piece.stop]
        else:
            last = piece + 1 == stop
            peak = max(peak, live + chain.backward_peak[level or 0, piece])
            live += 0 if last else chain.activation_bytes[level or 0, piece]
            if level is not None:
                time += (chain.recompute_cost if last else chain.recompute_and_forward_cost)[
                    level, piece
                ]
    return peak, time


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_the_optimum_is_that_of_every_plan(first):
    """On 1,000 random chains the dp's time within a budget is the least of all plans', its plan
    has that time and that peak, and its least memory is the least of all."""
    for seed in range(first, first + 100):
        chain, budget = random_chain(seed)
        plans = every_plan(chain)
        solution = Solution(chain, budget)
        expected = min((time for peak, time in plans.items() if peak <= budget), default=np.inf)
        assert solution.price(budget) == expected, seed
        assert solution.minimum_memory() == min(min(plans), budget + 1), seed
        if np.isfinite(expected):
            stretches = solution.chain_regions(budget)
            peak, time = walk(chain, stretches, 0, chain.recompute_cost.shape[1])
            assert (peak <= budget, time) == (True, expected), seed
