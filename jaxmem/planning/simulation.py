"""What a plan costs: the step's kernels in the order in which they run, and what is alive.

The forward pass, and the backward pass with every region's recomputation before it, are written
out as one list of events; values that no later event reads are not made. The most bytes alive at
one event is the projected peak. Any tree of regions over any program (long skips, several outputs)
is laid out so, in time linear in the number of events.
"""

import collections
import dataclasses
from collections.abc import Container, Mapping, Sequence, Set

from jaxmem.planning.cotangent_state import CotangentState
from jaxmem.planning.derivative_fusion import fused
from jaxmem.planning.events import Event, RecomputedInstances, liveness
from jaxmem.planning.regions import Region, kernels_and_regions, saved_by
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


def simulate(program: Program, regions: Sequence[Region]) -> Cost:
    """The cost of a program with regions."""
    return _simulate(program, regions)[0]


def live_bytes(program: Program, regions: Sequence[Region]) -> tuple[list[int], int]:
    """Bytes beyond the program's boundary at each event of a program with regions, and the number
    of the first event of the backward pass."""
    _, simulator = _simulate(program, regions)
    backward = [event.backward for event in simulator.executed]
    return simulator.live, (*backward, True).index(True)


def recomputed(program: Program, regions: Sequence[Region]) -> dict[Region, frozenset[int]]:
    """For each region, nested ones too, the kernels that its recomputation runs, those of regions
    inside it as their forward pass."""
    _, simulator = _simulate(program, regions)
    needed = {id(event) for event in simulator.events if not event.copies}
    return {
        region: frozenset(event.kernel for event in events if id(event) in needed)
        for region, events in simulator.passes
    }


def _simulate(program: Program, regions: Sequence[Region]) -> tuple[Cost, "_StepSimulator"]:
    simulator = _StepSimulator(program, False, program.in_loop, saved_by(regions))
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
        return simulator.compute_liveness({*kept}, (), kept), simulator
    simulator.sizes = [gradients.get(at, size) for at, size in enumerate(simulator.sizes)]
    for event in simulator.events if become == "summands" else ():  # which adds it to a sum
        event.uses += [instance for instance in event.makes if instance in gradients]
    return simulator.compute_liveness({*(kept if become == "updates" else results)}, ()), simulator


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
    simulator = _StepSimulator(program, gradients, looped, kept)
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
        whole, parted = simulator.read_whole(), saved_by(regions)  # by barriers
        for value, instance in given.items():
            if value not in parted and instance not in whole:
                simulator.sizes[instance] = 0  # read where the loop before has stacked it
    kept = {i for value, instances in cotangents.items() if value not in results for i in instances}
    cost = simulator.compute_liveness(kept, live)
    used = {instance for event in simulator.events for instance in event.uses}
    return dataclasses.replace(
        cost, read=frozenset(v for v, instance in [*given.items(), *at_hand] if instance in used)
    )


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
        number: (program.residual_bytes(number), peak_of_scan(program, number).peak)
        for number in program.scans
        if program.body_of(number).has_regions and program.kernels[number].residuals is not None
    }
    return program.with_loops(found) if found else program


