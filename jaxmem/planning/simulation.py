"""What a plan costs: the step's kernels in the order in which they run, and what is alive.

The forward pass, and the backward pass with every region's recomputation before it, are written
out as one list of events; values that no later event reads are not made. The most bytes alive at
one event is the projected peak. Any tree of regions over any program (long skips, several outputs)
is laid out so, in time linear in the number of events.
"""

import array
import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from jaxmem.planning.derivative_fusion import fused
from jaxmem.planning.events import Event, liveness
from jaxmem.planning.regions import Region, kernels_and_regions, saved_by
from jaxmem.planning.shared_zeros import with_zeros
from jaxmem.planning.step_events import StepEvents
from jaxmem.program import Program, gradient_size


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Peak bytes beyond the program's boundary (`Program.boundary_bytes`), the number of the kernel
    that is running there, the kernels that run in forward passes, as often as they do, and those
    of the values given (saved before, or inputs) that something reads."""

    peak: int
    at: int
    runs: collections.Counter[int]
    read: frozenset[int] = frozenset()


class LiveBytes(NamedTuple):
    """Bytes beyond the program's boundary at each event of a step, and the number of the first
    event of the backward pass."""

    at_events: Sequence[int]
    backward: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """The events of a step as XLA runs them, and the bytes at each."""

    events: Sequence[Event]
    live: list[int]
    cost: Cost


def simulate(program: Program, regions: Sequence[Region]) -> Cost:
    """The cost of a program with regions."""
    return _simulate(program, regions)[0].cost


def simulate_in_time(program: Program, regions: Sequence[Region]) -> tuple[Cost, LiveBytes]:
    """The cost of a program with regions, and what is alive when."""
    run, _ = _simulate(program, regions)
    events = enumerate(run.events)
    first = next((number for number, event in events if event.backward), len(run.events))
    return run.cost, LiveBytes(array.array("q", run.live), first)


def recomputed(program: Program, regions: Sequence[Region]) -> dict[Region, frozenset[int]]:
    """For each region, nested ones too, the kernels that its recomputation runs, those of regions
    inside it as their forward pass."""
    _, simulator = _simulate(program, regions)
    needed = {id(event) for event in simulator.events if not event.copies}
    return {
        region: frozenset(event.kernel for event in events if id(event) in needed)
        for region, events in simulator.passes
    }


def _simulate(program: Program, regions: Sequence[Region]) -> tuple[_Run, StepEvents]:
    simulator = StepEvents(program, False, program.in_loop, saved_by(regions), _region_workspace)
    made = {value: simulator.instance(value, free=True) for value in range(program.input_count)}
    tape = simulator.forward(kernels_and_regions(regions, 0, len(program.kernels)), made, {})
    outputs = [value for value in program.outputs if value in made]
    cotangents = {value: [simulator.instance(value)] for value in outputs if program.active[value]}
    simulator.first = len(simulator.events)
    simulator.backward(tape, cotangents)
    results = {made[value]: program.sizes[value] for value in outputs}
    for instance in results:
        simulator.sizes[instance] = 0
    gradients: dict[int, int] = {}
    for value in range(program.input_count):
        if program.active[value] and value not in cotangents and program.kernels:
            cotangents[value] = [simulator.zeros(value)]
        gradients |= dict.fromkeys(cotangents.get(value, ()), gradient_size(program, value))
    become, kept = simulator.become, results | gradients
    if become == "results":
        return _run(simulator, {*kept}, (), kept, True), simulator
    simulator.sizes = [gradients.get(at, size) for at, size in enumerate(simulator.sizes)]
    for event in simulator.events if become == "summands" else ():  # which adds it to a sum
        event.uses += [instance for instance in event.makes if instance in gradients]
    kept = kept if become == "updates" else results
    return _run(simulator, {*kept}, (), shares_zeros=True), simulator


def simulate_block(
    program: Program,
    start: int,
    stop: int,
    saved: Set[int] | None,
    regions: Sequence[Region] = (),
    gradients: bool = True,
    looped: bool | None = None,
) -> Cost:
    """The cost of the backward pass of kernels ``start`` to ``stop - 1`` by themselves, what they
    are made from at hand: the bytes are of their own values, ``saved`` ones among them from the
    beginning, of all cotangents and, with ``gradients``, of those of the program's inputs. With
    ``saved`` None all that the backward pass reads is saved, and made here. ``looped``: whether a
    loop parts that from the forward pass; None: as the program's."""
    looped = program.in_loop if looped is None else looped
    kept = range(len(program.sizes)) if saved is None else saved | saved_by(regions)
    simulator = StepEvents(program, gradients, looped, kept, _region_workspace)
    recomputes = saved is not None
    saved = saved or frozenset()
    made_by, last_used = program.made, program.last_used
    kernels = program.kernels[start:stop]
    sources = {value for kernel in kernels for value in kernel.sources}
    results = [value for kernel in kernels for value in kernel.results]
    made = {v: simulator.instance(v, free=True) for v in sources if made_by[v] <= start}
    at_hand = list(made.items())
    given = {value: simulator.instance(value) for value in results if value in saved}
    alive = [*sources.intersection(made), *results]
    cotangents = {
        program.cotangent_of[value]: [simulator.instance(value)]
        for value in alive
        if last_used[value] > stop and made_by[value] and program.active[value]
    }
    live = [*given.values(), *(i for instances in cotangents.values() for i in instances)]
    simulator.run = simulator.runs = int(recomputes)
    tape = simulator.forward(kernels_and_regions(regions, start, stop), made, given)
    simulator.first = 0 if recomputes else len(simulator.events)
    simulator.backward(tape, cotangents)
    if looped and program.rules.fuses_derivatives:
        whole, parted = _read_whole(simulator), saved_by(regions)  # by barriers
        for value, instance in given.items():
            if value not in parted and instance not in whole:
                simulator.sizes[instance] = 0  # read where the loop before has stacked it
    kept = {i for value, instances in cotangents.items() if value not in results for i in instances}
    cost = _run(simulator, kept, live).cost
    used = {instance for event in simulator.events for instance in event.uses}
    return dataclasses.replace(
        cost, read=frozenset(v for v, instance in [*given.items(), *at_hand] if instance in used)
    )


