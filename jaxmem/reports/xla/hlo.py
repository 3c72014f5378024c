"""Optimised HLO read from its text: the FLOPs in it, and its instructions with their origins.

The only place that reads HLO text. What XLA itself recomputes or removes shows here, unlike in a
jaxpr.
"""

import collections
import dataclasses
import math
import re
from typing import Any

from jaxmem.ground.errors import JaxmemError

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_SCALAR = re.compile(r"[a-z]\w*\[\]")
_OPERATION = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|async_execution_thread_calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_PARAMETER = re.compile(r"\bparameter\((\d+)\)")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_TABLE = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_BITS = re.compile(r"[a-z]+(\d+)")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of matmuls and convolutions (a multiply-add counts 2), and how many there are."""

    flops: int = 0
    convolutions: int = 0
    matmuls: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.convolutions + other.convolutions,
            self.matmuls + other.matmuls,
        )

    def __mul__(self, times: int) -> "Work":
        return Work(self.flops * times, self.convolutions * times, self.matmuls * times)


def count_work(hlo: str) -> Work:
    """The matmuls and convolutions of one run of a compiled program.

    A loop counts its body once per iteration where XLA knows the number, else once; a
    conditional counts its dearest branch.

    Raises:
        JaxmemError: the text has no entry computation.
    """
    computations = computations_of(hlo)
    entry = entry_of(hlo)
    done: dict[str, Work] = {}

    def total(name: str) -> Work:
        if name not in done:
            done[name] = sum(
                (
                    _own(line, computations[name]) + _inner(line, total)
                    for line in computations[name].values()
                ),
                Work(),
            )
        return done[name]

    return total(entry)


def entry_of(hlo: str) -> str:
    entry = _ENTRY.search(hlo)
    if entry is None:
        raise JaxmemError("This HLO has no ENTRY computation; its format is not known to jaxmem.")
    return entry[1]


_FREE = "after-all bitcast constant get-tuple-element iota opt-barrier parameter tuple".split()


def count_bytes(hlo: str, taken: bool) -> int:
    """Bytes that the kernels of one run read and write; a loop counts as in `count_work`. What runs
    or not by a value of its own, the second of two branches or a loop of an unknown number of
    turns, runs if ``taken`` (the loop once)."""
    computations = computations_of(hlo)

    def total(name: str) -> int:
        lines = computations[name]
        return sum(moved(line, lines) for line in lines.values())

    def moved(line: str, lines: dict[str, str]) -> int:
        operation = operation_of(line)
        if operation == "conditional":
            return total(branches_of(line)[int(taken)])
        if operation in ("while", "call"):
            trips = TRIPS.search(line)
            times = int(trips[1]) if trips else int(taken or operation == "call")
            return times * sum(map(total, CALLED.findall(line)))
        if operation in _FREE:
            return 0
        read = (lines[name] for name in operands_of(line) if name in lines)
        return _result_bytes(line) + sum(map(_result_bytes, read))

    return total(entry_of(hlo))


def branches_of(line: str) -> list[str]:
    """The computations of a conditional, by index (of two: what runs if false, then if true)."""
    names = re.search(r"branch_computations=\{([^}]*)\}", line)
    if names:
        return [name.strip().lstrip("%") for name in names[1].split(",")]
    pair = re.search(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)", line)
    return [pair[2], pair[1]] if pair else []


def _result_bytes(line: str) -> int:
    shape = line[: len(line) - len(after_shape(line))]
    return sum(array_bytes(*match) for match in SHAPE.findall(shape))


def array_bytes(dtype: str, dimensions: str) -> int:
    """Bytes of ``bf16[2,3]``, given as ``"bf16"`` and ``"2,3"``; a pred has one a value."""
    bits = _BITS.match(dtype)
    sizes = (int(size) for size in dimensions.split(",") if size)
    return math.prod(sizes) * (int(bits[1]) if bits else 8) // 8


def donated_arguments(hlo: str) -> frozenset[int]:
    """Numbers of the arguments whose memory a compiled program's results take over."""
    header = hlo.partition("\n")[0]
    pairs = re.findall(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}", header)
    return frozenset(map(int, pairs))


