"""Bytes that an operation takes while it runs, beside what it reads and makes."""

import math
from typing import Any

from jaxmem.program.readers import dtype_of, is_matmul, shape_of


def sorted_rows(program: Any, operation: Any) -> int:
    """Bytes in which a ``top_k`` sorts all that it takes so many of, with where it was."""
    if operation.name != "top_k":
        return 0
    (operand,) = operation.inputs
    taken = shape_of(program, operation.outputs[0])[-1]
    if taken <= program.rules.takes_of_rows:
        return 0
    return program.sizes[operand] + 4 * math.prod(shape_of(program, operand))


def for_library(program: Any, operation: Any) -> int:
    """Bytes in which a library multiplies matrices."""
    dtypes, size = program.rules.library
    return size * (is_matmul(operation) and dtype_of(program, operation.outputs[0]) in dtypes)


def float32_copy(program: Any, value: int) -> int:
    """Bytes of a value in float32, where it is a copy."""
    return 2 * program.sizes[value] * program.types[value].startswith("bfloat16")
