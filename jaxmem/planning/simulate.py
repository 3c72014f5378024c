"""What a plan costs: the step's kernels in the order in which they run, and what is alive.

The forward pass, and the backward pass with every region's recomputation before it, are written
out as one list of events; values that no later event reads are not made. The most bytes alive at
one event is the projected peak. Any tree of regions over any program (long skips, several outputs)
is laid out so, in time linear in the number of events.
"""

import bisect
import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set

from jaxmem.planning.regions import Region
from jaxmem.program import Program

# Times smaller than what it is made of: the result of a reduction. Chosen: half and twice change
# no plan (benchmarks/planner/sensitivity.py).
_REDUCED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Peak bytes beyond the program's inputs, outputs and gradients, the number of the kernel that
    is running there, the kernels that run in forward passes, as often as they do, and those of the
    values given (saved before, or inputs) that something reads."""

    peak: int
    at: int
    runs: collections.Counter[int]
    read: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True)
class _Event:
    kernel: int
    uses: list[int]
    makes: list[int]
    backward: bool
    inside: int = 0  # bytes beside what it uses and makes
    apart: bool = False  # whether it writes over nothing that it uses


def simulate(program: Program, regions: Sequence[Region]) -> Cost:
    """The cost of a program with regions."""
    return _simulate(program, regions)[0]


def live_bytes(program: Program, regions: Sequence[Region]) -> tuple[list[int], int]:
    """Bytes beyond the program's inputs, outputs and gradients at each event of a program with
    regions, and the number of the first event of the backward pass."""
    _, layout = _simulate(program, regions)
    events = layout.events
    first = next((at for at, event in enumerate(events) if event.backward), len(events))
    return layout.alive, first


def recomputed(program: Program, regions: Sequence[Region]) -> dict[Region, frozenset[int]]:
    """For each region, nested ones too, the kernels that its recomputation runs, those of regions
    inside it as their forward pass."""
    _, layout = _simulate(program, regions)
    needed = set(map(id, layout.events))
    return {
        region: frozenset(event.kernel for event in events if id(event) in needed)
        for region, events in layout.passes
    }


def _simulate(program: Program, regions: Sequence[Region]) -> tuple[Cost, "_Layout"]:
    layout = _Layout(program, gradients=False)
    made = {value: layout.instance(value, free=True) for value in range(program.input_count)}
    tape = layout.forward(_pieces(regions, 0, len(program.kernels)), made, {})
    outputs = [value for value in program.outputs if value in made]
    cotangents = {value: [layout.instance(value)] for value in outputs if program.active[value]}
    layout.backward(tape, cotangents)
    results = {made[value]: program.sizes[value] for value in outputs}
    for instance in results:
        layout.sizes[instance] = 0
    for value in range(program.input_count):
        if program.active[value] and value not in cotangents and program.kernels:
            cotangents[value] = [layout.zeros(value)]
        results |= dict.fromkeys(cotangents.get(value, ())[-1:], program.sizes[value])
    return layout.sweep(set(results), (), results), layout


def simulate_block(
    program: Program,
    start: int,
    stop: int,
    saved: Set[int],
    regions: Sequence[Region] = (),
    gradients: bool = True,
) -> Cost:
    """The cost of the backward pass of kernels ``start`` to ``stop - 1`` by themselves, what they
    are made from at hand: the bytes are of their own values, ``saved`` ones among them from the
    beginning, of all cotangents and, with ``gradients``, of those of the program's inputs."""
    layout = _Layout(program, gradients)
    made_by, last_used = program.made, program.last_used
    kernels = program.kernels[start:stop]
    sources = {value for kernel in kernels for value in kernel.sources}
    results = [value for kernel in kernels for value in kernel.results]
    made = {v: layout.instance(v, free=True) for v in sources if made_by[v] <= start}
    at_hand = list(made.items())
    given = {value: layout.instance(value) for value in results if value in saved}
    alive = [*sources.intersection(made), *results]
    cotangents = {
        value: [layout.instance(value)]
        for value in alive
        if last_used[value] > stop and made_by[value] and program.active[value]
    }
    live = [*given.values(), *(i for instances in cotangents.values() for i in instances)]
    layout.backward(layout.forward(_pieces(regions, start, stop), made, given), cotangents)
    kept = {i for value, instances in cotangents.items() if value not in results for i in instances}
    cost = layout.sweep(kept, live)
    used = {instance for event in layout.events for instance in event.uses}
    return dataclasses.replace(
        cost, read=frozenset(v for v, instance in [*given.items(), *at_hand] if instance in used)
    )