def results_on_host(hlo: str) -> list[bool]:
    """Whether each result of a compiled program is in host memory: those that take over an
    argument's memory are where that is, whatever their layout says."""
    header = re.sub(r"/\*.*?\*/", "", hlo.partition("\n")[0])
    layouts = header.partition("entry_computation_layout={(")[2].partition(", frontend_attributes=")
    arguments, _, results = layouts[0].partition(")->")
    on_host = [
        ["S(5)" in layout for layout in re.findall(r"\w+\[[\d,]*\](\{[^}]*\})?", part)]
        for part in (arguments, results)
    ]
    for result, argument in re.findall(r"\{(\d*)\}: \((\d+), \{\}", header):
        on_host[1][int(result or 0)] = on_host[0][int(argument)]
    return on_host[1]


def computations_of(hlo: str) -> dict[str, dict[str, str]]:
    """Every computation as its instructions' right-hand sides by name."""
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    current: dict[str, str] | None = None
    for line in hlo.splitlines():
        if current is None:
            start = _COMPUTATION.match(line)
            if start:
                current = found[start[1]]
        elif line.startswith("}"):
            current = None
        else:
            instruction = _INSTRUCTION.match(line)
            if instruction:
                current[instruction[1]] = instruction[2]
    return found


def _inner(line: str, total) -> Work:
    """Work of the computations that an instruction calls."""
    operation = operation_of(line)
    if operation == "conditional":
        return max(map(total, branches_of(line)), key=lambda work: work.flops, default=Work())
    if operation not in ("fusion", "call", "while", "async-start"):
        return Work()  # what a reduction or a sort applies holds no contraction
    trips = TRIPS.search(line)
    times = int(trips[1]) if operation == "while" and trips else 1
    return sum((total(name) for name in CALLED.findall(line)), Work()) * times


def _own(line: str, computation: dict[str, str]) -> Work:
    """Work of an instruction itself."""
    operation = operation_of(line)
    if operation == "dot":
        return Work(_dot_flops(line, computation, r"lhs_contracting_dims=\{([\d,]*)\}"), matmuls=1)
    if operation == "convolution":
        return Work(_convolution_flops(line, computation, "forward"), convolutions=1)
    if operation != "custom-call":
        return Work()
    called = _TARGET.search(line)
    name = called[1] if called else ""
    if name.startswith("__cublas$"):
        contracted = r'"lhs_contracting_dimensions":\["?([\d,"]*)\]'
        return Work(_dot_flops(line, computation, contracted), matmuls=1)
    if name.startswith("__cudnn$conv"):
        kind = name.removeprefix("__cudnn$conv")
        return Work(_convolution_flops(line, computation, kind), convolutions=1)
    return Work()


def _dot_flops(line: str, computation: dict[str, str], contracted: str) -> int:
    match = re.search(contracted, line)
    axes = re.findall(r"\d+", match[1]) if match else []
    lhs = _dimensions(computation[operands_of(line)[0]])
    return 2 * math.prod(_dimensions(line)) * math.prod(lhs[int(axis)] for axis in axes)


def _convolution_flops(line: str, computation: dict[str, str], kind: str) -> int:
    """Taps per output feature times outputs of the forward convolution, whichever of its three
    forms this is: labels are always those of the forward one."""
    labels = _LABELS.search(line)
    if labels is None:
        raise JaxmemError(f"A convolution without dim_labels in the HLO: {line[:200]}")
    operands = [_dimensions(computation[name]) for name in operands_of(line)[:2]]
    result = _dimensions(line)
    if kind == "BackwardInput":
        output, kernel = operands
    elif kind == "BackwardFilter":
        output, kernel = operands[1], result
    else:
        output, kernel = result, operands[1]
    taps = math.prod(kernel) // max(kernel[labels[2].index("o")], 1)
    return 2 * math.prod(output) * taps


def operation_of(line: str) -> str:
    match = _OPERATION.search(after_shape(line))
    return match[1] if match else ""


