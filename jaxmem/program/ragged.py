"""Matmuls of rows in groups, as experts have them (`jax.lax.ragged_dot`).

Where XLA has no kernel for one, it is a matmul of as many copies of the rows as there are groups,
each with the rows of one. In the backward pass of a loop all copies that its derivatives read, of
rows and of cotangents, are written by one kernel, since they are made with the same mask: they are
there together (measured for gated and plain experts in float32 and bfloat16 on an H100,
tests/test_ragged.py).
"""

from typing import Any

from jaxmem.program.readers import shape_of


def copies_in_loops(program: Any) -> dict[int, int]:
    """The bytes of those copies in the body of a loop, by the operation."""
    if not (program.in_loop and program.rules.copies_groups):
        return {}
    masks: dict[int, list[int]] = {}
    for number, operation in enumerate(program.operations):
        if operation.name == "ragged_dot_general" and len(operation.inputs) == 3:
            masks.setdefault(operation.inputs[2], []).append(number)
    return {
        number: sum(_copies(program, numbers).values())
        for numbers in masks.values()
        for number in numbers
    }


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