class _Layout:
    """The events of a step. A value that is made twice is two instances; without ``gradients``
    those of the program's inputs are counted elsewhere."""

    def __init__(self, program: Program, gradients: bool):
        self.program = program
        self.gradients = gradients
        self.kernels = program.kernels
        self.events: list[_Event] = []
        self.passes: list[tuple[Region, list[_Event]]] = []
        self.sizes: list[int] = []
        self.alive: list[int] = []  # bytes at each event, once it is swept
        self.shifted: set[int] = set()  # values whose cotangents are not written over them
        self.rows: set[int] = set()  # nor those of these, where only reductions of rows make them
        self.own: set[int] = set()  # values of which a kernel has written a cotangent
        self.spread: set[int] = set()  # those whose cotangents are spread out where they are read
        self.scans = set(program.scans)

    def instance(self, value: int, free: bool = False) -> int:
        self.sizes.append(0 if free else self.program.sizes[value])
        return len(self.sizes) - 1

    def zeros(self, value: int) -> int:
        """The gradient of what nothing depends on, which XLA makes at the end."""
        made = self.instance(value, free=True)
        self.events.append(_Event(0, [], [made], True))
        return made

    def forward(self, pieces: list, made: dict[int, int], given: dict[int, int]) -> list:
        """Runs kernels and regions; returns what their backward passes start from.

        ``given`` are instances of saved values that an earlier pass left: not made again.
        """
        tape: list = []
        for piece in pieces:
            if isinstance(piece, int):
                self.execute(piece, made, given)
                tape.append((piece, [made[value] for value in self.kernels[piece].reads]))
            else:
                before = made.copy()
                for number in range(piece.start, piece.stop):
                    self.execute(number, made, given)
                saved = {value: made[value] for value in piece.saved}
                tape.append((piece, before, given | saved))
        return tape

    def execute(self, number: int, made: dict[int, int], given: dict[int, int]) -> None:
        kernel = self.kernels[number]
        fresh = []
        for value in kernel.results:
            if value in given:
                made[value] = given[value]
            else:
                made[value] = self.instance(value)
                fresh.append(made[value])
        if fresh:
            uses = [made[value] for value in kernel.sources]
            self.events.append(_Event(number, uses, fresh, False, kernel.workspace))

    def backward(self, tape: list, cotangents: dict[int, list[int]]) -> None:
        for piece, live, *given in reversed(tape):
            if isinstance(piece, int):
                self.derive(piece, live, cotangents)
            else:
                pieces = _pieces(piece.regions, piece.start, piece.stop)
                start = len(self.events)
                inner = self.forward(pieces, live.copy(), *given)
                self.passes.append((piece, self.events[start:]))
                self.backward(inner, cotangents)

    def derive(self, number: int, reads: list[int], cotangents: dict[int, list[int]]) -> None:
        kernel = self.kernels[number]
        incoming = [i for value in kernel.results for i in cotangents.pop(value, ())]
        if not incoming:
            return
        if kernel.widened:  # its cotangent is rounded, and in memory, before it is widened
            rounded = self.instance(kernel.results[0])
            self.events.append(_Event(number, incoming, [rounded], True))
            incoming = [rounded]
        # A loop reads slices of it: it is written first.
        apart = self.shifted | (self.rows - self.own)
        if number in self.scans:
            apart |= self.spread
        for value in apart.intersection(kernel.results):
            whole = self.instance(value)
            self.events.append(_Event(number, incoming, [whole], True, apart=True))
            incoming = [whole]
        count = self.program.input_count
        fresh, in_rows = [], False
        sizes = self.program.sizes
        written = sum(sizes[value] for value in kernel.results)
        for value in kernel.sources:
            if value not in self.program.moving[number]:
                continue
            if kernel.fused and sizes[value] > _REDUCED * written >= 0 and value >= count:
                # Of a reduction: spread out by the kernel that reads it, from what it reads.
                cotangents.setdefault(value, []).extend([*incoming, *reads])
                self.spread.add(value)
                if value in kernel.shifted:
                    self.shifted.add(value)
                if value in kernel.rows:
                    self.rows.add(value)
            else:
                self.own.add(value)
                in_rows |= value in kernel.normalised
                fresh.append(self.instance(value, free=value < count and not self.gradients))
                if value < count:  # a gradient adds up in place
                    incoming += cotangents.pop(value, ())
                cotangents.setdefault(value, []).append(fresh[-1])
        self.events.append(
            _Event(number, [*reads, *incoming], fresh, True, kernel.inside, apart=in_rows)
        )

    def sweep(
        self, kept: set[int], live: Sequence[int], results: Mapping[int, int] | None = None
    ) -> Cost:
        """Drops what nothing reads, and adds up what is alive: ``live`` from the beginning,
        ``kept`` to the end. ``results`` have memory of their own, so many bytes each."""
        needed = set(kept)
        events = []
        for event in reversed(self.events):
            if event.backward or not needed.isdisjoint(event.makes):
                needed.update(event.uses)
                events.append(event)
        events.reverse()
        self.events = events
        live = [instance for instance in live if instance in needed]
        last: dict[int, int] = {}
        for index, event in enumerate(events):
            event.makes = [instance for instance in event.makes if instance in needed]
            for instance in (*event.makes, *event.uses):
                last[instance] = index
        if results:
            self._lend(results, last)
        ends: list[list[int]] = [[] for _ in events]
        for instance, index in last.items():
            if instance not in kept:
                ends[index].append(instance)
        seen = set(live)
        alive = peak = sum(self.sizes[instance] for instance in live)
        at = 0
        for index, event in enumerate(events):
            before = alive
            for instance in (*event.makes, *event.uses):
                if instance not in seen:
                    seen.add(instance)
                    alive += self.sizes[instance]
            freed = sum(self.sizes[instance] for instance in ends[index])
            kernel = self.kernels[event.kernel]
            # XLA writes the result of an elementwise kernel over an operand that dies there.
            over = kernel.fused and not event.apart
            live_now = max(before, alive - freed) if over else alive
            live_now += event.inside
            self.alive.append(live_now)
            if live_now > peak:
                peak, at = live_now, event.kernel
            alive -= freed
        runs = collections.Counter(event.kernel for event in events if not event.backward)
        return Cost(peak, at, runs)

    def _lend(self, results: Mapping[int, int], last: Mapping[int, int]) -> None:
        """Puts values into the memory of results that are yet to come, as XLA does: the largest
        first, one at a time in each."""
        first: dict[int, int] = {}
        for index, event in enumerate(self.events):
            for instance in event.makes:
                first.setdefault(instance, index)
        room = sorted((size, instance) for instance, size in results.items() if instance in first)
        largest = room[-1][0] if room else 0
        values = [
            (self.sizes[instance], instance)
            for instance in first
            if 0 < self.sizes[instance] <= largest and instance not in results
        ]
        taken: list[list[tuple[int, int]]] = [[] for _ in room]
        for size, instance in sorted(values, reverse=True):
            start, end = first[instance], last[instance]
            for at in range(bisect.bisect_left(room, (size, -1)), len(room)):
                after = bisect.bisect_left(taken[at], (start, end))
                until = taken[at][after][0] if after < len(taken[at]) else first[room[at][1]]
                if end < until and (not after or taken[at][after - 1][1] < start):
                    taken[at].insert(after, (start, end))
                    self.sizes[instance] = 0
                    break


def _pieces(regions: Sequence[Region], start: int, stop: int) -> list:
    """Kernels ``start`` to ``stop - 1``: the numbers of those outside the regions, and the
    regions."""
    found: list = []
    for region in regions:
        found.extend(range(start, region.start))
        found.append(region)
        start = region.stop
    found.extend(range(start, stop))
    return found
