"""Which bytes of the device are alive when, and which value they belong to: pure arithmetic.

What a step takes (``device``) is laid out once, before it runs. Arguments and results are the
caller's and are alive throughout, as constants are; of the temporary arena those bytes are alive at
a point of the schedule that some value lives in. The peak is the first point with the most live
bytes, and what the layout takes beyond them is fragmentation: ``device == peak + fragmentation``.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxmem.reports.xla.dump import Allocation, Assignment, Value

_CELLS = 4_000_000  # of the picture of an allocation that are in memory at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A value in its allocation, with the bytes it has to itself at the peak (what shares memory
    with it counts nothing) and the names of those it shares with there."""

    value: Value
    allocation: Allocation
    bytes: int
    shared_with: tuple[str, ...]


class Timeline:
    """Live device bytes at each point of the compiled schedule.

    ``schedule`` names the instruction at each point, ``live`` has the bytes (``int64 [points]``).
    """

    def __init__(self, assignment: Assignment):
        self.schedule = assignment.schedule
        self._allocations = [
            one
            for one in assignment.allocations
            if one.on_device and one.role in ("argument", "output", "temp", "constant")
        ]
        self.device = sum(one.size for one in self._allocations)
        self.live = self._live()

    @property
    def allocations(self) -> Sequence[Allocation]:
        """Device memory of the step: arguments, results, constants and the temporary arena."""
        return self._allocations

    @functools.cached_property
    def peak_point(self) -> int:
        """The first point of the schedule with the most live bytes."""
        return int(np.argmax(self.live))

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return int(self.live[self.peak_point])

    @property
    def fragmentation(self) -> int:
        """Bytes that the layout takes beyond the peak."""
        return self.device - self.peak

    def _live(self) -> np.ndarray:
        always = sum(one.size for one in self._allocations if one.role != "temp")
        total = np.full(len(self.schedule), always, np.float64)
        for one in self._allocations:
            for sizes, picture in self._pictures(one) if one.role == "temp" else ():
                # Sums of whole numbers below 2^53 are exact in float64.
                total += (picture >= 0).astype(np.float64) @ sizes.astype(np.float64)
        return total.astype(np.int64)

    def by_owner(self, owners: Sequence[Sequence[int]], count: int) -> np.ndarray:
        """Live bytes by owner and point, ``int64 [count, points]``.

        Args:
            owners: for each allocation the owner (0 to ``count - 1``) of each of its values, and of
                its bytes while no value lives in them (an argument before or after its use).
            count: the number of owners.
        """
        points, slots = len(self.schedule), count + 1  # the last slot: nobody's
        total = np.zeros(points * slots)
        rows = np.arange(points)[:, None] * slots
        for one, numbers in zip(self._allocations, owners, strict=True):
            owner_of = np.asarray([*numbers, count])
            for sizes, picture in self._pictures(one):
                at = (rows + owner_of[picture]).ravel()
                # Sums of whole numbers below 2^53 are exact in float64.
                total += np.bincount(at, np.tile(sizes, points), total.size)
        return total.reshape(points, slots)[:, :count].T.astype(np.int64)

    def at(self, point: int) -> list[Placed]:
        """What is alive at a point, in the order of allocations and offsets."""
        placed = []
        for one in self._allocations:
            own = np.zeros(len(one.values) + 1, np.int64)
            for sizes, picture in self._pictures(one, point):
                np.add.at(own, picture[0], np.where(picture[0] >= 0, sizes, 0))
            alive = [value for value in one.values if value.first <= point <= value.last]
            shared = _overlapping(alive)
            for value, count in zip((*one.values, None), own.tolist(), strict=True):
                if count and value is None:
                    value = Value("", (), 0, one.size, "", 0, len(self.schedule) - 1)
                if count and value is not None:
                    placed.append(Placed(value, one, count, shared.get(value, ())))
        return placed

    def _pictures(self, one: Allocation, point: int | None = None):
        """An allocation as rows of points and columns of offsets: column sizes in bytes, and in
        each cell the number of the value that it belongs to (the one made last), -1 where none,
        and the number of values where an argument or result is idle."""
        points = len(self.schedule) if point is None else 1
        start = 0 if point is None else point
        edges = np.unique(
            [0, one.size, *(edge for v in one.values for edge in (v.offset, v.offset + v.size))]
        )
        order = sorted(
            range(len(one.values)), key=lambda n: (one.values[n].first, -one.values[n].size)
        )
        lows = np.searchsorted(edges, [value.offset for value in one.values])
        highs = np.searchsorted(edges, [value.offset + value.size for value in one.values])
        columns = max(1, _CELLS // points)
        for left in range(0, len(edges) - 1, columns):
            right = min(left + columns, len(edges) - 1)
            # A row more than the values have: the last of `numbers` is what an idle one belongs to.
            empty = -1 if one.role == "temp" else len(one.values)
            picture = np.full((points, right - left), empty, np.int32)
            for number in order:
                value = one.values[number]
                low, high = max(lows[number], left), min(highs[number], right)
                first, last = max(value.first - start, 0), min(value.last - start, points - 1)
                if low < high and first <= last:
                    picture[first : last + 1, low - left : high - left] = number
            yield np.diff(edges[left : right + 1]), picture


def _overlapping(values: Sequence[Value]) -> dict[Value, tuple[str, ...]]:
    """Of each value the names of those that have bytes of it too."""
    order = sorted(range(len(values)), key=lambda at: values[at].offset)
    found: list[list[int]] = [[] for _ in values]
    for place, at in enumerate(order):
        one = values[at]
        for later in map(order.__getitem__, range(place + 1, len(order))):
            other = values[later]
            if other.offset >= one.offset + one.size:
                break
            if one.offset < other.offset + other.size:
                found[at].append(later)
                found[later].append(at)
    return {
        value: tuple(values[other].name for other in sorted(others))
        for value, others in zip(values, found, strict=True)
    }
