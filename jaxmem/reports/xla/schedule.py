"""Transfers and collectives of a compiled program, read in its scheduled HLO."""

import collections
import dataclasses
import functools

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.xla.hlo import (
    CALLED,
    TRIPS,
    branches_of,
    computations_of,
    entry_of,
    operands_of,
    operation_of,
    result_bytes,
)

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
    computations = computations_of(hlo)

    @functools.cache
    def total(name: str) -> collections.Counter[tuple[str, str]]:
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in computations[name].values():
            operation = operation_of(line)
            kind = operation.removesuffix("-start")
            if kind in COLLECTIVES:
                found[kind, "count"] += 1
                found[kind, "bytes"] += collective_bytes(line, computations[name])
            elif operation == "conditional":
                dearest = max(map(total, branches_of(line)), key=_all_bytes)
                found += dearest
            elif operation in ("while", "call", "async-start"):
                trips = TRIPS.search(line)
                times = int(trips[1]) if operation == "while" and trips else 1
                for called in CALLED.findall(line):
                    for key, value in total(called).items():
                        found[key] += times * value
        return found

    found = total(entry_of(hlo))
    kinds = [kind for kind in COLLECTIVES if found[kind, "count"]]
    return Collectives(
        {kind: found[kind, "count"] for kind in kinds},
        {kind: found[kind, "bytes"] for kind in kinds},
    )


def _all_bytes(found: collections.Counter[tuple[str, str]]) -> int:
    return sum(size for (_, what), size in found.items() if what == "bytes")


def collective_bytes(line: str, computation: dict[str, str]) -> int:
    """The bytes of all arrays of a collective: XLA combines several into one."""
    operands = sum(result_bytes(computation[name]) for name in operands_of(line))
    operation = operation_of(line)
    if not operation.startswith("all-gather"):
        return operands
    # An asynchronous one has its operands in its result too.
    return result_bytes(line) - (operands if operation.endswith("-start") else 0)
