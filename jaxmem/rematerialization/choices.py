"""What a plan does with each region and with each value, for people."""

import dataclasses
from collections.abc import Iterator, Sequence, Set

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.words import pluralize
from jaxmem.planning import Layout, Loop, Rates, Region, saved_by, simulate_block
from jaxmem.planning.simulation import simulate
from jaxmem.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What a plan does with one value of the forward pass: ``"save"``, ``"recompute"`` or
    ``"offload"``, or ``"keep"`` (it is outside all regions).

    ``path`` and ``line`` are the module and the source line that made it, ``seconds`` the
    predicted time of making it once, ``times`` how often the backward pass does.
    """

    path: str
    line: str
    operation: str
    bytes: int
    seconds: float
    action: str
    times: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One region in the printed plan: its depth in the tree, where its kernels come from, and
    what it saves and runs again (FLOPs of matmuls and convolutions)."""

    depth: int
    first: str
    last: str
    saved_bytes: int
    kept_bytes: int
    flops: int


def rows_of(program: Program, layout: Layout):
    yield from _region_rows(program, layout.regions, 0)
    yield from _loop_rows(program, layout.loops, 0)


def _loop_rows(program: Program, loops: Sequence[Loop], depth: int):
    for loop, times, which in _pieces(program, loops):
        operation = program.operation_of(loop.kernel)
        assert operation.body is not None
        if loop.kernel in program.maps:
            for row in _region_rows(operation.body, loop.regions, depth):
                yield dataclasses.replace(row, first=f"shard_map: {row.first}")
            yield from _loop_rows(operation.body, loop.loops, depth)
            continue
        sizes, length, kept = operation.body.sizes, operation.length, times
        offloaded = sum(sizes[value] for value in loop.offloaded) * times
        parts = which + f" ({format_bytes(offloaded)} to the host)" * bool(offloaded)
        if schedule := loop.schedule:
            kept = max(schedule.tail, schedule.block)
            where = " in host memory" * schedule.host
            parts = (
                f" ({pluralize(schedule.states, 'state')} kept{where}, "
                f"{schedule.evaluations / length:.2f} forward passes more)"
            )
        whole = Region(0, len(operation.body.kernels), loop.saved, loop.regions)
        for row in _region_rows(operation.body, [whole], depth):
            outermost = row.depth == depth
            first = f"{length} x scan{parts}: {row.first}" if outermost else row.first
            yield Row(
                row.depth,
                first,
                row.last,
                row.saved_bytes * kept,
                row.kept_bytes * kept,
                row.flops * times * (not loop.whole),
            )
        yield from _loop_rows(operation.body, loop.loops, depth + 1)


def _pieces(program: Program, loops: Sequence[Loop]) -> Iterator[tuple[Loop, int, str]]:
    """Loops, how many of a scan's iterations each is of, and which, where not of all."""
    for loop in loops:
        length = program.operation_of(loop.kernel).length
        if head := loop.head:
            yield head.loop, head.count, f" (the first {head.count})"
            yield loop, length - head.count, f" (the last {length - head.count})"
        else:
            yield loop, length, ""


def _region_rows(program: Program, regions: Sequence[Region], depth: int):
    for region in regions:
        kernels = program.kernels[region.start : region.stop]
        saved = set(region.saved)
        results = [value for kernel in kernels for value in kernel.results]
        kept = [v for v in results if v not in saved and program.last_used[v] > region.stop]
        again = [kernel for kernel in kernels if saved.isdisjoint(kernel.results)]
        yield Row(
            depth,
            _where(program, region.start),
            _where(program, region.stop - 1),
            sum(program.sizes[value] for value in saved),
            sum(program.sizes[value] for value in kept),
            sum(kernel.flops for kernel in again),
        )
        yield from _region_rows(program, region.regions, depth + 1)


def _where(program: Program, kernel: int) -> str:
    operation = program.operation_of(kernel)
    return f"{operation.path or operation.name} ({operation.line})"


def choices_of(program: Program, rates: Rates, layout: Layout):
    yield from _region_choices(program, rates, layout.regions, layout.runs, "")
    yield from _loop_choices(program, rates, layout.loops, "")


def _region_choices(program: Program, rates: Rates, regions: Sequence[Region], runs, times: str):
    saved = saved_by(regions)
    wrapped = {k for region in regions for k in range(region.start, region.stop)}
    yield from _values(program, rates, saved, wrapped, runs, times, frozenset())


def _loop_choices(program: Program, rates: Rates, loops: Sequence[Loop], prefix: str):
    for loop, count, _ in _pieces(program, loops):
        body = program.body_of(loop.kernel)
        if loop.kernel in program.maps:
            mapped = simulate(body, loop.regions).runs
            yield from _region_choices(body, rates, loop.regions, mapped, prefix)
            yield from _loop_choices(body, rates, loop.loops, prefix)
            continue
        saved = {*loop.saved, *loop.offloaded}
        if loop.whole:
            saved = {value for kernel in body.kernels for value in kernel.results}
        cost = simulate_block(body, 0, len(body.kernels), saved, loop.regions)
        # Every run of the body is in the backward pass, beside one in the forward pass.
        runs = {number: times + 1 for number, times in cost.runs.items()}
        everything = set(range(len(body.kernels)))
        times, offloaded = f"{prefix}{count} x ", frozenset(loop.offloaded)
        yield from _values(body, rates, saved, everything, runs, times, offloaded)
        yield from _loop_choices(body, rates, loop.loops, times)


def _values(program, rates: Rates, saved, wrapped, runs, times: str, offloaded: Set[int]):
    for number, kernel in enumerate(program.kernels):
        operation = program.operations[kernel.operations[-1]]
        for value in kernel.results:
            if value == kernel.residuals:
                continue
            action = "save" if value in saved else "recompute" if number in wrapped else "keep"
            action = "offload" if value in offloaded else action
            yield Choice(
                operation.path,
                operation.line,
                times + operation.name,
                program.sizes[value],
                rates.seconds(kernel),
                action,
                0 if value in saved else max(runs.get(number, 1) - 1, 0),
            )
