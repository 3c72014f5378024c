"""What XLA computes in the kernel of a derivative, and not before it.

In a recomputation, what is made element by element need not be there before the derivative of its
own kernel where nothing reads it on the way there: both read the same arrays, XLA computes both in
one kernel, and writes both over what they read. Between two matmuls (``act = gelu(h)``), the
cotangent of ``act`` is made first, then ``act`` and the cotangent of ``h`` from ``h`` and it, and
only then the gradient that reads ``act``: two arrays of that size are alive at once, and not three.
Of a `tanh`, whose derivative reads it alone, XLA does the same: four are alive, and not three,
where nothing is written over ``h``, as a library made it or it was kept.
"""

import heapq
from collections.abc import Mapping, Sequence

from jaxmem.planning.events import Event, is_overwritable
from jaxmem.program import Program

# Times smaller than the largest array of a program: next to nothing. Chosen
# (benchmarks/planner/sensitivity.py).
_SMALL = 64


def fused(
    program: Program, events: Sequence[Event], sizes: list[int], start: int
) -> tuple[Sequence[Event], list[int]] | None:
    """Events, of which those from ``start`` on recompute, as XLA runs them, and the sizes of
    instances: those that are never in memory have none. None: as they are."""
    if all(event.backward for event in events[start:]):
        return None
    large = max(sizes) // _SMALL
    apart = _split_gradients(program, events[start:])

    def may_move(number: int, into: int) -> bool:
        event, derivative = apart[number], apart[into]
        return (
            program.kernels[event.kernel].fused
            and bool(derivative.makes)
            and not derivative.not_in_place
            and sum(sizes[instance] for instance in event.makes) > large
        )

    into = {number: at for number, at in _derivatives(apart).items() if may_move(number, at)}
    overwritable = {
        instance: event.run
        for event in apart
        if is_overwritable(program.kernels[event.kernel], event)
        for instance in event.makes
    }
    found = _Fusion(apart, sizes, large, into, overwritable) if into else None
    moved = found.moved() if found and found.late else None
    return moved and ([*events[:start], *moved[0]], moved[1])


def _derivatives(events: Sequence[Event]) -> dict[int, int]:
    """For each event that recomputes the next one in which cotangents of what it is made of are
    computed."""
    found: dict[int, int] = {}
    following: dict[int, int] = {}  # by kernels
    for number in reversed(range(len(events))):
        event = events[number]
        if event.sums:
            continue  # a derivative of what reads its value
        if event.backward:
            into = [following[one] for one in event.joined if one in following]
            following[event.kernel] = min(into, default=number)
        elif event.kernel in following:
            found[number] = following[event.kernel]
    return found


def _split_gradients(program: Program, events: Sequence[Event]) -> list[Event]:
    """Events with the two gradients of a contraction apart: each reads the other's operand."""
    found: list[Event] = []
    for event in events:
        kernel = program.kernels[event.kernel]
        two = event.backward and kernel.gradients.operands and len(event.makes) == 2
        if two and len(event.uses) > len(kernel.reads) > 1:
            first, second = event.makes
            one, other = kernel.gradients.in_operands(kernel.reads, event.uses)
            # Cotangents, and what is read again where the one of what an operand is made of is.
            rest = [instance for instance in event.uses if instance not in (*one, *other)]
            found.append(event.of([*other, *rest], [first]))
            found.append(event.of([*one, *rest], [second]))
        else:
            found.append(event)
    return found


def _as_soon_as_possible(events: Sequence[Event]) -> list[Event]:
    """Events in their order, but for those whose operands are made later: each of them follows the
    last of these. What needs its own results is left out."""
    unmade = {instance for event in events for instance in event.makes}
    missing: list[int] = []
    waiting: dict[int, list[int]] = {}  # numbers of events by the instances that they miss
    found: list[Event] = []
    for number, event in enumerate(events):
        left = unmade.intersection(event.uses)
        missing.append(len(left))
        for instance in left:
            waiting.setdefault(instance, []).append(number)
        ready = [] if left else [number]
        while ready:
            found.append(events[heapq.heappop(ready)])
            made = unmade.intersection(found[-1].makes)
            unmade -= made
            for reader in (one for instance in made for one in waiting.pop(instance, ())):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, reader)
    return found