def after_shape(line: str) -> str:
    """The right-hand side without its result shape (a tuple's may hold parentheses)."""
    if not line.startswith("("):
        return line.partition(" ")[2] and " " + line.partition(" ")[2]
    depth = 0
    for index, letter in enumerate(line):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return line[index + 1 :]
    return line


def _dimensions(line: str) -> list[int]:
    """Dimensions of a result; of a tuple's first element."""
    shape = SHAPE.search(line)
    return [int(size) for size in shape[2].split(",") if size] if shape else []


def operands_of(line: str) -> list[str]:
    rest = after_shape(line)
    inside = rest[rest.index("(") + 1 :]
    return re.findall(r"%([\w.\-]+)", inside.partition(")")[0])


# ---- instructions and where they come from


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python on the stack when an operation was traced."""

    file: str
    function: str
    line: int


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``stack`` is its name stack (``jit(step)/jvp(ResNet)/Block_3/add``), empty
    where XLA made it on its own; ``frame`` numbers a stack frame (0: none); ``index`` is that of
    a parameter or a tuple element, else -1."""

    name: str
    computation: str
    opcode: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    index: int
    custom_call: str
    stack: str
    frame: int
    is_scalar: bool


class Module:
    """The instructions of a compiled program by name, what each computation returns, and the
    stack frames that they come from."""

    def __init__(self, hlo: str):
        self.entry = entry_of(hlo)
        self.instructions: dict[str, Instruction] = {}
        self.roots: dict[str, Instruction] = {}
        self.members: dict[str, list[Instruction]] = {}
        for computation, lines in computations_of(hlo).items():
            for name, line in lines.items():
                made = _instruction(name, computation, line)
                self.instructions[name] = made
                self.members.setdefault(computation, []).append(made)
            self.roots[computation] = made  # a scheduled computation ends with its root
        self._tables = _tables(hlo)

    def frames(self, number: int) -> tuple[Frame, ...]:
        """The stack of a frame, innermost first."""
        files, functions, locations, stack = self._tables
        found = []
        while number in stack:
            place = locations[stack[number]["file_location_id"]]
            found.append(
                Frame(
                    files[place["file_name_id"]],
                    functions[place["function_name_id"]],
                    place["line"],
                )
            )
            # Written one too high: the outermost frame, which has no parent (0), says 1.
            number = stack[number].get("parent_frame_id", 1) - 1
        return tuple(found)


def _instruction(name: str, computation: str, line: str) -> Instruction:
    opcode = operation_of(line)
    stack, frame = _OP_NAME.search(line), _FRAME_ID.search(line)
    called = [*CALLED.findall(line), *re.findall(r"condition=%?([\w.\-]+)", line)]
    for match in _BRANCHES.finditer(line):  # in the order of the operands that they get
        called += [one.strip().lstrip("%") for one in (match[1] or match[2]).split(",")]
    number = (_PARAMETER if opcode == "parameter" else _INDEX).search(line)
    target = _TARGET.search(line)
    return Instruction(
        name,
        computation,
        opcode,
        () if opcode in ("parameter", "constant") else tuple(operands_of(line)),
        tuple(called),
        int(number[1]) if number and opcode in ("parameter", "get-tuple-element") else -1,
        target[1] if target else "",
        re.sub(r"\\(.)", r"\1", stack[1]) if stack else "",
        int(frame[1]) if frame else 0,
        bool(_SCALAR.match(line)),
    )


def _tables(hlo: str):
    """The tables FileNames, FunctionNames, FileLocations and StackFrames, by number."""
    tables: dict[str, dict[int, Any]] = {
        name: {} for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    current: dict[int, Any] | None = None
    for line in hlo.splitlines():
        if line in tables:
            current = tables[line]
        elif current is not None and line:
            entry = _TABLE.match(line)
            if entry is None:
                break  # the first computation
            text, fields = entry[2], entry[3]
            current[int(entry[1])] = (
                text if fields is None else {k: int(v) for k, v in _FIELD.findall(fields)}
            )
    return tuple(tables.values())
