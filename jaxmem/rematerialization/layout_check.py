"""Whether a layout is one of a program: that of a plan that was read from JSON may not be."""

from collections.abc import Iterable, Iterator, Sequence

from jaxmem.loops import Schedule
from jaxmem.planning import Loop, Region, Segment
from jaxmem.program import Program


def misfits(
    program: Program,
    regions: Sequence[Region],
    loops: Sequence[Loop],
    segments: Sequence[Segment] = (),
) -> Iterator[str]:
    """What of a layout the program does not have, in words."""
    kernels = program.kernels
    yield from _misfits_of_regions(program, regions, 0, len(kernels))
    for loop in loops:
        if loop.kernel not in program.loops:
            yield f"a loop at kernel {loop.kernel}"
            continue
        body, length = program.body_of(loop.kernel), program.operation_of(loop.kernel).length
        yield from _unknown(body, {*loop.saved, *loop.offloaded})
        if loop.schedule and not _suits(loop.schedule, length):
            yield f"{length} iterations by {loop.schedule}"
        if loop.head:
            if not 0 < loop.head.count < length:
                yield f"{loop.head.count} first ones of {length} iterations"
            yield from misfits(body, loop.head.loop.regions, loop.head.loop.loops)
        yield from misfits(body, loop.regions, loop.loops)
    done, steps = 0, len(program.operations)
    for one in segments:
        if not done <= one.start < one.stop <= steps:
            yield f"operations {one.start} to {one.stop}"
        done = one.stop


def _misfits_of_regions(
    program: Program, regions: Sequence[Region], start: int, stop: int
) -> Iterator[str]:
    """Of regions among the kernels ``start`` to ``stop - 1``, one after the other."""
    for region in regions:
        if not start <= region.start < region.stop <= stop:
            yield f"kernels {region.start} to {region.stop}"
            return
        yield from _unknown(program, region.saved)
        yield from _misfits_of_regions(program, region.regions, region.start, region.stop)
        start = region.stop


def _unknown(program: Program, values: Iterable[int]) -> Iterator[str]:
    return (f"value {one}" for one in values if not 0 <= one < len(program.sizes))


def _suits(schedule: Schedule, length: int) -> bool:
    """Whether a schedule is of so many iterations."""
    parts = (schedule.blocks, schedule.block, schedule.states, schedule.tail)
    return schedule.length == length and all(1 <= part <= length for part in parts)