def _read_whole(simulator: StepEvents) -> set[int]:
    """The instances that XLA does not read by the element, in a kernel that it fuses."""
    found: set[int] = set()
    for event in simulator.events:
        kernel = simulator.kernels[event.kernel]
        if not kernel.fused:
            # A derivative reads cotangents after that, which are summed up by the element.
            found.update(event.uses[: len(kernel.reads)] if event.backward else event.uses)
    return found


def _region_workspace(program: Program, number: int) -> int:
    """Bytes that the derivative of a user's own region takes beside what it reads, keeps and
    returns: of what it makes again, and of cotangents."""
    own = program.body_of(number)
    if "region" not in own.cache:
        body = _with_scans(own)
        cost = simulate_block(body, 0, len(body.kernels), body.policy_saves, gradients=False)
        cotangents = {value for value in body.outputs if body.active[value]}
        own.cache["region"] = cost.peak - sum(body.sizes[value] for value in cotangents)
    return max(own.cache["region"] - program.residual_bytes(number), 0)


def peak_of_scan(program: Program, kernel: int) -> Cost:
    """The cost of one iteration of a scan's derivative, which all that it reads is stacked for."""
    body = _with_scans(program.body_of(kernel))
    return simulate_block(body, 0, len(body.kernels), None)


def _with_scans(program: Program) -> Program:
    """A program whose scans hold what regions of the user's own in them take."""
    found = {
        number: (program.residual_bytes(number), peak_of_scan(program, number).peak, False)
        for number in program.scans
        if _has_regions(program.body_of(number)) and program.kernels[number].residuals is not None
    }
    return program.with_loops(found) if found else program


def _has_regions(program: Program) -> bool:
    """Whether there are regions of the user's own, however deep."""
    return any(one.is_region or (one.body and _has_regions(one.body)) for one in program.operations)


def _run(
    steps: StepEvents,
    kept: set[int],
    live: Sequence[int],
    results: Mapping[int, int] | None = None,
    shares_zeros: bool = False,
) -> _Run:
    """Drops what nothing reads, and adds up what is alive: ``live`` from the beginning,
    ``kept`` to the end. ``results`` have memory of their own, so many bytes each;
    ``shares_zeros``: loops share the zeros that they fill with others of the program."""
    needed = set(kept)
    events, first = [], 0
    for number, event in reversed(list(enumerate(steps.events))):
        if event.backward or not needed.isdisjoint(event.makes):
            needed.update(event.uses)
            events.append(event)
            first += number < steps.first
    events.reverse()
    for event in events:
        event.makes = [instance for instance in event.makes if instance in needed]
    steps.events = events
    own = (event for event in events if not (event.backward or event.copies))
    runs = collections.Counter(event.kernel for event in own)
    live = [instance for instance in live if instance in needed]
    merges = steps.program.rules.fuses_derivatives
    ends = kept, live, results or {}, merges
    order = fused(steps.program, events, steps.sizes, first) if merges else None
    executed, sizes = order or (events, steps.sizes)
    alive, peak, at = liveness(steps.kernels, executed, sizes, *ends)
    if shares_zeros and (more := with_zeros(steps.program, executed, alive)) is not alive:
        alive, at = more, max(range(len(more)), key=more.__getitem__)
        peak = max(peak, alive[at])
    return _Run(executed, alive, Cost(peak, executed[at].kernel if events else 0, runs))
