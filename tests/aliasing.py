"""Finds fusions of a compiled program that write over a buffer which they read elsewhere.

XLA may give a fusion's result the memory of one of its operands. That is right where each element
is read at the place where it is written, and nowhere else. XLA forgets that two operands may be one
buffer, one of them through a bitcast (for CPUs in jaxlib 0.10, for GPUs in 0.12): such a program
computes other numbers in silence.

A fusion round a reduction (``kInput``) reads each element once, in the thread that writes there.
Fusions that the compiler takes as a whole (``kCustom``: matmuls, sorts) are not judged.
"""

import math
import re

import numpy as np

from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import CALLED, SHAPE, operands_of, operation_of

_ALLOCATION = re.compile(r"allocation (\d+):")
_VALUE = re.compile(
    r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?[^@]*@\d+> \(size=(\d+),offset=(\d+)\)"
)
_PLACES = re.compile(r"\bparameter\((\d+)\)")
_GTE = re.compile(r"\bindex=(\d+)")
_LAYOUT = re.compile(r"\{([\d,]*)")
# These read and write in place by intent: XLA itself checks the indices.
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
_ELEMENTWISE = frozenset(
    """
    abs add and atan2 bitcast bitcast-convert cbrt ceil clamp compare complex convert copy cosine
    divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one logistic
    maximum minimum multiply negate not opt-barrier or popcnt power real reduce-precision remainder
    reshape round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sqrt subtract tan tanh tuple xor
    """.split()
)
_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_PADDING = re.compile(r"\bpadding=([\d_x-]+)")
# How a value of a fused computation reads a parameter: the element's number in memory that each
# element of the value reads, or -1; or one of these words.
_OWN, _OTHER = "in the thread that writes there", "elsewhere"
# Of larger parameters no elements are numbered.
_LARGEST = 1 << 20


def overwritten(hlo: str, buffers: str) -> list[str]:
    """``fusion: operand`` for each operand whose buffer a fusion writes and reads at other places.

    Args:
        hlo: the scheduled HLO as text.
        buffers: XLA's dump of the buffer assignment.
    """
    places = _places(buffers)
    computations = computations_of(hlo)
    found = []
    for lines in computations.values():
        for name, line in lines.items():
            if operation_of(line) != "fusion" or "kind=kCustom" in line:
                continue
            (called,) = CALLED.findall(line)
            root_operations = {operation_of(text) for text in computations[called].values()}
            if root_operations & _IN_PLACE:
                continue
            written = [place for key, place in places.items() if key.partition("{")[0] == name]
            reads = _read_elsewhere(computations[called], "kind=kInput" in line)
            for at, operand in enumerate(operands_of(line)):
                source = places.get(_defining(operand, lines))
                if source is None or at not in reads:
                    continue
                if any(_overlap(source, place) for place in written):
                    found.append(f"{name}: {operand}")
    return found


def _places(buffers: str) -> dict[str, tuple[int, int, int]]:
    """Allocation, first byte and size of each value, by ``instruction{index}``."""
    allocation, found = -1, {}
    for line in buffers.splitlines():
        head = _ALLOCATION.match(line)
        if head:
            allocation = int(head[1])
        value = _VALUE.match(line)
        if value and allocation >= 0:
            key = value[1] + (f"{{{value[2]}}}" if value[2] else "")
            found[key] = (allocation, int(value[4]), int(value[3]))
        if line.startswith("Total bytes"):
            break
    return found


def _defining(name: str, lines: dict[str, str]) -> str:
    """The value that an operand shows, by ``instruction{index}``."""
    while name in lines:
        operation, operands = operation_of(lines[name]), operands_of(lines[name])
        if operation in ("bitcast", "opt-barrier", "reshape"):
            name = operands[0]
        elif operation == "get-tuple-element":
            index = _GTE.search(lines[name])
            assert index is not None
            return f"{operands[0]}{{{index[1]}}}"
        else:
            break
    return name


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    (a, first, size), (b, second, other_size) = one, other
    return a == b and first < second + other_size and second < first + size


