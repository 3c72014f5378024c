"""The planners by name, and a layout written out as a plan."""

from collections.abc import Callable, Sequence, Set
from typing import Protocol

from jaxmem.ground.bytes import format_bytes
from jaxmem.planning.dots import Dots
from jaxmem.planning.dp import DP, Layout
from jaxmem.planning.plan import Choice, Plan, Region, Row
from jaxmem.planning.rates import Rates
from jaxmem.planning.simulate import simulate_block
from jaxmem.planning.sqrt import Sqrt
from jaxmem.program import Program


class Planner(Protocol):
    """The plans that one way of planning has for one program; bytes are beyond its inputs."""

    plain: Layout

    def within(self, budget: int) -> Layout | None:
        """The least recompute that is projected to fit a budget, or None."""

    def least(self) -> Layout:
        """The least projected bytes."""

    def frugal(self) -> Layout:
        """The least projected bytes for at most one more forward pass."""


PLANNERS: dict[str, Callable[[Program, Rates], Planner]] = {"dp": DP, "dots": Dots, "sqrt": Sqrt}


def write_plan(
    planner: str,
    program: Program,
    rates: Rates,
    layout: Layout,
    plain: Layout,
    reserved: int,
    budget: int | None,
    target: str,
    time_error: float | None,
) -> Plan:
    """A layout as a plan: with the bytes of everything, and in words."""
    around = program.boundary_bytes + reserved
    return Plan(
        planner=planner,
        fingerprint=program.fingerprint,
        regions=layout.regions,
        loops=layout.loops,
        plain_bytes=plain.peak + around,
        projected_bytes=layout.peak + around,
        flops=program.flops,
        recompute_flops=layout.flops,
        recompute_moved=layout.moved,
        seconds=sum(map(rates.seconds, program.kernels)),
        recompute_seconds=layout.seconds,
        rows=tuple(_rows(program, layout)),
        choices=tuple(_choices(program, rates, layout)),
        reserved=reserved,
        host_bytes=layout.host,
        budget=budget,
        target=target,
        time_error=time_error,
        widens=program.widens,
        inputs=program.types[: program.input_count],
    )


def lowest(program: Program, layout: Layout) -> str:
    """The operation that sets a layout's peak, in words."""
    if not program.kernels or not layout.peak:
        return "what is reserved"
    operation = program.operation_of(layout.place[0])
    return f"the backward pass of {operation.name} in {operation.path or 'the function'}"


def _rows(program: Program, layout: Layout):
    yield from _region_rows(program, layout.regions, 0)
    for loop in layout.loops:
        operation = program.operation_of(loop.kernel)
        assert operation.body is not None
        whole = Region(0, len(operation.body.kernels), loop.saved, loop.regions)
        for row in _region_rows(operation.body, [whole], 0):
            parts = f" as {loop.segments} scans" * (loop.segments > 1)
            away = sum(operation.body.sizes[v] for v in loop.offloaded) * operation.length
            parts += f" ({format_bytes(away)} to the host)" * bool(away)
            first = f"{operation.length} x scan{parts}: {row.first}" if not row.depth else row.first
            length = operation.length
            yield Row(
                row.depth,
                first,
                row.last,
                row.saved_bytes * length // loop.segments,
                row.kept_bytes * length // loop.segments,
                row.flops * length,
            )


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


def _choices(program: Program, rates: Rates, layout: Layout):
    saved = {value for region in layout.regions for value in _saved(region)}
    wrapped = {k for region in layout.regions for k in range(region.start, region.stop)}
    yield from _values(program, rates, saved, wrapped, layout.runs, "", frozenset())
    for loop in layout.loops:
        operation = program.operation_of(loop.kernel)
        body = operation.body
        assert body is not None
        saved = {*loop.saved, *loop.offloaded}
        cost = simulate_block(body, 0, len(body.kernels), saved, loop.regions)
        # Every run of the body is in the backward pass, beside one in the forward pass.
        runs = {number: times + 1 for number, times in cost.runs.items()}
        everything = set(range(len(body.kernels)))
        times, offloaded = f"{operation.length} x ", frozenset(loop.offloaded)
        yield from _values(body, rates, saved, everything, runs, times, offloaded)


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


def _saved(region: Region):
    yield from region.saved
    for inner in region.regions:
        yield from _saved(inner)
