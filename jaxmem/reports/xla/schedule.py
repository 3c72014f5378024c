"""Transfers and collectives of a compiled program, read in its scheduled HLO."""

import dataclasses

import numpy as np

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    Lines,
    operands_of,
    operation_of,
    result_bytes,
)
from jaxmem.reports.xla.run import over_run

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
    the operand.
    """

    count: dict[str, int]
    bytes: dict[str, int]

    def __str__(self):
        kinds = (f"{n} {kind} ({format_bytes(self.bytes[kind])})" for kind, n in self.count.items())
        return ", ".join(kinds) or "none"


def find_transfers(hlo: str) -> Transfers:
    """The asynchronous copies to and from the host in the text of a scheduled program (each of a
    loop's once)."""
    count = overlapped = 0
    for lines in computations_of(hlo).values():
        waiting: dict[str, bool] = {}
        for name, line in lines.items():
            operation = operation_of(line)
            if operation.endswith("-start") and HOST in line.partition(", metadata=")[0]:
                waiting[name] = False
            elif operation.endswith("-done"):
                started = next((operand for operand in operands_of(line)), "")
                if started in waiting:
                    count += 1
                    overlapped += waiting.pop(started)
            elif operation in _WORK:
                waiting = dict.fromkeys(waiting, True)
    return Transfers(count, overlapped)


def count_collectives(hlo: str) -> Collectives:
    """The collectives of one run: those of a loop once per iteration where XLA knows how many, of a
    conditional those of the branch that moves the most bytes."""
    none = np.zeros((len(COLLECTIVES), 2), int)  # of each kind how many, and their bytes

    def own(line: str, lines: Lines) -> np.ndarray:
        kind = operation_of(line).removesuffix("-start")
        if kind not in COLLECTIVES:
            return none
        one = np.arange(len(COLLECTIVES))[:, None] == COLLECTIVES.index(kind)
        return one * np.array([1, collective_bytes(line, lines)])

    found = over_run(hlo, own, none, lambda sums: max(sums, key=lambda one: one[:, 1].sum()))
    kinds = {kind: row.tolist() for kind, row in zip(COLLECTIVES, found, strict=True) if row[0]}
    return Collectives(
        {kind: count for kind, (count, _) in kinds.items()},
        {kind: moved for kind, (_, moved) in kinds.items()},
    )


def collective_bytes(line: str, computation: Lines) -> int:
    """The bytes of all arrays of a collective: XLA combines several into one."""
    operands = sum(result_bytes(computation[name]) for name in operands_of(line))
    operation = operation_of(line)
    if not operation.startswith("all-gather"):
        return operands
    # An asynchronous one has its operands in its result too.
    return result_bytes(line) - (operands if operation.endswith("-start") else 0)
