"""Transfers and collectives of a compiled program, read in its scheduled HLO."""

import collections
import dataclasses
import functools
import math
import re

from jaxmem.memory import _hlo

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WORK = ("fusion", "custom-call", "dot", "convolution", "while")
_HOST = "S(5)"
_BITS = re.compile(r"[a-z]+(\d+)")


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
        from jaxmem._bytes import format_bytes

        kinds = (f"{n} {kind} ({format_bytes(self.bytes[kind])})" for kind, n in self.count.items())
        return ", ".join(kinds) or "none"


def find_transfers(hlo: str) -> Transfers:
    """The asynchronous copies to and from the host in the text of a scheduled program (each of a
    loop's once)."""
    count = overlapped = 0
    for lines in _hlo._computations(hlo).values():
        waiting: dict[str, bool] = {}
        for name, line in lines.items():
            operation = _hlo._operation(line)
            if operation.endswith("-start") and _HOST in line.partition(", metadata=")[0]:
                waiting[name] = False
            elif operation.endswith("-done"):
                started = next((operand for operand in _hlo._operands(line)), "")
                if started in waiting:
                    count += 1
                    overlapped += waiting.pop(started)
            elif operation in _WORK:
                waiting = dict.fromkeys(waiting, True)
    return Transfers(count, overlapped)


def count_collectives(hlo: str) -> Collectives:
    """The collectives of one run; those of a loop once per iteration where XLA knows how many."""
    computations = _hlo._computations(hlo)

    @functools.cache
    def total(name: str) -> collections.Counter:
        found: collections.Counter = collections.Counter()
        for line in computations[name].values():
            operation = _hlo._operation(line)
            kind = operation.removesuffix("-start")
            if kind in _COLLECTIVES:
                found[kind, "count"] += 1
                found[kind, "bytes"] += _moved(line, computations[name])
            elif operation in ("while", "call", "conditional", "async-start"):
                trips = _hlo._TRIPS.search(line)
                times = int(trips[1]) if operation == "while" and trips else 1
                for called in _hlo._CALLED.findall(line):
                    for key, value in total(called).items():
                        found[key] += times * value
        return found

    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.MULTILINE)
    found = total(entry[1]) if entry else collections.Counter()
    kinds = [kind for kind in _COLLECTIVES if found[kind, "count"]]
    return Collectives(
        {kind: found[kind, "count"] for kind in kinds},
        {kind: found[kind, "bytes"] for kind in kinds},
    )


def _moved(line: str, computation: dict[str, str]) -> int:
    shapes = [line.partition(_hlo._after_shape(line))[0]]
    shapes += [computation[name].partition(" ")[0] for name in _hlo._operands(line)[:1]]
    return max(
        (_bytes(*match) for text in shapes for match in _hlo._SHAPE.findall(text)), default=0
    )


def _bytes(dtype: str, dimensions: str) -> int:
    bits = _BITS.match(dtype)
    sizes = (int(size) for size in dimensions.split(",") if size)
    return math.prod(sizes) * (int(bits[1]) if bits else 8) // 8
