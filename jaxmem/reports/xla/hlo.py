"""Optimised HLO as text: its computations, and the operation, shape, operands and calls of a line.

What else reads HLO in this folder reads it through these functions.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from jaxmem.ground.errors import JaxmemError

Lines = Mapping[str, str]  # of a computation: its instructions' right-hand sides by name

_END = re.compile(r'^\}(?:, execution_thread="[^"]*")?$')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPERATION = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|async_execution_thread_calls)=%?([\w.\-]+)")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
INDEX = re.compile(r"\bindex=(\d+)")  # of a tuple's element
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
TARGET = re.compile(r'custom_call_target="([^"]+)"')
LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")  # of a convolution
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)=(\S+)")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_PARENTHESIS = re.compile("[()]")
_ELEMENT = re.compile(r"%([\w.\-]+)((?:#\d+)+)")
_BITS = re.compile(r"[a-z]+(\d+)")


def numbers_of(text: str) -> list[int]:
    """Those of a list such as ``"8,128"``."""
    return [int(one) for one in text.split(",") if one]


def dimensions_of(line: str) -> list[int]:
    """Dimensions of a result; of a tuple's first element."""
    shape = SHAPE.search(line)
    return numbers_of(shape[2]) if shape else []


def window_of(line: str) -> dict[str, str]:
    """The fields of a convolution's window: ``{"size": "3x3", "stride": "2x2"}``."""
    found = _WINDOW.search(line)
    return dict(_FIELD.findall(found[1])) if found else {}


def entry_of(hlo: str) -> str:
    """The name of the computation that a program starts with."""
    entry = _ENTRY.search(hlo)
    if entry is None:
        raise JaxmemError("This HLO has no ENTRY computation; its format is not known to jaxmem.")
    return entry[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """The computations that an instruction runs: one after the other, ``trip_count`` times (None: a
    loop for which XLA does not know), or, of a conditional (``is_branch``), one of them, in the
    order of its index (of two: what runs if false, then if true)."""

    computations: tuple[str, ...]
    trip_count: int | None = 1
    is_branch: bool = False


def calls_of(line: str) -> Calls | None:
    """What an instruction runs, given as its right-hand side; None if it is one kernel, as a fusion
    is and what a reduction or a sort applies."""
    operation = operation_of(line)
    if operation == "conditional":
        return Calls(_branches_of(line), is_branch=True)
    if operation not in ("while", "call", "async-start"):
        return None
    turns: int | None = 1
    if operation == "while":
        known = TRIPS.search(line)
        turns = int(known[1]) if known else None
    return Calls(tuple(CALLED.findall(line)), turns)


def _branches_of(line: str) -> tuple[str, ...]:
    names = re.search(r"branch_computations=\{([^}]*)\}", line)
    if names:
        return tuple(name.strip().lstrip("%") for name in names[1].split(","))
    pair = re.search(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)", line)
    return (pair[2], pair[1]) if pair else ()


def array_bytes(dtype: str, dimensions: str) -> int:
    """Bytes of ``bf16[2,3]``, given as ``"bf16"`` and ``"2,3"``; a pred has one a value."""
    bits = _BITS.match(dtype)
    sizes = (int(size) for size in dimensions.split(",") if size)
    return math.prod(sizes) * (int(bits[1]) if bits else 8) // 8


def result_bytes(line: str) -> int:
    """The bytes of an instruction's results, given as its right-hand side."""
    shape = line.removesuffix(after_shape(line))
    return sum(array_bytes(*match) for match in SHAPE.findall(shape))


def parsed(hlo: str) -> dict[str, dict[str, str]]:
    """Every computation by name, as it is written. An instruction whose attributes have line breaks
    (those of Pallas' splash attention) is one line here."""
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    current: dict[str, str] | None = None
    last = ""
    for line in hlo.splitlines():
        if current is None:
            start = _COMPUTATION.match(line)
            if start:
                current = found[start[1]]
        elif _END.match(line):
            current = None
        else:
            instruction = _INSTRUCTION.match(line)
            if instruction:
                for whole, element in _ELEMENT.findall(line.partition(", metadata=")[0]):
                    _write_out(current, whole, element)
                last = instruction[1]
                current[last] = instruction[2]
            elif last in current:
                current[last] += line
    return found


def _write_out(computation: dict[str, str], whole: str, element: str) -> None:
    """Makes an instruction of an element of a tuple that is written as an operand, ``%whole#2`` (as
    XLA writes it since jax 0.12), so that all operands are names of instructions."""
    name = whole + element
    before, _, index = name.rpartition("#")
    if name in computation:
        return
    if before not in computation:
        outer, mark, inner = before.partition("#")
        _write_out(computation, outer, mark + inner)
    shape = elements_of(computation[before])[int(index)]
    computation[name] = f"{shape} get-tuple-element(%{before}), index={index}"


def elements_of(line: str) -> list[str]:
    """The shapes in a tuple's, given as the right-hand side of an instruction."""
    inside = line.removesuffix(after_shape(line))[1:-1]
    found, depth, start = [], 0, 0
    for at, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append(inside[start:at].strip())
            start = at + 1
    # XLA numbers the elements of long tuples: /*index=5*/
    return [re.sub(r"/\*.*?\*/", "", one).strip() for one in (*found, inside[start:])]


def operation_of(line: str) -> str:
    """The opcode of an instruction, given as its right-hand side."""
    match = _OPERATION.search(after_shape(line))
    return match[1] if match else ""


def after_shape(line: str) -> str:
    """The right-hand side without its result shape (a tuple's may hold parentheses)."""
    if not line.startswith("("):
        return line.partition(" ")[2] and " " + line.partition(" ")[2]
    depth = 0
    for match in _PARENTHESIS.finditer(line):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return line[match.end() :]
    return line


def operands_of(line: str) -> list[str]:
    """The names of an instruction's operands, given as its right-hand side."""
    rest = after_shape(line)
    inside = rest[rest.index("(") + 1 :]
    return re.findall(r"%([\w.\-]+(?:#\d+)*)", inside.partition(")")[0])
