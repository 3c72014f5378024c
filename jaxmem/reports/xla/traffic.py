"""The bytes that the kernels of a compiled program read and write in memory.

An iteration of a loop reads one slice of a stack and writes one: what a kernel slices counts as
long as the slice, and what it updates in place as long as the update.
"""

from collections.abc import Mapping

from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    CALLED,
    Lines,
    operands_of,
    operation_of,
    result_bytes,
)
from jaxmem.reports.xla.run import sum_over_execution

_FREE = frozenset(
    "after-all bitcast constant get-tuple-element iota opt-barrier parameter tuple".split()
)
_SLICES = frozenset(["dynamic-slice", "gather", "slice"])
_VIEWS = frozenset(["bitcast", "reshape"])


def count_bytes(hlo: str, taken: bool) -> int:
    """Bytes that the kernels of one run read and write; a loop counts as in `count_work`. What runs
    or not by a value of its own, the second of two branches or a loop of an unknown number of
    turns, runs if ``taken`` (the loop once)."""
    computations = computations_of(hlo)

    def own(line: str, lines: Lines) -> int:
        return traffic(line, lines, computations)

    return sum_over_execution(
        hlo, own, 0, lambda sums: sums[int(taken)], unknown=lambda turn: turn * int(taken)
    )


def traffic(line: str, computation: Lines, computations: Mapping[str, Lines]) -> int:
    """Bytes that one instruction moves; of what calls other computations, only a fusion's.

    Args:
        line: its right-hand side.
        computation: those of the computation that it is in, by name.
        computations: all of them.
    """
    operation = operation_of(line)
    if operation in _FREE or operation.endswith("-done"):
        return 0
    operands = [computation[name] for name in operands_of(line) if name in computation]
    sizes = [result_bytes(operand) for operand in operands]
    if operation == "fusion":
        body = computations[CALLED.findall(line)[0]]
        return sum(_read(body, sizes)) + _written(body, line)
    if operation.endswith("-start"):  # its result has its operands in it
        return 2 * sum(sizes)
    if operation in _SLICES:
        return 2 * result_bytes(line)
    if operation == "dynamic-update-slice":
        return 2 * sizes[1]
    return result_bytes(line) + sum(sizes)


def _read(body: Lines, sizes: list[int]) -> list[int]:
    """Bytes that a fusion reads of each of its operands."""
    readers: dict[str, list[tuple[str, int]]] = {}
    for name, line in body.items():
        for place, operand in enumerate(operands_of(line)):
            readers.setdefault(operand, []).append((name, place))

    def part(value: str, whole: int) -> int:
        read = 0
        for name, place in readers.get(value, []):
            operation = operation_of(body[name])
            if operation in _VIEWS:
                read += part(name, whole)
            elif operation in _SLICES and place == 0:
                read += result_bytes(body[name])
            elif not (operation == "dynamic-update-slice" and place == 0):
                return whole
        return min(read, whole)

    found = list(sizes)
    for name, line in body.items():
        if operation_of(line) == "parameter":
            number = int(line.rpartition("parameter(")[2].partition(")")[0])
            if number < len(found):
                found[number] = part(name, found[number])
    return found


def _written(body: Lines, line: str) -> int:
    """Bytes that a fusion writes."""

    def of(name: str) -> int:
        made = body[name]
        operation, operands = operation_of(made), operands_of(made)
        if operation == "tuple":
            return sum(map(of, operands))
        if operation in _VIEWS and operands[0] in body:
            return of(operands[0])
        if operation == "dynamic-update-slice":
            return result_bytes(body[operands[1]])
        return result_bytes(made)

    return min(of(list(body)[-1]), result_bytes(line))  # a computation ends with its root
