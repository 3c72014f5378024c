"""Bytes that an operation takes while it runs, beside what it reads and makes."""

import math
from collections.abc import Container
from typing import Any

from jaxmem.program.readers import dtype_of, is_matmul, shape_of


def sorted_rows(program: Any, operation: Any, rules: Any) -> dict[int, tuple[int, int]]:
    """The results of a ``top_k`` that sorts whole rows, what they hold and where it was, and the
    bytes of all of these rows, on one device and on all together."""
    if operation.name != "top_k":
        return {}
    (operand,) = operation.inputs
    taken, length = (shape_of(program, one)[-1] for one in (operation.outputs[0], operand))
    most, least = rules.takes_of_rows
    if taken <= most and length >= least:
        return {}
    sizes, whole = program.sizes, program.whole_sizes or program.sizes
    places = 4 * math.prod(shape_of(program, operand))
    share = sizes[operand] / max(whole[operand], 1)
    rows = (sizes[operand], whole[operand]), (round(places * share), places)
    return dict(zip(operation.outputs, rows, strict=True))


def sorted_apart(program: Any, operation: Any, read: Container[int]) -> int:
    """Bytes of rows that a ``top_k`` sorts and that are no values: of what is not ``read``, and of
    what its results are cut out of."""
    rows = sorted_rows(program, operation, program.rules)
    return sum(
        max(size - (program.sizes[value] if value in read else 0), 0)
        for value, (size, _) in rows.items()
    )


def for_library(program: Any, operation: Any) -> int:
    """Bytes in which a library multiplies matrices."""
    dtypes, size = program.rules.library
    return size * (is_matmul(operation) and dtype_of(program, operation.outputs[0]) in dtypes)


def float32_copy(program: Any, value: int) -> int:
    """Bytes of a value in float32, where it is a copy."""
    return 2 * program.sizes[value] * program.types[value].startswith("bfloat16")