def _read_elsewhere(lines: dict[str, str], reduces: bool) -> set[int]:
    """The parameters of a fused computation, by number, of which an element is read by another
    thread than the one that writes at its place."""
    read: dict[str, dict[int, list]] = {}
    moved: set[int] = set()
    root = _root(lines)
    outputs = _shapes(lines[root])
    for name, line in lines.items():
        operation = operation_of(line)
        if operation == "parameter":
            number = _PLACES.search(line)
            assert number is not None
            # Elements of another size lie at other places.
            alike = any(_shapes(line)[0] == size for size in outputs)
            known = alike and math.prod(_dims(line)) <= _LARGEST
            read[name] = {int(number[1]): [_in_memory(line) if known else _OTHER]}
            continue
        mine: dict[int, list] = {}
        for operand in operands_of(line):
            for number, ways in read.get(operand, {}).items():
                mine.setdefault(number, []).extend(
                    _then(how, operation, lines[operand], line, reduces) for how in ways
                )
        read[name] = mine
        if name == root and operation != "tuple":
            moved |= _moved(mine, line)
        elif name == root:
            for output in operands_of(line):
                moved |= _moved(read.get(output, {}), lines[output])
    return moved


def _moved(ways: dict[int, list], line: str) -> set[int]:
    """The parameters that an output of a fusion reads at other places than it is written at."""
    return {
        number
        for number, reads in ways.items()
        if not all(how is _OWN or (how is not _OTHER and _in_place(how, line)) for how in reads)
    }


def _in_place(numbers: np.ndarray, line: str) -> bool:
    return bool(np.all((numbers == -1) | (numbers == _in_memory(line))))


def _then(how, operation: str, operand: str, line: str, reduces: bool):
    """What a value reads of a parameter that its operand reads so."""
    if how is _OTHER or how is _OWN:
        return how
    if operation == "bitcast":
        order = np.transpose(how, _major_to_minor(operand))
        major = _major_to_minor(line)
        shape = [_dims(line)[axis] for axis in major]
        return np.transpose(order.reshape(shape), np.argsort(major))
    if operation == "reshape":
        return how.reshape(_dims(line))
    if operation == "slice":
        bounds = _SLICE.findall(line.partition("slice={")[2])
        return how[tuple(slice(int(a), int(b), int(step or 1)) for a, b, step in bounds)]
    if operation == "pad":
        match = _PADDING.search(line)
        assert match is not None
        return _padded(how, [[int(n) for n in axis.split("_")] for axis in match[1].split("x")])
    if operation == "reduce" and reduces:
        return _OWN if _in_place(how, operand) else _OTHER
    if operation in _ELEMENTWISE and _dims(operand) == _dims(line):
        return how
    return _OTHER


def _padded(numbers: np.ndarray, padding: list[list[int]]):
    if any(low < 0 or high < 0 or any(inner) for low, high, *inner in padding):
        return _OTHER
    return np.pad(numbers, [axis[:2] for axis in padding], constant_values=-1)


def _in_memory(line: str) -> np.ndarray:
    """Each element's number in memory, in the shape of the value."""
    major = _major_to_minor(line)
    shape = [_dims(line)[axis] for axis in major]
    return np.transpose(np.arange(math.prod(shape)).reshape(shape), np.argsort(major))


def _major_to_minor(line: str) -> list[int]:
    match = SHAPE.search(line)
    assert match is not None
    layout = _LAYOUT.match(line[match.end() :])
    given = layout[1] if layout else ""
    return [int(axis) for axis in given.split(",") if axis][::-1] or list(range(len(_dims(line))))


def _root(lines: dict[str, str]) -> str:
    return list(lines)[-1]


def _shapes(line: str) -> list[int]:
    head = line.partition(f" {operation_of(line)}(")[0]
    return [_count(m[1], m[2]) for m in SHAPE.finditer(head)]


def _count(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    size = int(bits[0]) if bits else 8
    for dim in dims.split(","):
        size *= int(dim) if dim else 1
    return size


def _dims(line: str) -> tuple[int, ...]:
    match = SHAPE.search(line)
    assert match is not None
    return tuple(int(dim) for dim in match[2].split(",") if dim)
