"""The events of a step with its regions, in the order in which they run.

A region's backward pass is its recomputation and the derivatives of its kernels, those of regions
inside it the same way. Before it the cotangents of its results are there, each in one piece.
"""

import collections
from collections.abc import Callable, Collection, Container, Sequence

from jaxmem.planning.cotangent_state import CotangentState
from jaxmem.planning.events import Event, RecomputedInstances
from jaxmem.planning.regions import Region, kernels_and_regions
from jaxmem.program import Kernel, Program


class StepEvents:
    """The events of a step. A value made twice is two instances; without ``gradients`` those of the
    inputs are counted elsewhere. ``looped``: a loop parts the passes, and stacked the ``saved``.
    ``region_workspace`` gives the bytes that the derivative of a user's own region takes inside."""

    def __init__(
        self,
        program: Program,
        gradients: bool,
        looped: bool,
        saved: Container[int],
        region_workspace: Callable[[Program, int], int],
    ):
        self.region_workspace = region_workspace
        self.program, self.kernels = program, program.kernels
        self.gradients, self.become = gradients, program.input_gradients.become
        # In a loop XLA sums up rows apart from what they normalise where they were saved (attention
        # by hand and planned, 16 heads: 2 arrays of scores at the peak where there are 3).
        self.live_rows = saved if looped else ()
        self.events: list[Event] = []
        self.run = self.runs = 0  # the run of a region that events are of, and how many there are
        self.first = 0  # the number of the first event after the forward pass
        self.passes: list[tuple[Region, list[Event]]] = []
        self.sizes: list[int] = []
        self.states: dict[int, CotangentState] = collections.defaultdict(CotangentState)
        # What cotangents are made of with those of a reduction, by its kernel and by their values.
        self.pending: dict[tuple[int, int], list[int]] = {}
        # Copies by the run of a region: of operands that gradients read, and of rows by groups.
        self.copied: dict[tuple[int, int], int] = {}
        self.copies: dict[tuple[int, int], list[int]] = {}
        self.cotangent_edges = program.cotangent_edges
        self.scans, self.sums_rows = set(program.scans), set[int]()  # derivatives that sum up rows
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
                tape.append((piece, _read_back(self.kernels[piece], made, self.program.sizes)))
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
            aliasing = kernel.aliasing
            event.lasting = [made[v] for v in aliasing.transposed | aliasing.read_by_rows]
            for value, size in kernel.gradients.copies(bool(self.run)):
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
                self.sum_cotangents(piece, cotangents)
                start, outer = len(self.events), self.run
                self.run = self.runs = self.runs + 1
                inner = self.forward(order, RecomputedInstances(live), *given)
                self.passes.append((piece, self.events[start:]))
                self.backward(inner, cotangents)
                self.run = outer

    def sum_cotangents(self, region: Region, cotangents: dict[int, list[int]]) -> None:
        """A region's barrier holds the cotangents of its results, each in one piece."""
        for number in range(region.start, region.stop):
            for value in self.kernels[number].results:
                if len(parts := cotangents.get(value, ())) > 1:
                    size = self.program.sizes[value]
                    cotangents[value] = self.written_first(number, parts, size, sums=True)
                    self.states[value] = CotangentState({False})

    def written_first(
        self,
        number: int,
        uses: Sequence[int],
        size: int,
        extra: int = 0,
        sums: bool = False,
        not_in_place: bool = False,
    ) -> list[int]:
        """A cotangent that is in memory before the derivative of a kernel reads it."""
        whole = self.of_bytes(size)
        event = Event(number, [*uses], [whole], True, extra, not_in_place)
        event.run, event.sums = self.run, sums
        self.events.append(event)
        return [whole]

    def derive(self, number: int, reads: list[int], cotangents: dict[int, list[int]]) -> None:
        kernel, edges = self.kernels[number], self.cotangent_edges[number].edges
        incoming = [i for value in kernel.results for i in self.incoming(value, cotangents)]
        if not incoming:
            return
        incoming = self.in_memory_first(number, incoming, reads, cotangents)
        count = self.program.input_count
        fresh, joined, later, in_rows = [], [], list[Event](), number in self.sums_rows
        for edge in edges:
            value, state = edge.value, self.states[edge.value]
            is_turned = value in kernel.aliasing.transposed
            in_one = bool(edge.rows) and any(row not in self.live_rows for row in edge.rows)
            if edge.adds:
                cotangents.setdefault(value, []).extend(incoming)
                state.written.add(is_turned)
            elif edge.last is not None and edge.rows and not in_one:
                # Rows are summed up apart: the cotangent follows the last of the sums.
                joined.append(edge.last)
                self.pending.setdefault((edge.last, value), []).extend([*incoming, *reads])
            elif edge.passes:
                joined.append(self.program.made[value] - 1)
                self.sums_rows |= {*joined[-1:]} if in_one else set()
                pairs = zip(kernel.reads, reads, strict=True)
                read = [one for v, one in pairs if v != value or not edge.linear]
                cotangents.setdefault(value, []).extend([*incoming, *read])
            elif edge.reduces and value >= count and (number, value) not in self.pending:
                # Of a reduction: spread out by the kernel that reads it, from what it reads.
                cotangents.setdefault(value, []).extend([*incoming, *reads])
                state.spread_by(kernel, edge, is_turned, alone=len(edges) == 1)
            elif edge.cuts and value >= count and (number, value) not in self.pending:
                cotangents.setdefault(value, []).extend([*incoming, *reads])
                state.padded = True
            else:
                state.written.add(is_turned)
                state.scattered = max(state.scattered, kernel.scattered)
                in_rows |= in_one
                incoming += self.pending.pop((number, value), ())
                if number in self.scans and value in self.summed:
                    fresh.append(self.instance(value))  # filled first, then added
                    later.append(Event(number, [fresh[-1], self.summed[value]], [], True))
                    continue
                made = self.cotangents(value)
                fresh += made
                if value < count and self.become != "summands":  # a gradient adds up in place
                    incoming += cotangents.pop(value, ())
                cotangents.setdefault(value, []).extend(made)
        inside, copies = self.taken_inside(number, reads)
        lasting = _instances(kernel, reads, kernel.aliasing.lasting)
        uses = [*reads, *incoming, *copies]
        done = Event(number, uses, fresh, True, inside, in_rows, joined, lasting, self.run)
        self.events += [done, *later]

    def in_memory_first(
        self,
        number: int,
        incoming: list[int],
        reads: Sequence[int],
        cotangents: dict[int, list[int]],
    ) -> list[int]:
        """What comes in to a kernel's derivative, where the cotangent of its result is in memory
        before that: rounded, because of what made it, before sums over it, or for several."""
        kernel, edges = self.kernels[number], self.cotangent_edges[number]
        sizes, is_scan = self.program.sizes, number in self.scans
        if kernel.widened:  # its cotangent is rounded, and in memory, before it is widened
            incoming = self.written_first(number, incoming, sizes[kernel.results[0]])
        for value in kernel.results:
            first = self.program.cotangent_of[value]
            if not self.states[first].is_written_first(kernel, is_scan):
                continue
            extra = self.states[first].scattered
            incoming = self.written_first(number, incoming, sizes[value], extra, not_in_place=True)
            if first in cotangents:
                cotangents[first], self.states[first] = incoming, CotangentState({False})
        if edges.by_columns:
            # Columns are normalised: sums over the cotangent come before the source's.
            size = sum(sizes[value] for value in kernel.results)
            incoming = self.written_first(number, [*incoming, *reads], size)
        if edges.adds and len(incoming) > 1:
            incoming = self.written_first(number, incoming, sizes[kernel.results[0]])
        return incoming

    def taken_inside(self, number: int, reads: Sequence[int]) -> tuple[int, list[int]]:
        """The bytes that a kernel's derivative takes inside, and the copies that it reads of what
        the kernel itself read."""
        kernel, program = self.kernels[number], self.program
        inside, copies = kernel.derivative_workspace, list[int]()
        if kernel.flops:
            # Its gradients read a copy of the cotangent, in their own order.
            of = program.cotangent_of
            turned = (value for value in kernel.results if self.states[of[value]].is_turned)
            inside += sum(program.sizes[value] for value in turned)
        if number in program.regions:
            inside += self.region_workspace(program, number)
        for value, size in kernel.gradients.copies(bool(self.run)):
            if (copy := self.copied.get((self.run, value))) is None:
                inside += size
            else:
                copies.append(copy)
        groups = kernel.gradients.ragged_groups
        if groups is not None and self.run:
            of_rows = self.copies.setdefault((self.run, groups), [])
            copies += of_rows
            of_rows += _instances(kernel, reads, {kernel.residuals})
        return inside, copies


def _instances(kernel: Kernel, reads: Sequence[int], values: Collection[int | None]) -> list[int]:
    """Those of some values, of what a kernel's derivative reads."""
    if not values:
        return []
    return [one for value, one in zip(kernel.reads, reads, strict=True) if value in values]


def _read_back(kernel: Kernel, made: dict[int, int], sizes: Sequence[int]) -> list[int]:
    """What the derivative of a kernel reads, of what is made; the operand, where a piece of it is
    not there: it was put together before the region."""
    try:
        return [made[value] for value in kernel.reads]
    except KeyError:
        operand = max(set(kernel.sources).difference(kernel.reads), key=sizes.__getitem__)
        return [made[value if value in made else operand] for value in kernel.reads]
