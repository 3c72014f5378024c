"""The arrays of zeros that loops fill.

What a loop stacks, what it carries from zero on, and what its derivative adds up over turns begin
as zeros. By `LoopRules.shares_zeros` XLA merges those of a shape, of all loops, and gives each loop
a copy. In a step as it is, it writes all copies with the zeros ("copy_fusion"): what later loops
fill is there when the first one begins. In steps with plans, which are compiled without that, the
zeros stay until the last loop begins (tests/test_loop_zeros.py).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxmem.program.readers import LOOPS

Zeros = tuple[tuple[str, int], ...]  # types and bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LoopZeros:
    """The arrays of zeros that a kernel fills in the forward pass, and in the backward pass."""

    forward: Zeros = ()
    backward: Zeros = ()


def zeros_of_loops(program: Any) -> dict[int, LoopZeros]:
    """Those of each kernel that is a loop, or is opaque and has loops inside."""
    if not program.rules.loops.shares_zeros:
        return {}
    made_of_nothing = _made_of_nothing(program)
    found = {}
    for number, kernel in enumerate(program.kernels):
        if kernel.sent_bytes:  # for a loop
            continue
        operation = program.operations[kernel.operations[-1]]
        if operation.joint:
            zeros = _of_joint(operation.joint)
        elif operation.name in LOOPS:
            zeros = _of_loop(program, kernel, operation, made_of_nothing)
        else:
            continue
        if zeros.forward or zeros.backward:
            found[number] = zeros
    return found


def _of_loop(program: Any, kernel: Any, operation: Any, made_of_nothing: set[int]) -> LoopZeros:
    forward = [*_filled(program, operation, made_of_nothing)]
    stacks = operation.stacks
    residuals = 0 if kernel.residuals is None else program.sizes[kernel.residuals]
    if residuals == sum(size for _, size in stacks.kept):
        forward += stacks.kept  # else a plan keeps something else
    summed = [value for value in stacks.summed if program.active[value]]
    return LoopZeros(tuple(forward), tuple(_typed(program, value) for value in summed))


def _of_joint(joint: Any) -> LoopZeros:
    program = joint.program
    made_of_nothing = _made_of_nothing(program)
    passes: tuple[list, list] = [], []
    for number, operation in enumerate(program.operations):
        if operation.name in LOOPS:
            passes[number >= joint.boundary].extend(_filled(program, operation, made_of_nothing))
    return LoopZeros(*map(tuple, passes))


def _filled(program: Any, operation: Any, made_of_nothing: set[int]) -> Iterator[tuple[str, int]]:
    """What a loop stacks, and what it carries from an array on that is made of nothing."""
    for value in operation.outputs[len(operation.carry) :]:
        if value != operation.residuals and operation.name == "scan":
            yield _typed(program, value)
    body = operation.body
    carried = {body.types[value] for value in operation.carry} if body else set()
    for value in operation.inputs:
        if value in made_of_nothing and program.types[value] in carried:
            yield _typed(program, value)


def _made_of_nothing(program: Any) -> set[int]:
    return {
        value
        for operation in program.operations
        if not operation.inputs
        for value in operation.outputs
    }


def _typed(program: Any, value: int) -> tuple[str, int]:
    return program.types[value], program.sizes[value]
