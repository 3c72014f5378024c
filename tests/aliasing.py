"""Finds fusions of a compiled program that write over a buffer which they read elsewhere.

XLA may give a fusion's result the memory of one of its operands. That is right where each element
is read at the place where it is written, and nowhere else. XLA forgets that two operands may be one
buffer, one of them through a bitcast (for CPUs in jaxlib 0.10, for GPUs in 0.12): such a program
computes other numbers in silence.

A fusion round a reduction (``kInput``) reads each element once, in the thread that writes there.
Fusions that the compiler takes as a whole (``kCustom``: matmuls, sorts) are not judged.
"""

import re

from jaxmem.reports.xla.hlo import CALLED, SHAPE, computations_of, operands_of, operation_of

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
_SAME, _OTHER = "at the same place", "elsewhere"


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
            reads = _reads(computations[called], "kind=kInput" in line)
            for at, operand in enumerate(operands_of(line)):
                source = places.get(_defining(operand, lines))
                if source is None or reads.get(at) != _OTHER:
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


def _reads(lines: dict[str, str], reduces: bool) -> dict[int, str]:
    """How a fused computation reads each parameter, by number."""
    read: dict[str, dict[int, str]] = {}
    last: dict[int, str] = {}
    outputs = _shapes(lines[_root(lines)])
    for name, line in lines.items():
        operation = operation_of(line)
        if operation == "parameter":
            number = _PLACES.search(line)
            assert number is not None
            read[name] = {int(number[1]): _SAME}
            # Elements of another size lie at other places.
            if not any(_size(line) == size for size in outputs):
                read[name] = {int(number[1]): _OTHER}
            continue
        mine: dict[int, str] = {}
        for operand in operands_of(line):
            for number, how in read.get(operand, {}).items():
                same = operation in _ELEMENTWISE and (
                    operation in ("bitcast", "tuple")
                    or (_dims(lines[operand]) == _dims(line) and _layout(operand, name, lines))
                )
                same = same or (reduces and operation == "reduce")
                worse = how == _OTHER or not same or mine.get(number) == _OTHER
                mine[number] = _OTHER if worse else _SAME
        read[name] = mine
        last = mine
    return read.get(_root(lines), last)


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


def _size(line: str) -> int:
    return _shapes(line)[0]


def _dims(line: str) -> str:
    match = SHAPE.search(line)
    assert match is not None
    return match[2]


def _layout(one: str, other: str, lines: dict[str, str]) -> bool:
    """Whether two values of one shape lie in memory alike."""
    layouts = []
    for name in (one, other):
        match = SHAPE.search(lines[name])
        assert match is not None
        layout = _LAYOUT.match(lines[name][match.end() :])
        layouts.append(layout[1] if layout else "")
    return layouts[0] == layouts[1]
