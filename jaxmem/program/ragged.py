"""Matmuls of rows in groups, as experts have them (`jax.lax.ragged_dot`).

Where XLA has no kernel for one, it is a matmul of as many copies of the rows as there are groups,
each with the rows of one. In the backward pass of a loop all copies that its derivatives read, of
rows and of cotangents, are written by one kernel, since they are made with the same mask: they are
there together. Elsewhere the forward pass leaves those of rows, one for all that multiply them, and
the copies of cotangents of matmuls of the same rows are there together, if there are several one of
them twice, for either gradient. (Measured for gated and plain experts in float32 and bfloat16:
tests/test_ragged.py.)
"""

from collections.abc import Sequence
from typing import Any

from jaxmem.program.readers import shape_of


def groups_of(operation: Any) -> int | None:
    """The value that has the lengths of an operation's groups of rows."""
    return operation.inputs[-1] if operation.name == "ragged_dot_general" else None


def copies_of_groups(program: Any) -> dict[int, int]:
    """The bytes of those copies, by the operation."""
    if not program.rules.copies_groups:
        return {}
    together: dict[tuple[int, ...], list[int]] = {}
    for number, operation in enumerate(program.operations):
        if operation.name == "ragged_dot_general" and len(operation.inputs) == 3:
            rows, _, mask = operation.inputs
            key = (mask,) if program.in_loop else (mask, rows)
            together.setdefault(key, []).append(number)
    return {number: _alive(program, numbers) for numbers in together.values() for number in numbers}


def _alive(program: Any, numbers: list[int]) -> int:
    """The bytes of copies that are there together, of some of those operations."""
    copies = _copies(program, numbers)
    if program.in_loop:
        return sum(copies.values())
    own = [size for (is_cotangent, _), size in copies.items() if is_cotangent]
    return sum(own) + max(own, default=0) * (len(own) > 1)


def _copies(program: Any, numbers: list[int]) -> dict[tuple[bool, int], int]:
    """The bytes of each copy: of rows, however many read them, and of cotangents of results."""
    found = {}
    for number in numbers:
        rows, matrices, _ = program.operations[number].inputs
        groups, (result, *_) = shape_of(program, matrices), program.operations[number].outputs
        if len(groups) == 3:
            found[False, rows] = groups[0] * program.sizes[rows]
            found[True, result] = groups[0] * program.sizes[result]
    return found


def shared_copies(operations: Sequence[Any]) -> list[int]:
    """The residuals of such matmuls that are copies of rows which an earlier one has kept."""
    kept: set[tuple[int, int]] = set()
    found = []
    for operation in operations:
        if operation.name == "ragged_dot_general" and operation.residuals is not None:
            key = operation.inputs[0], operation.inputs[-1]
            found += [operation.residuals] * (key in kept)
            kept.add(key)
    return found
