"""The instructions of a compiled program, and where in the user's code they come from."""

import dataclasses
import re
from typing import Any

from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    CALLED,
    CONDITION,
    INDEX,
    TARGET,
    entry_of,
    operands_of,
    operation_of,
)

_SCALAR = re.compile(r"[a-z]\w*\[\]")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_PARAMETER = re.compile(r"\bparameter\((\d+)\)")
_TABLE = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")
_FIELD = re.compile(r"(\w+)=(\d+)")


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
    stack = _OP_NAME.search(line) if "op_name=" in line else None
    frame = _FRAME_ID.search(line) if "stack_frame_id=" in line else None
    called: list[str] = []
    if "=%" in line or "={%" in line:
        called = [*CALLED.findall(line), *CONDITION.findall(line)]
        for match in _BRANCHES.finditer(line):  # in the order of the operands that they get
            called += [one.strip().lstrip("%") for one in (match[1] or match[2]).split(",")]
    form = {"parameter": _PARAMETER, "get-tuple-element": INDEX}.get(opcode)
    number = form.search(line) if form else None
    target = TARGET.search(line) if opcode == "custom-call" else None
    return Instruction(
        name,
        computation,
        opcode,
        () if opcode in ("parameter", "constant") else tuple(operands_of(line)),
        tuple(called),
        int(number[1]) if number else -1,
        target[1] if target else "",
        _ESCAPED.sub(r"\1", stack[1]) if stack else "",
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
