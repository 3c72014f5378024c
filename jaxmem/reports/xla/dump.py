"""The adapter to XLA's dumps: buffer assignment and live ranges as plain data.

``*-buffer-assignment.txt`` says which value lies at which offset of which allocation,
``*-live-range.txt`` the order in which the program runs (loop bodies written in place) and from
where to where in it each value lives. Formats of jax 0.10.2 and 0.12 are known and recorded as
samples in the tests; anything else is refused, since a wrong figure is worse than none.
"""

import dataclasses
import re
from collections import Counter

from jaxmem.ground.errors import JaxmemError

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+), (.+):$")
_NOTES = (  # what may stand after an allocation's size; longest forms first
    ("argument", re.compile(r"parameter (\d+), shape \|.*?\| at ShapeIndex \{[\d,]*\}")),
    ("output", re.compile(r"output shape is \|.*\|")),
    ("temp", re.compile("preallocated-temp")),
    ("thread-local", re.compile("thread-local")),
    ("constant", re.compile("constant")),
    ("live-out", re.compile("maybe-live-out")),
    ("color", re.compile(r"color (\d+)")),
    ("page", re.compile(r"page \d+")),  # since jax 0.12
)
_VALUE = re.compile(
    r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(\d+),offset=(\d+)\): (.*)$"
)
_POINT = re.compile(r"    (\d+):(\S+)$")
_RANGE = re.compile(r"    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
_DEVICE, _HOST = 0, 5  # XLA's colors; any other is a memory on the chip itself
_COLORS = range(16)
_KNOWN = "jax 0.10.2 to 0.12"


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One value of the compiled program, in bytes from the start of its allocation: element
    ``index`` of the result of an instruction (``()``: all of it). It lives from point ``first`` of
    the schedule to point ``last``, both included."""

    instruction: str
    index: tuple[int, ...]
    offset: int
    size: int
    shape: str
    first: int
    last: int

    @property
    def name(self) -> str:
        return self.instruction + (f"{{{','.join(map(str, self.index))}}}" if self.index else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """One stretch of memory that the program gets for all of its run.

    ``color`` is XLA's number of the memory that it is in. ``role`` is ``"argument"``,
    ``"output"`` (not an argument's), ``"temp"``, ``"constant"`` or ``"thread-local"``; ``live_out``
    says that results are in it (an argument's: it is aliased).
    """

    number: int
    size: int
    role: str
    color: int
    live_out: bool
    parameter: int | None
    values: tuple[Value, ...]

    @property
    def on_device(self) -> bool:
        """Whether it is in the device's main memory."""
        return self.color == _DEVICE


@dataclasses.dataclass(frozen=True)
class Assignment:
    """All allocations of a compiled program, and its instructions in the order they run."""

    allocations: tuple[Allocation, ...]
    schedule: tuple[str, ...]

    def total(self, role: str, *, on_host: bool = False) -> int:
        """Bytes of the allocations of a role, as `memory_analysis` counts them; ``"alias"`` and
        ``"output"`` count an aliased argument."""
        color = _HOST if on_host else _DEVICE
        chosen = (one for one in self.allocations if one.color == color)
        if role == "alias":
            return sum(one.size for one in chosen if one.live_out and one.role == "argument")
        if role == "output":
            return sum(one.size for one in chosen if one.live_out)
        return sum(one.size for one in chosen if one.role == role)

    @property
    def on_chip(self) -> dict[int, int]:
        """Bytes in memories of the chip itself, by XLA's numbers of them."""
        found: Counter[int] = Counter()
        for one in self.allocations:
            if one.color not in (_DEVICE, _HOST):
                found[one.color] += one.size
        return dict(sorted(found.items()))


def read_dump(buffers: str, ranges: str, version: str) -> Assignment:
    """The buffer assignment of one program.

    Args:
        buffers: text of ``*-buffer-assignment.txt``.
        ranges: text of ``*-live-range.txt``.
        version: that of jaxlib, for the message of an error.

    Raises:
        JaxmemError: a line has a form that is not known, or totals do not add up.
    """
    schedule, lives = _read_ranges(ranges, version)

    def read(line: str) -> Value:
        return _value(line, lives, len(schedule), version)

    allocations = tuple(
        _allocation(line, [read(value) for value in values], version)
        for line, values in _sections(buffers, version)
    )
    for one in allocations:
        for value in one.values:
            lives_somewhere = value.first >= 0 or one.role in ("thread-local", "constant")
            if not lives_somewhere or value.offset + value.size > one.size:
                raise _unknown("live range or place of a value", value.name, version)
    return Assignment(allocations, schedule)


def read_totals(buffers: str, version: str) -> Assignment:
    """The allocations of one program without their values: enough for `Assignment.total`.

    Raises:
        JaxmemError: a line has a form that is not known.
    """
    sections = _sections(buffers, version)
    return Assignment(tuple(_allocation(line, [], version) for line, _ in sections), ())


def _sections(buffers: str, version: str) -> list[tuple[str, list[str]]]:
    """Each allocation's first line, and the lines of its values."""
    lines = iter(buffers.splitlines())
    if next(lines, "") != "BufferAssignment:":
        raise _unknown("buffer assignment", buffers.partition("\n")[0], version)
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("allocation "):
            found.append((line, []))
        elif line.startswith(" value: ") and found:
            found[-1][1].append(line)
        elif line.strip():
            break  # a summary follows, of which nothing is read
    if not found:
        raise _unknown("buffer assignment", "no allocations", version)
    return found


def _allocation(line: str, values: list[Value], version: str) -> Allocation:
    head = _ALLOCATION.match(line)
    if head is None:
        raise _unknown("buffer assignment", line, version)
    rest, notes = head[3], {}
    while rest:
        for name, form in _NOTES:
            match = form.match(rest)
            if match:
                notes[name] = match[1] if form.groups else ""
                rest = rest[match.end() :].removeprefix(", ")
                break
        else:
            raise _unknown("allocation", line, version)
    known = ("argument", "temp", "thread-local", "constant")
    roles: list[str] = [role for role in known if role in notes]
    if not roles and ("output" in notes or "live-out" in notes):
        roles = ["output"]
    color = int(notes.get("color", _DEVICE))
    if len(roles) != 1 or color not in _COLORS:
        raise _unknown("allocation", line, version)
    parameter = int(notes["argument"]) if "argument" in notes else None
    return Allocation(
        int(head[1]),
        int(head[2]),
        roles[0],
        color,
        "live-out" in notes,
        parameter,
        tuple(values),
    )


def _value(line: str, lives: dict[str, tuple[int, int]], points: int, version: str) -> Value:
    match = _VALUE.match(line)
    if match is None:
        raise _unknown("buffer assignment", line, version)
    index = _index(match[2])
    first, last = lives.get(f"{match[1]}{{{match[2] or ''}}}", (-1, -1))
    last = min(last, points - 1)
    return Value(match[1], index, int(match[4]), int(match[3]), match[5], first, last)


def _read_ranges(text: str, version: str) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    """The schedule, and where in it each value lives, by ``instruction{index}``."""
    schedule: list[str] = []
    lives: dict[str, tuple[int, int]] = {}
    section = ""
    for number, line in enumerate(text.splitlines()):
        if number == 0:
            if not line.startswith("HloLiveRange"):
                raise _unknown("live ranges", line, version)
        elif line.startswith("  ") and not line.startswith("   "):
            section = line.strip().partition(" ")[0]
            if section == "Live":
                break  # the peak as XLA sees it, of which nothing is read
        elif section == "InstructionSequence:":
            point = _POINT.match(line)
            if point is None or int(point[1]) != len(schedule):
                raise _unknown("live ranges", line, version)
            schedule.append(point[2])
        elif section == "BufferLiveRange:":
            match = _RANGE.match(line)
            if match is None:
                raise _unknown("live ranges", line, version)
            lives[f"{match[1]}{{{match[2]}}}"] = (int(match[3]), int(match[4]))
        elif line.strip():
            raise _unknown("live ranges", line, version)
    if not schedule or not lives:
        raise _unknown("live ranges", "no schedule", version)
    return tuple(schedule), lives


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (text or "").split(",") if number)


def _unknown(what: str, line: str, version: str) -> JaxmemError:
    return JaxmemError(
        f"XLA of jax {version} wrote a {what} in a form that jaxmem does not know ({_KNOWN} are "
        f"known): {line.strip()[:160]!r}. Update jaxmem, or use a jax that it knows; "
        "jaxmem.memory(compile='full', timeline=False) gives the totals without it."
    )
