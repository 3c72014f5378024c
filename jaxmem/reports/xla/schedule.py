"""Transfers and collectives of a compiled program, read in its scheduled HLO."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    Lines,
    calls_of,
    operands_of,
    operation_of,
    result_bytes,
)
from jaxmem.reports.xla.run import sum_over_execution

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WORK = ("fusion", "custom-call", "dot", "convolution", "while")
HOST = "S(5)"


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Copies between host and device memory that a program starts.

    ``overlapped`` of them have other work between their start and their end.
    """

    count: int
    overlapped: int


@dataclasses.dataclass(frozen=True)
class Collectives:
    """How often one run calls each kind of collective, and the bytes that a device gets or gives.

    Of an all-gather and an all-reduce they are those of the result, of a reduce-scatter those of
    the operand. ``overlapped`` of each kind have other work between their start and their end.
    """

    count: dict[str, int]
    bytes: dict[str, int]
    overlapped: dict[str, int]

    def __str__(self):
        kinds = (
            f"{n} {kind} ({format_bytes(self.bytes[kind])}, {self.overlapped[kind]} overlapped)"
            for kind, n in self.count.items()
        )
        return ", ".join(kinds) or "none"


def find_transfers(hlo: str) -> Transfers:
    """The asynchronous copies to and from the host in the text of a scheduled program (each of a
    loop's once)."""
    found = [
        overlapped
        for lines in computations_of(hlo).values()
        for line, overlapped in _started(lines)
        if HOST in line.partition(", metadata=")[0]
    ]
    return Transfers(len(found), sum(found))


def count_collectives(hlo: str) -> Collectives:
    """The collectives of one run: those of a loop once per iteration where XLA knows how many, of a
    conditional those of the branch that moves the most bytes."""
    none = np.zeros((len(COLLECTIVES), 3), int)  # of each kind: number, bytes, number overlapped
    computations = computations_of(hlo)
    # XLA names each instruction of a program differently, so a line with its operands is of one.
    overlapping = {
        sent_by(line, lines, computations)[0]
        for lines in computations.values()
        for line, overlapped in _started(lines)
        if overlapped
    }

    def own(line: str, lines: Lines) -> np.ndarray:
        kind = collective_of(line)
        if not kind:
            return none
        one = np.arange(len(COLLECTIVES))[:, None] == COLLECTIVES.index(kind)
        return one * np.array([1, collective_bytes(line, lines), line in overlapping])

    found = sum_over_execution(
        hlo, own, none, lambda sums: max(sums, key=lambda one: one[:, 1].sum())
    )
    kinds = [(kind, row.tolist()) for kind, row in zip(COLLECTIVES, found, strict=True) if row[0]]
    return Collectives(*({kind: row[column] for kind, row in kinds} for column in range(3)))


def collective_of(line: str) -> str:
    """Which of `COLLECTIVES` an instruction is, or starts; empty: none."""
    kind = operation_of(line).removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


def sent_by(line: str, lines: Lines, computations: Mapping[str, Lines]) -> tuple[str, Lines]:
    """The copy or the collective that an instruction is, and the computation that it is in: what
    XLA has no instruction of its own for the start of, ``async-start`` calls a computation of."""
    calls = calls_of(line) if operation_of(line) == "async-start" else None
    if calls is None:
        return line, lines
    inside = computations[calls.computations[0]]
    return inside[list(inside)[-1]], inside  # a computation ends with its root


def _started(lines: Lines) -> list[tuple[str, bool]]:
    """Each instruction of a computation that starts what the device need not wait for, and whether
    other work runs before the one that waits."""
    found, waiting = [], dict[str, bool]()
    for name, line in lines.items():
        operation = operation_of(line)
        if operation.endswith("-start"):
            waiting[name] = False
        elif operation.endswith("-done"):
            started = next(iter(operands_of(line)), "")
            if started in waiting:
                found.append((lines[started], waiting.pop(started)))
        elif operation in _WORK:
            waiting = dict.fromkeys(waiting, True)
    return found


def collective_bytes(line: str, computation: Lines) -> int:
    """The bytes of all arrays of a collective: XLA combines several into one."""
    operands = sum(result_bytes(computation[name]) for name in operands_of(line))
    operation = operation_of(line)
    if not operation.startswith("all-gather"):
        return operands
    # An asynchronous one has its operands in its result too.
    return result_bytes(line) - (operands if operation.endswith("-start") else 0)