def _parts(events: Sequence[Event]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """What each of the events that one kernel computes reads in memory, and what it makes."""
    read: dict[int, set[int]] = {}  # by what is made
    found: list[tuple[Sequence[int], Sequence[int]]] = []
    for event in events:
        uses = set[int]().union(*(read.get(one, {one}) for one in event.uses))
        read |= dict.fromkeys(event.makes, uses)
        found.append((sorted(uses), event.makes))
    return found


class _Fusion:
    """Of a backward pass: ``late`` are the numbers of events that are computed with a derivative,
    and its own; of ``derivatives``, those with which they might be; ``overwritable`` has the runs
    in which what is written over was made."""

    def __init__(
        self,
        events: Sequence[Event],
        sizes: list[int],
        large: int,
        derivatives: Mapping[int, int],
        overwritable: Mapping[int, int],
    ):
        self.events, self.sizes, self.large = events, sizes, large
        self.overwritable = overwritable
        self.readers: dict[int, list[int]] = {}
        for number, event in enumerate(events):
            for instance in event.uses:
                self.readers.setdefault(instance, []).append(number)
        self.late: dict[int, int] = {}
        for number, into in derivatives.items():  # the last one first
            if self._may_move(number, into):
                self.late[number] = into

    def _may_move(self, number: int, into: int) -> bool:
        """Whether it holds nothing for longer to make what an event makes with a derivative, or
        XLA does it all the same; and the derivative needs nothing that is made of that."""
        event, derivative = self.events[number], self.events[into]
        readers = (at for one in event.makes for at in self.readers.get(one, ()))
        if any(self.events[at].run != event.run for at in (into, *readers)):
            return False  # a region begins when all that it reads is there
        read = [instance for instance in event.uses if self.sizes[instance] > self.large]
        if not any(instance in derivative.uses for instance in read) or any(
            self.readers[instance][-1] < into for instance in read
        ):
            # They are no kernel of the same arrays; but XLA holds what it cannot write over.
            is_read = any(instance in derivative.uses for instance in event.makes)
            lasts = read and all(self.overwritable.get(one) != event.run for one in read)
            if not (is_read and lasts):
                return False
        own = set(event.makes)
        pending, seen = list(event.makes), set[int]()
        while pending:
            instance = pending.pop()
            for reader in self.readers.get(instance, ()):
                at = self.late.get(reader, reader)
                if at == into and instance not in own:
                    return False
                if at < into and at not in seen:
                    seen.add(at)
                    pending += self.events[at].makes
                    pending += self.events[reader].makes
        return True

    def moved(self) -> tuple[list[Event], list[int]] | None:
        """All events in their order, but for what waits for what was moved, and the sizes."""
        sizes = self.sizes.copy()
        moved: dict[int, list[Event]] = {}
        for number, into in sorted(self.late.items()):
            moved.setdefault(into, []).append(self.events[number])
        late = {instance for number in self.late for instance in self.events[number].makes}
        left: list[Event] = []
        for number, event in enumerate(self.events):
            if number in self.late or (
                self._is_fused_through(event) and not late.isdisjoint(event.uses)
            ):
                continue  # what passes on is read where it arrives
            if number in moved:
                event = self._fuse_into(number, moved[number], sizes)
            left.append(event)
        found = _as_soon_as_possible(left)
        return (found, sizes) if len(found) == len(left) else None

    def _fuse_into(self, number: int, moved: Sequence[Event], sizes: list[int]) -> Event:
        """A derivative with what its kernel makes too; what nobody else reads is in no memory."""
        event = self.events[number]
        own = {one for each in moved for one in each.makes}
        uses = {one for each in moved for one in each.uses}.union(event.uses) - own
        for each in moved:
            for one in each.makes:
                if all(
                    at == number
                    or self.late.get(at) == number
                    or self._is_fused_through(self.events[at])
                    for at in self.readers.get(one, ())
                ):
                    sizes[one] = 0
        makes = [*event.makes, *sorted(own)]
        found = event.of(sorted(uses), makes)
        found.lasting = [*event.lasting, *(one for each in moved for one in each.lasting)]
        found.parts = _parts([*moved, event])
        return found

    @staticmethod
    def _is_fused_through(event: Event) -> bool:
        """Whether it is a derivative that the one that reads its cotangents computes."""
        return event.backward and not event.makes
