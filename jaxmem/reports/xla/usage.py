"""The memory that XLA's rematerialization pass takes a program to need, which is not quite what the
buffer assignment gives it afterwards."""

from collections.abc import Iterator, Mapping

from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    CONDITION,
    INDEX,
    SHAPE,
    Lines,
    array_bytes,
    calls_of,
    elements_of,
    entry_of,
    operands_of,
    operation_of,
    result_bytes,
)

# What has the buffers of its operands.
_PASSES_ON = frozenset({"bitcast", "get-tuple-element", "tuple", "opt-barrier", "add-dependency"})

Buffers = list  # names of buffers, nested as the tuple is that they are in


def temporary_bytes(hlo: str) -> int:
    """The most bytes of temporary values at once, as `HloRematerialization` of XLA counts them
    (xla/service/hlo_rematerialization.cc): every result has a buffer of its own until its last
    reader has run, also what the buffer assignment writes in place; arguments and results of the
    program count 0, and a loop has the buffers of its operand."""
    return _Usage(computations_of(hlo)).of(entry_of(hlo))


class _Usage:
    """The peaks of a program's computations."""

    def __init__(self, computations: Mapping[str, Lines]):
        self._computations = computations
        self._known: dict[str, int] = {}

    def of(self, name: str) -> int:
        """That of a computation, less what it is given and what it returns."""
        if name not in self._known:
            self._known[name] = self._peak(self._computations[name])
        return self._known[name]

    def _peak(self, lines: Lines) -> int:
        sizes, made, last = _lives(lines)
        ends: dict[int, list[str]] = {}
        for buffer, at in last.items():
            ends.setdefault(at, []).append(buffer)
        live = most = 0
        for at, (name, line) in enumerate(lines.items()):
            live += sum(sizes[buffer] for buffer in made[name])
            most = max(most, live + sum(map(self.of, _called(line))))
            live -= sum(sizes[buffer] for buffer in ends.get(at, ()))
            live -= sum(sizes[buffer] for buffer in made[name] if buffer not in last)
        return most


def _called(line: str) -> list[str]:
    """The computations that an instruction runs in their own buffers."""
    calls = calls_of(line)
    if calls is None or operation_of(line) == "async-start":
        return []
    return [*calls.computations, *CONDITION.findall(line)]


def _lives(lines: Lines) -> tuple[dict[str, int], dict[str, list[str]], dict[str, int]]:
    """Buffers by name: their bytes, those that each instruction makes, and their last readers."""
    has: dict[str, Buffers] = {}
    sizes: dict[str, int] = {}
    made: dict[str, list[str]] = {}
    last: dict[str, int] = {}
    for at, (name, line) in enumerate(lines.items()):
        operation = operation_of(line)
        read = [operand for operand in operands_of(line) if operand in has]
        has[name], own = _buffers(name, line, operation, [has[operand] for operand in read])
        made[name] = list(own)
        sizes |= own
        if operation not in _PASSES_ON:
            last |= {buffer: at for operand in read for buffer in _flat(has[operand])}
    for buffer in _flat(has[name]):
        sizes[buffer] = 0
    return sizes, made, last


def _buffers(name: str, line: str, operation: str, read: list[Buffers]):
    """What an instruction's result lies in, and the bytes of what it makes for that."""
    if operation == "tuple":
        return read, {}
    if operation == "get-tuple-element":
        found = INDEX.search(line)
        assert found
        return read[0][int(found[1])], {}
    if operation in _PASSES_ON or operation == "while":
        return read[0], {}
    given = operation == "parameter"
    if not line.startswith("("):
        return [name], {name: 0 if given else result_bytes(line)}
    own: dict[str, int] = {}
    return _of_tuple(name, line, given, own), own


def _of_tuple(name: str, shape: str, given: bool, own: dict[str, int]) -> Buffers:
    """The buffers of a result that is a tuple, perhaps of tuples."""
    found: Buffers = []
    for at, element in enumerate(elements_of(shape + " ")):
        inner = f"{name}#{at}"
        if element.startswith("("):
            found.append(_of_tuple(inner, element, given, own))
        else:
            own[inner] = 0 if given else sum(array_bytes(*one) for one in SHAPE.findall(element))
            found.append([inner])
    return found


def _flat(buffers: Buffers) -> Iterator[str]:
    for one in buffers:
        if isinstance(one, str):
            yield one
        else:
            yield from _flat(one)
