"""What a plan leaves of its budget, spent: regions that save more, are shorter, or are fewer.

The chain (`planning.chain`) picks what a region saves from a few levels, and counts bytes that the
layout does not: between two of its plans there may be half of the step's recomputation. Here single
changes of the regions are laid out, the most promising first, and each that fits and costs less is
kept: a local search.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jaxmem.planning.blocks import Blocks
from jaxmem.planning.layouts import Layout
from jaxmem.planning.regions import Region

Regions = tuple[Region, ...]
# Layouts that are tried. Chosen: all that bring more than a hundredth come among the first.
_TRIES = 150
# Kernels that they have together, which bounds the time: about half a second. Chosen.
_KERNELS = 20_000


def refined(
    layout: Layout, budget: int, layout_of: Callable[[Regions], Layout], blocks: Blocks
) -> Layout:
    """The plan with all changes that fit into the budget as well and cost less; ``layout_of``
    gives the plan with other regions."""
    tries = min(_TRIES, _KERNELS // max(len(blocks.program.kernels), 1))
    changed = True
    while changed:
        changed = False
        for regions in itertools.islice(_changes(layout, blocks), tries):
            tries -= 1
            found = layout_of(regions)
            if found.peak <= budget and found.price < layout.price:
                layout, changed = found, True
                break
    return layout


def _changes(layout: Layout, blocks: Blocks) -> Iterator[Regions]:
    """The plan's regions with one undone, with one more value saved, or with one that is shorter by
    a block."""
    places = list(_places(layout.regions))
    for place, region in places:
        yield _replaced(layout.regions, place, region.regions)
    again = {value for value in blocks.values if layout.runs.get(blocks.made[value] - 1, 0) > 1}
    for value in sorted(filter(blocks.can_be_saved, again), key=lambda v: -blocks.density[v]):
        for place, region in places:
            if region.start < blocks.made[value] <= region.stop and value not in region.saved:
                one = dataclasses.replace(region, saved=tuple(sorted((*region.saved, value))))
                yield _replaced(layout.regions, place, (one,))
                break
    for place, region in places:
        for one in _shorter(region, blocks):
            yield _replaced(layout.regions, place, (one,))


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
