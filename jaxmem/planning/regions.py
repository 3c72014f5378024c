"""Where a plan recomputes: regions, and loops with regions in their bodies."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxmem.loops import Schedule
from jaxmem.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Kernels ``start`` to ``stop - 1`` under one `jax.checkpoint`, recomputed in the backward
    pass but for the values ``saved``; ``regions`` are nested in it."""

    start: int
    stop: int
    saved: tuple[int, ...] = ()
    regions: "tuple[Region, ...]" = ()


def saved_by(regions: Sequence[Region]) -> frozenset[int]:
    """All values that regions save, those inside of others among them."""
    return frozenset().union(*({*one.saved, *saved_by(one.regions)} for one in regions))


def depth(regions: tuple[Region, ...]) -> int:
    """Of regions in regions; 0: there are none."""
    return 1 + max((depth(region.regions) for region in regions), default=-1)


def locate(regions: tuple[Region, ...], kernel: int) -> tuple[int, ...]:
    """A kernel's number, and the first and the last of the innermost region that it is in."""
    for region in regions:
        if region.start <= kernel < region.stop:
            inside = locate(region.regions, kernel)
            return inside if len(inside) > 1 else (kernel, region.start, region.stop - 1)
    return (kernel,)


def as_emitted(program: Program, regions: Sequence[Region]) -> tuple[Region, ...]:
    """Regions by the numbers that kernels have where the program is emitted: what devices send each
    other is no kernel there."""
    return _renumbered(regions, _emitted_before(program))


def _renumbered(regions: Sequence[Region], number: Sequence[int]) -> tuple[Region, ...]:
    """Regions by other numbers of their kernels, without those that are left empty."""
    found = (
        dataclasses.replace(
            one,
            start=number[one.start],
            stop=number[one.stop],
            regions=_renumbered(one.regions, number),
        )
        for one in regions
    )
    return tuple(one for one in found if one.start < one.stop)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A `scan`, whose body is recomputed in the backward pass but for the values ``saved`` of it;
    ``regions`` are nested in the body. The values ``offloaded`` (inputs of the body among them)
    wait for the backward pass in host memory. Or a `jax.shard_map` with ``regions`` in what it
    maps.

    ``kernel`` is its number in the program; values and ``regions`` are by the numbers of the body's
    own program. With a ``schedule`` states are kept for some iterations alone, and the others run
    again. ``whole`` is a body that is no region: all that its derivative reads is saved, but for
    what is in ``regions``.
    ``loops`` are the scans of the body that are not left as they are. With a ``head`` all this is
    of the iterations behind it. ``parted``: what comes after it is held apart in the backward pass,
    by a barrier.
    """

    kernel: int
    saved: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    offloaded: tuple[int, ...] = ()
    schedule: Schedule | None = None
    whole: bool = False
    loops: "tuple[Loop, ...]" = ()
    head: "LeadingIterations | None" = None
    parted: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class LeadingIterations:
    """The first ``count`` iterations of a `scan`, which are run as ``loop`` says."""

    count: int
    loop: Loop


def loops_as_emitted(program: Program, loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Loops by the numbers that kernels have where the program is emitted."""
    before = _emitted_before(program)

    def emitted(loop: Loop) -> Loop:
        body = program.body_of(loop.kernel)
        head = loop.head
        return dataclasses.replace(
            loop,
            kernel=before[loop.kernel],
            regions=as_emitted(body, loop.regions),
            loops=loops_as_emitted(body, loop.loops),
            head=head and LeadingIterations(head.count, emitted(head.loop)),
        )

    return tuple(map(emitted, loops))


def _emitted_before(program: Program) -> list[int]:
    """For each kernel, and the end, how many are emitted before it."""
    return [0, *itertools.accumulate(int(not kernel.sent_bytes) for kernel in program.kernels)]


def kernels_and_regions(regions: Sequence[Region], start: int, stop: int) -> list:
    """Kernels ``start`` to ``stop - 1``: the numbers of those outside the regions, and the
    regions."""
    found: list = []
    for region in regions:
        found.extend(range(start, region.start))
        found.append(region)
        start = region.stop
    found.extend(range(start, stop))
    return found
