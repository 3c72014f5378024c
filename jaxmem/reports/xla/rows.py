"""The rows that a compiled kernel takes from a table, and adds to one, here and there."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jaxmem.reports.xla.hlo import (
    CALLED,
    Lines,
    dimensions_of,
    numbers_of,
    operands_of,
    operation_of,
    result_bytes,
)

_LISTS = re.compile(r"(slice_sizes|update_window_dims)=\{([\d,]*)\}")
_ORDER = re.compile(r"\]\{([\d,]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class TableRows:
    """Bytes of a table, of the rows that are moved, and of each piece of one that is in one place
    in memory."""

    table: int
    moved: int
    piece: int


def rows_of(
    line: str, computation: Lines, computations: Mapping[str, Lines]
) -> Iterator[TableRows]:
    """Of the kernel of an instruction; what is added is read and written."""
    lines: tuple[str, ...] = (line,)
    if operation_of(line) == "fusion":
        computation = computations[CALLED.findall(line)[0]]
        lines = tuple(computation.values())
    for one in lines:
        operation = operation_of(one)
        if operation not in ("gather", "scatter"):
            continue
        operands = [computation.get(name, "") for name in operands_of(one)]
        found, sizes = dict(_LISTS.findall(one)), dimensions_of(operands[0])
        if operation == "gather":
            window, moved = numbers_of(found.get("slice_sizes", "")), result_bytes(one)
        else:
            updates = dimensions_of(operands[-1])
            # (XLA simplifies scatters first: a window has all axes of the table.)
            window = [updates[at] for at in numbers_of(found.get("update_window_dims", ""))]
            moved = 2 * result_bytes(operands[-1])
        whole = result_bytes(operands[0])
        elements = math.prod(sizes)
        if len(window) == len(sizes) and elements:
            piece = _together(window, sizes, operands[0])
            yield TableRows(whole, moved, round(whole / elements * piece))


def _together(window: list[int], sizes: list[int], line: str) -> int:
    """How many elements of a window follow each other in memory, and in all of an axis farther out:
    beside those of a column are the ones of other columns, which are read with them."""
    order = _ORDER.search(line)
    axes = numbers_of(order[1]) if order else range(len(sizes))[::-1]
    found, follows = 1, True
    for axis in axes:
        is_whole = window[axis] == sizes[axis]
        found *= window[axis] if follows or is_whole else 1
        follows &= is_whole
    return found
