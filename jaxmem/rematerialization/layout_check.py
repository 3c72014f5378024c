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
        if loop.kernel in program.loops:
            yield from _misfits_of_loop(program, loop)
        else:
            yield f"a loop at kernel {loop.kernel}"
    done, steps = 0, len(program.operations)
    for one in segments:
        if not done <= one.start < one.stop <= steps:
            yield f"operations {one.start} to {one.stop}"
        done = one.stop


def _misfits_of_loop(program: Program, loop: Loop) -> Iterator[str]:
    body, length = program.body_of(loop.kernel), program.operation_of(loop.kernel).length
    yield from _unknown(body, (*loop.saved, *loop.offloaded), len(body.kernels))
    yield from misfits(body, loop.regions, loop.loops)
    if loop.schedule and not _suits(loop.schedule, length):
        yield f"{length} iterations by {loop.schedule}"
    if loop.head:
        if not 0 < loop.head.count < length:
            yield f"{loop.head.count} first ones of {length} iterations"
        if loop.head.loop.kernel == loop.kernel:
            yield from _misfits_of_loop(program, loop.head.loop)
        else:
            yield f"the first iterations of a loop at kernel {loop.head.loop.kernel}"


def _misfits_of_regions(
    program: Program, regions: Sequence[Region], start: int, stop: int
) -> Iterator[str]:
    """Of regions among the kernels ``start`` to ``stop - 1``, one after the other."""
    for region in regions:
        if not start <= region.start < region.stop <= stop:
            yield f"kernels {region.start} to {region.stop}"
            return
        yield from _unknown(program, region.saved, region.stop)
        yield from _misfits_of_regions(program, region.regions, region.start, region.stop)
        start = region.stop


def _unknown(program: Program, values: Iterable[int], stop: int) -> Iterator[str]:
    """Those that are no inputs, nor made by a kernel before one."""
    for value in values:
        is_value = 0 <= value < len(program.sizes)
        is_input = value < program.input_count
        if not is_value or not (is_input or 0 < program.made[value] <= stop):
            yield f"value {value}"


def _suits(schedule: Schedule, length: int) -> bool:
    """Whether a schedule is of so many iterations."""
    parts = (schedule.blocks, schedule.block, schedule.states, schedule.tail)
    return schedule.length == length and all(1 <= part <= length for part in parts)
