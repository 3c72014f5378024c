"""What a plan leaves of its budget, spent: regions that save more, are shorter, or are fewer.

The chain (`planning.chain`) picks what a region saves from a few levels, and counts bytes that the
layout does not: between two of its plans there may be half of the step's recomputation. Here single
changes of the regions are laid out, the most promising first, and each that fits and costs less is
kept: a local search.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxmem.planning.blocks import Blocks
from jaxmem.planning.layouts import Layout
from jaxmem.planning.regions import Region

Regions = tuple[Region, ...]
Places = Sequence[tuple[tuple[int, ...], Region]]
Change = tuple[int, ...]  # what tells it from others: a value, or the ends of a region
# Layouts that are tried. Chosen: what brings more than a hundredth comes among the first.
_TRIES = 100
# Kernels that they have together, which bounds the time: about half a second. Chosen.
_KERNELS = 10_000


def refined(
    layout: Layout, budget: int, layout_of: Callable[[Regions], Layout], blocks: Blocks
) -> Layout:
    """The plan with all changes that fit into the budget as well and cost less; ``layout_of``
    gives the plan with other regions."""
    tries = min(_TRIES, _KERNELS // max(len(blocks.program.kernels), 1))
    tried: set[Change] = set()
    changed = True
    while changed:
        changed = False
        for change, regions in _changes(layout, blocks):
            if change in tried:
                continue
            if len(tried) == tries:
                return layout
            tried.add(change)
            other = layout_of(regions)
            if other.peak <= budget and other.price < layout.price:
                layout, changed = other, True
                break
    return layout


def _changes(layout: Layout, blocks: Blocks) -> Iterator[tuple[Change, Regions]]:
    """What to change, and the plan's regions with it: one more value saved and one region undone
    in turns, then each region shorter by a block."""
    places = list(_places(layout.regions))
    turns = itertools.zip_longest(_saved(layout, places, blocks), _undone(layout, places))
    yield from (one for both in turns for one in both if one)
    for place, region in places:
        for one in _shorter(region, blocks):
            change = region.start, region.stop, one.start, one.stop
            yield change, _replaced(layout.regions, place, (one,))


def _saved(layout: Layout, places: Places, blocks: Blocks) -> Iterator[tuple[Change, Regions]]:
    """Values that are made again, the dearest for their bytes first."""
    again = {value for value in blocks.values if layout.runs.get(blocks.made[value] - 1, 0) > 1}
    for value in sorted(filter(blocks.can_be_saved, again), key=lambda v: -blocks.density[v]):
        for place, region in places:
            if region.start < blocks.made[value] <= region.stop and value not in region.saved:
                one = dataclasses.replace(region, saved=tuple(sorted((*region.saved, value))))
                yield (value,), _replaced(layout.regions, place, (one,))
                break


def _undone(layout: Layout, places: Places) -> Iterator[tuple[Change, Regions]]:
    for place, region in places:
        yield (region.start, region.stop), _replaced(layout.regions, place, region.regions)


def _shorter(region: Region, blocks: Blocks) -> Iterator[Region]:
    """The region without its first or its last block, if those are in no region inside it."""
    cuts, inside = blocks.cuts, region.regions
    start = cuts[bisect.bisect_right(cuts, region.start)]
    stop = cuts[bisect.bisect_left(cuts, region.stop) - 1]
    if start < region.stop and (not inside or start <= inside[0].start):
        yield _between(region, start, region.stop, blocks)
    if stop > region.start and (not inside or stop >= inside[-1].stop):
        yield _between(region, region.start, stop, blocks)


def _between(region: Region, start: int, stop: int, blocks: Blocks) -> Region:
    saved = tuple(value for value in region.saved if start < blocks.made[value] <= stop)
    return dataclasses.replace(region, start=start, stop=stop, saved=saved)


def _places(regions: Regions, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple, Region]]:
    """All regions, outer ones first, and where they are."""
    for at, region in enumerate(regions):
        yield (*place, at), region
        yield from _places(region.regions, (*place, at))


def _replaced(regions: Regions, place: tuple[int, ...], others: Regions) -> Regions:
    """The regions with others in the place of one."""
    at, *inside = place
    if inside:
        others = _replaced(regions[at].regions, tuple(inside), others)
        others = (dataclasses.replace(regions[at], regions=others),)
    return (*regions[:at], *others, *regions[at + 1 :])
