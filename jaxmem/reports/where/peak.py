"""The peak of a compiled step: every buffer alive there, and who made it."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.attribution import Attribution, Origin, unknown
from jaxmem.reports.where.kinds import KINDS
from jaxmem.reports.where.padding import Padded, padded_arrays
from jaxmem.reports.where.timeline import Placed, Timeline
from jaxmem.reports.xla.dump import Allocation, Assignment, Value
from jaxmem.reports.xla.hlo import SHAPE
from jaxmem.reports.xla.instructions import Module

FRAGMENTATION = "(fragmentation)"
CONSTANTS = "(constants)"  # in the place of a line or a module


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer that is alive at the peak.

    ``bytes`` are its own at the peak: what other buffers named in ``shared_with`` lie over counts
    once, for the one made last. ``offset`` is from the start of its allocation; ``first`` and
    ``last`` are the points of the schedule between which it lives.
    """

    name: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    source: str
    module: str
    phase: str
    kind: str
    allocation: int
    offset: int
    first: int
    last: int
    shared_with: tuple[str, ...]


class MemoryMap:
    """Timeline and attribution of one compiled step."""

    def __init__(
        self, assignment: Assignment, hlo: str, arguments: Sequence[Argument | None]
    ) -> None:
        self.timeline, self.on_chip = Timeline(assignment), assignment.on_chip
        self._attribution = Attribution(Module(hlo), arguments)

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Everything alive at the peak, largest first; the bytes add up to the peak."""
        placed = self.timeline.at(self.timeline.peak_point)
        found = [self._buffer(one) for one in placed]
        return tuple(sorted(found, key=lambda buffer: (-buffer.bytes, buffer.name)))

    @functools.cached_property
    def padding(self) -> tuple[Padded, ...]:
        """The arrays at the peak that are padded to tiles, the most padding first."""
        return padded_arrays(self.timeline.at(self.timeline.peak_point))

    def breakdown(self, key: Callable[[Buffer], str]) -> dict[str, int]:
        """Bytes at the peak by a property of the buffers, largest first, then the fragmentation:
        the rows add up to the device bytes of the step."""
        rows: Counter[str] = Counter()
        for buffer in self.buffers:
            rows[key(buffer)] += buffer.bytes
        return dict(rows.most_common()) | {FRAGMENTATION: self.timeline.fragmentation}

    @functools.cached_property
    def live_by_kind(self) -> dict[str, np.ndarray]:
        """Live bytes at each point of the schedule by kind (``int64 [points]``)."""
        owners = []
        for one in self.timeline.allocations:
            numbers = [KINDS.index(self._origin(value, one).kind) for value in one.values]
            owners.append([*numbers, KINDS.index(self._unused(one).kind)])
        rows = self.timeline.by_owner(owners, len(KINDS))
        return dict(zip(KINDS, rows, strict=True))

    @functools.cached_property
    def phases(self) -> tuple[str, ...]:
        """The phase of the instruction at each point of the schedule."""
        return tuple(map(self._attribution.phase, self.timeline.schedule))

    @functools.cached_property
    def origins(self) -> tuple[Origin, ...]:
        """Where the instruction at each point of the schedule comes from."""
        return tuple(map(self._attribution.describe, self.timeline.schedule))

    def describe(self, point: int) -> Origin:
        """Where the instruction at a point of the schedule comes from."""
        live, schedule = self.timeline.live, self.timeline.schedule
        # Some compilers have arguments where they are first read: what reads them runs there.
        while (
            self._attribution.is_argument(schedule[point])
            and point + 1 < len(schedule)
            and live[point + 1] == live[point]
        ):
            point += 1
        return self._attribution.describe(schedule[point])

    def _origin(self, value: Value, allocation: Allocation) -> Origin:
        if not value.instruction or allocation.role == "constant":
            return self._unused(allocation)
        return self._attribution.origin(value, allocation)

    def _unused(self, allocation: Allocation) -> Origin:
        """Of an argument or a result while no value lives in its memory."""
        if allocation.role == "constant":
            return Origin("constant", CONSTANTS, CONSTANTS, "state", "constants")
        known = self._attribution.argument_of(allocation)
        main = _main_value(allocation)
        if known or main is None:
            return known or unknown("outputs" if allocation.role == "output" else "temporaries")
        return self._attribution.origin(main, allocation)

    def _buffer(self, placed: Placed) -> Buffer:
        value, allocation = placed.value, placed.allocation
        origin = self._origin(value, allocation)
        main = value if value.instruction else _main_value(allocation) or value
        shape = SHAPE.match(main.shape)
        name = value.name or f"allocation {allocation.number}"
        return Buffer(
            name=name,
            bytes=placed.bytes,
            shape=tuple(int(size) for size in shape[2].split(",") if size) if shape else (),
            dtype=shape[1] if shape else "tuple" if main.shape.startswith("(") else "",
            **dataclasses.asdict(origin),
            allocation=allocation.number,
            offset=value.offset,
            first=value.first,
            last=value.last,
            shared_with=placed.shared_with,
        )


def _main_value(allocation: Allocation) -> Value | None:
    """The value that an argument's or a result's memory is there for."""
    return max(allocation.values, key=lambda value: (value.size, value.last), default=None)