class _StepSimulator:
    """The events of a step. A value made twice is two instances; without ``gradients`` those of the
    inputs are counted elsewhere. ``looped``: a loop parts the passes, and stacked the ``saved``."""

    def __init__(self, program: Program, gradients: bool, looped: bool, saved: Container[int]):
        self.program, self.kernels = program, program.kernels
        self.gradients, self.become = gradients, program.input_gradients.become
        # In a loop XLA sums up rows apart from what they normalise where they were saved (attention
        # by hand and planned, 16 heads: 2 arrays of scores at the peak where there are 3).
        self.live_rows = saved if looped else ()
        self.events: list[Event] = []
        self.executed: Sequence[Event] = ()  # as XLA runs them
        self.run = self.runs = 0  # the run of a region that events are of, and how many there are
        self.first = 0  # the number of the first event after the forward pass
        self.passes: list[tuple[Region, list[Event]]] = []
        self.sizes: list[int] = []
        self.live: list[int] = []  # bytes at each event, once it is swept
        # Of values, how their cotangents come about.
        self.states: dict[int, CotangentState] = collections.defaultdict(CotangentState)
        # What cotangents are made of with those of a reduction, by its kernel and by their values.
        self.pending: dict[tuple[int, int], list[int]] = {}
        # Copies of operands that gradients read, by the run of a region and the operand.
        self.copied: dict[tuple[int, int], int] = {}
        # Copies of rows by the run of a region that writes them, and their groups.
        self.copies: dict[tuple[int, int], list[int]] = {}
        self.cotangent_edges = program.cotangent_edges
        self.scans = set(program.scans)
        self.summed: dict[int, int] = {}  # gradients by the inputs

    def instance(self, value: int, free: bool = False) -> int:
        return self.of_bytes(0 if free else self.program.sizes[value])

    def of_bytes(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def cotangent(self, value: int) -> int:
        """One of a value; gradients of inputs add up in one place, where no sum is read."""
        own = value < self.program.input_count
        if not own or self.become == "summands":
            return self.instance(value, own and not self.gradients)
        if value not in self.summed:
            free = self.become == "updates" or not self.gradients
            self.summed[value] = self.instance(value, free)
        return self.summed[value]

    def cotangents(self, value: int) -> list[int]:
        """A cotangent of a value, in the pieces that it is made in."""
        number = self.program.made[value] - 1
        pieces = self.kernels[number].gradients.result_pieces if number >= 0 else ()
        return [self.of_bytes(size) for size in pieces] or [self.cotangent(value)]

    def incoming(self, value: int, cotangents: dict[int, list[int]]) -> list[int]:
        """What a value's cotangent is made of; the first that has it needs it last."""
        first = self.program.cotangent_of[value]
        return cotangents.pop(value, []) if first == value else cotangents.get(first, [])

    def zeros(self, value: int) -> int:
        """The gradient of what nothing depends on, which XLA makes at the end."""
        made = self.instance(value, free=True)
        self.events.append(Event(0, [], [made], True))
        return made

    def forward(self, order: list, made: dict[int, int], given: dict[int, int]) -> list:
        """Runs kernels and regions; returns what their backward passes start from.

        ``given`` are instances of saved values that an earlier pass left: not made again.
        """
        tape: list = []
        for piece in order:
            if isinstance(piece, int):
                self.execute(piece, made, given)
                tape.append((piece, [made[value] for value in self.kernels[piece].reads]))
            else:
                for number in range(piece.start, piece.stop):
                    self.execute(number, made, given)
                saved = {value: made[value] for value in piece.saved}
                tape.append((piece, made, given | saved))
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
            event = Event(number, [made[value] for value in kernel.sources], fresh, False)
            event.workspace_bytes, event.run = kernel.workspace, self.run
            event.lasting = [made[value] for value in kernel.aliasing.transposed]
            for value, size in kernel.gradients.operand_copies:
                if (self.run, value) not in self.copied:
                    self.copied[self.run, value] = copy = self.of_bytes(size)
                    self.events.append(
                        Event(number, event.uses, [copy], False, run=self.run, copies=True)
                    )
            self.events.append(event)

    def backward(self, tape: list, cotangents: dict[int, list[int]]) -> None:
        for piece, live, *given in reversed(tape):
            if isinstance(piece, int):
                self.derive(piece, live, cotangents)
            else:
                order = kernels_and_regions(piece.regions, piece.start, piece.stop)
                start, outer = len(self.events), self.run
                self.run = self.runs = self.runs + 1
                inner = self.forward(order, RecomputedInstances(live), *given)
                self.passes.append((piece, self.events[start:]))
                self.backward(inner, cotangents)
                self.run = outer

    def derive(self, number: int, reads: list[int], cotangents: dict[int, list[int]]) -> None:
        kernel = self.kernels[number]
        incoming = [i for value in kernel.results for i in self.incoming(value, cotangents)]
        if not incoming:
            return
        if kernel.widened:  # its cotangent is rounded, and in memory, before it is widened
            rounded = self.instance(kernel.results[0])
            self.events.append(Event(number, incoming, [rounded], True))
            incoming = [rounded]
        is_scan = number in self.scans
        for value in kernel.results:
            first = self.program.cotangent_of[value]
            if not self.states[first].is_written_first(is_scan, kernel.fused):
                continue
            whole = self.instance(value)
            extra = self.states[first].scattered
            self.events.append(Event(number, incoming, [whole], True, extra, not_in_place=True))
            incoming = [whole]
            if first in cotangents:
                cotangents[first], self.states[first] = incoming, CotangentState({False})
        count = self.program.input_count
        fresh, joined, in_rows = [], [], False
        for edge in self.cotangent_edges[number]:
            value, state = edge.value, self.states[edge.value]
            is_turned = value in kernel.aliasing.transposed
            in_one = any(row not in self.live_rows for row in edge.rows)
            if edge.last is not None and edge.rows and not in_one:
                # Rows are summed up apart: the cotangent follows the last of the sums.
                joined.append(edge.last)
                self.pending.setdefault((edge.last, value), []).extend([*incoming, *reads])
            elif edge.passes:
                joined.append(self.program.made[value] - 1)
                pairs = zip(kernel.reads, reads, strict=True)
                read = [one for v, one in pairs if v != value or not edge.linear]
                cotangents.setdefault(value, []).extend([*incoming, *read])
            elif edge.reduces and value >= count and (number, value) not in self.pending:
                # Of a reduction: spread out by the kernel that reads it, from what it reads.
                cotangents.setdefault(value, []).extend([*incoming, *reads])
                state.broadcast = True
                state.shifted |= value in kernel.aliasing.offset_reads
                of_rows = bool(edge.rows and edge.last is not None)
                state.row_reduced |= of_rows or value in kernel.aliasing.row_reduced
                if len(self.cotangent_edges[number]) > 1:
                    state.spread.add(is_turned)
            elif edge.cuts and value >= count and (number, value) not in self.pending:
                cotangents.setdefault(value, []).extend([*incoming, *reads])
                state.padded = True
            else:
                state.written.add(is_turned)
                state.scattered = max(state.scattered, kernel.scattered)
                in_rows |= in_one
                made = self.cotangents(value)
                fresh += made
                incoming += self.pending.pop((number, value), ())
                if value < count and self.become != "summands":  # a gradient adds up in place
                    incoming += cotangents.pop(value, ())
                cotangents.setdefault(value, []).extend(made)
        inside = kernel.derivative_workspace
        if kernel.flops:
            # Its gradients read a copy of the cotangent, in their own order.
            of = self.program.cotangent_of
            turned = (value for value in kernel.results if self.states[of[value]].is_turned)
            inside += sum(self.program.sizes[value] for value in turned)
        if number in self.program.regions:
            inside += _region_workspace(self.program, number)
        uses = [*reads, *incoming]
        for value, size in kernel.gradients.operand_copies:
            if (copy := self.copied.get((self.run, value))) is None:
                inside += size
            else:
                uses.append(copy)
        groups = kernel.gradients.ragged_groups
        if groups is not None and self.run:
            copies = self.copies.setdefault((self.run, groups), [])
            uses += copies
            pairs = zip(kernel.reads, reads, strict=True)
            copies += [instance for value, instance in pairs if value == kernel.residuals]
        lasting: Sequence[int] = ()
        if lasting_values := kernel.aliasing.lasting:
            pairs = zip(kernel.reads, reads, strict=True)
            lasting = [instance for value, instance in pairs if value in lasting_values]
        done = Event(number, uses, fresh, True, inside, in_rows, joined, lasting, self.run)
        self.events.append(done)

    def read_whole(self) -> set[int]:
        """The instances that XLA does not read by the element, in a kernel that it fuses."""
        found: set[int] = set()
        for event in self.events:
            kernel = self.kernels[event.kernel]
            if not kernel.fused:
                # A derivative reads cotangents after that, which are summed up by the element.
                found.update(event.uses[: len(kernel.reads)] if event.backward else event.uses)
        return found

    def compute_liveness(
        self, kept: set[int], live: Sequence[int], results: Mapping[int, int] | None = None
    ) -> Cost:
        """Drops what nothing reads, and adds up what is alive: ``live`` from the beginning,
        ``kept`` to the end. ``results`` have memory of their own, so many bytes each."""
        needed = set(kept)
        events, first = [], 0
        for number, event in reversed(list(enumerate(self.events))):
            if event.backward or not needed.isdisjoint(event.makes):
                needed.update(event.uses)
                events.append(event)
                first += number < self.first
        events.reverse()
        for event in events:
            event.makes = [instance for instance in event.makes if instance in needed]
        self.events = events
        own = (event for event in events if not (event.backward or event.copies))
        runs = collections.Counter(event.kernel for event in own)
        live = [instance for instance in live if instance in needed]
        merges = self.program.rules.fuses_derivatives
        ends = kept, live, results or {}, merges
        self.executed = events
        self.live, peak, at = liveness(self.kernels, events, self.sizes, *ends)
        order = fused(self.program, events, self.sizes, first, at) if merges else None
        if order:
            self.executed, sizes = order
            self.live, peak, at = liveness(self.kernels, self.executed, sizes, *ends)
        return Cost(peak, self.executed[at].kernel if events else 0, runs)
