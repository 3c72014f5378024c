"""What planners propose, and what is asked of a planner."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxmem.planning.regions import Loop, Region
from jaxmem.planning.simulation import LiveBytes


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Operations ``start`` to ``stop - 1`` of a program under one `jax.checkpoint`, whose policy
    has a name (`jaxmem.planning.per_block.policies`)."""

    start: int
    stop: int
    policy: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Regions and loops, their projected peak beyond the program's inputs and the place that sets
    it (a kernel and the innermost region round it; of a scan, also those of its body), how often
    each kernel runs forward, and what all that adds to one plain forward pass: FLOPs, bytes moved,
    seconds, and the price by which plans are compared (`Rates.price`). With ``segments`` it is
    those that are emitted, and regions are what they come to in kernels."""

    regions: tuple[Region, ...]
    loops: tuple[Loop, ...]
    peak: int
    peak_location: tuple[int, ...]
    runs: dict[int, int] = dataclasses.field(compare=False)
    flops: int
    moved: int
    seconds: float
    price: float
    host: tuple[tuple[int, int], ...]  # a loop's kernel, and bytes of residuals that wait there
    live: LiveBytes = dataclasses.field(compare=False, repr=False)
    segments: tuple[Segment, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Those of all residuals that are copied to host memory."""
        return sum(size for _, size in self.host)

    @property
    def host_peak(self) -> int:
        """The most bytes that are in host memory at once. Loops inside of a region are run again
        when what the loops after it had there is read."""
        return _most_at_once(self.regions, dict(self.host))


def _most_at_once(regions: Sequence[Region], sizes: Mapping[int, int]) -> int:
    """Of the residuals of loops, by kernel, with regions round some of them."""
    inside = [sizes.keys() & range(one.start, one.stop) for one in regions]
    outside = sizes.keys() - set().union(*inside)
    turns = [sum(sizes[at] for at in outside)]
    for region, loops in zip(regions, inside, strict=True):
        before = sum(sizes[at] for at in outside if at < region.start)
        turns.append(before + _most_at_once(region.regions, {at: sizes[at] for at in loops}))
    return max(turns)


class Planner(Protocol):
    """The plans that one way of planning has for one program; bytes are beyond its inputs."""

    plain: Layout

    def cheapest_for(self, budget: int) -> Layout | None:
        """The least recompute that is projected to fit a budget, or None."""

    def minimum_peak(self) -> Layout:
        """The least projected bytes, at any price."""

    def cheapest_near_minimum(self) -> Layout:
        """About the least projected bytes, at the lowest price."""

    def minimum_at_one_forward(self) -> Layout:
        """The least projected bytes for at most one more forward pass."""

    def per_block_layouts(self) -> list[Layout]:
        """What else to compile where nothing that is projected to fit does."""
