"""Kernels that run one after the other, and what is alive meanwhile."""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from jaxmem.program import Kernel

# Times smaller than the largest result: whether it is lent memory matters no more. Chosen: lending
# to all took half of the time of planning a ResNet152, for the same plans.
_MIN_REUSE = 256


@dataclasses.dataclass(slots=True)
class Event:
    """A kernel that runs, in the forward pass or its derivative: the instances of values that it
    reads and makes."""

    kernel: int
    uses: list[int]
    makes: list[int]
    backward: bool
    workspace_bytes: int = 0  # bytes beside what it uses and makes
    not_in_place: bool = False  # whether it writes over nothing that it uses
    joined: Sequence[int] = ()  # kernels whose derivatives make the rest of its cotangents
    lasting: Sequence[int] = ()  # what it uses and writes over in no case
    run: int = 0  # of a region, which it is in: barriers part one from another. 0: of none
    sums: bool = False  # whether it adds up what a cotangent is made of, for a region to read
    copies: bool = False  # whether it is no run of its kernel, but copies what that reads
    # Where one kernel computes several events: what each of them reads, and what it makes.
    parts: Sequence[tuple[Sequence[int], Sequence[int]]] = ()

    def of(self, uses: list[int], makes: list[int]) -> "Event":
        """The same with other operands and results."""
        return Event(
            self.kernel, uses, makes, self.backward, self.workspace_bytes, self.not_in_place,
            self.joined, self.lasting, self.run, self.sums, self.copies,
        )  # fmt: skip


class RecomputedInstances(dict[int, int]):
    """Instances of values that are made again, on top of those of the pass before: a kernel reads
    what comes before it, which no later one makes."""

    def __init__(self, before: Mapping[int, int]):
        super().__init__()
        self.before = before

    def __missing__(self, value: int) -> int:
        found = self[value] = self.before[value]
        return found


def liveness(
    kernels: Sequence[Kernel],
    events: Sequence[Event],
    sizes: list[int],
    kept: set[int],
    live: Sequence[int],
    results: Mapping[int, int],
    sequential_gradients: bool,
) -> tuple[list[int], int, int]:
    """The bytes that are alive at each of some events in their order, the most of them, and the
    number of the event where that is: ``live`` from the beginning, ``kept`` to the end. ``results``
    have memory of their own, so many bytes each. ``sequential_gradients``: the two gradients
    of a matmul are made so that less is alive, but for those of padded operands outside of a
    recomputation."""
    last = [-1] * len(sizes)  # the events that use them last
    for index, event in enumerate(events):
        for instance in event.makes:
            last[instance] = index
        for instance in event.uses:
            last[instance] = index
    if results:
        sizes = _reuse_output_buffers(events, sizes, results, last)
    for instance in kept:
        last[instance] = -1  # it never ends
    seen, total = bytearray(len(sizes)), []
    for instance in live:
        seen[instance] = True
    runs = [-1] * len(sizes)  # in which what may be written over was made
    now = peak = sum(sizes[instance] for instance in live)
    at = 0
    for index, event in enumerate(events):
        before = now
        kernel = kernels[event.kernel]
        parted = kernel.aliasing.beside_rows and any(runs[one] < event.run for one in event.uses)
        if is_overwritable(kernel, event) and not parted:
            for instance in event.makes:
                runs[instance] = event.run
        ends, freed = [], 0
        for instance in (*event.makes, *event.uses):
            if not seen[instance]:
                seen[instance] = True
                now += sizes[instance]
            if last[instance] == index:
                last[instance] = -1  # it may be there twice
                ends.append(instance)
                freed += sizes[instance]
        if kernel.fused or event.sums:
            dies = [one for one in ends if runs[one] >= event.run]
            live_now = max(before, now - _in_place_bytes(event, sizes, dies))
        elif (
            sequential_gradients
            and event.backward
            and kernel.gradients.operands
            and not kernel.aliasing.in_tuple
            and len(event.makes) == 2
            and (event.run or not kernel.gradients.padded)
        ):
            parts = kernel.gradients.split_k_bytes or (0, 0)
            dying = [
                sum(sizes[one] for one in read if one in ends)
                for read in kernel.gradients.in_operands(kernel.reads, event.uses)
            ]
            made = [sizes[one] for one in event.makes]
            live_now = before + _sequential_gradient_peak(dying, made, parts) - max(parts)
        else:
            live_now = now
        live_now += event.workspace_bytes
        total.append(live_now)
        if live_now > peak:
            peak, at = live_now, index
        now -= freed
    return total, peak, at


def _sequential_gradient_peak(
    dying: Sequence[int], made: Sequence[int], parts: Sequence[int]
) -> int:
    """The most bytes more while the two gradients of a contraction are ``made``, each of which
    reads the other's operand, in the order that takes less; the operands are ``dying``, ``parts``
    are there while either is made."""
    (left, right), (of_left, of_right), (for_left, for_right) = dying, made, parts
    right_first = max(of_right + for_right, of_right - left + of_left + for_left)
    left_first = max(of_left + for_left, of_left - right + of_right + for_right)
    return min(right_first, left_first)


def is_overwritable(kernel: Kernel, event: Event) -> bool:
    """Whether a kernel that reads what an event makes may write over it. XLA does so where one
    reads what the other makes as it is: not as a part of a tuple, which several results of one
    kernel are, and not through the barrier of a region that began since. (A matmul's derivative is
    a kernel for each of its gradients, and a sum of cotangents one of its own.)"""
    return event.sums or (not kernel.aliasing.in_tuple and not (kernel.fused and event.makes[1:]))


def _in_place_bytes(event: Event, sizes: list[int], dies: Sequence[int]) -> int:
    """Bytes that an elementwise kernel writes over what dies there: each result over an operand of
    as many bytes that it is made of, in the same order."""
    if event.not_in_place or not dies:
        return 0
    left, total = [one for one in dies if one not in event.lasting], 0
    parts = event.parts or [(left, event.makes)]
    if parts[1:]:  # what reads least of it chooses first
        parts = sorted(parts, key=lambda part: sum(one in left for one in part[0]))
    for uses, makes in parts:
        for made in makes:
            size = sizes[made]
            over = next((one for one in uses if one in left and sizes[one] == size), None)
            if over is not None:
                left.remove(over)
                total += size
    return total


def _reuse_output_buffers(
    events: Sequence[Event],
    sizes: list[int],
    results: Mapping[int, int],
    last: Sequence[int],
) -> list[int]:
    """Puts values into the memory of results that are yet to come, as XLA does, the largest
    first, one at a time in each: the sizes that are left."""
    sizes = sizes.copy()
    first: dict[int, int] = {}
    for index, event in enumerate(events):
        for instance in event.makes:
            first.setdefault(instance, index)
    room = sorted((size, instance) for instance, size in results.items() if instance in first)
    largest = room[-1][0] if room else 0
    values = [
        (sizes[instance], instance)
        for instance in first
        if largest // _MIN_REUSE < sizes[instance] <= largest and instance not in results
    ]
    taken: list[list[tuple[int, int]]] = [[] for _ in room]
    for size, instance in sorted(values, reverse=True):
        start, end = first[instance], last[instance]
        for at in range(bisect.bisect_left(room, (size, -1)), len(room)):
            after = bisect.bisect_left(taken[at], (start, end))
            until = taken[at][after][0] if after < len(taken[at]) else first[room[at][1]]
            if end < until and (not after or taken[at][after - 1][1] < start):
                taken[at].insert(after, (start, end))
                sizes[instance] = 0
                break
    return sizes
