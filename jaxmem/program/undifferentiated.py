"""What a program takes that nothing is differentiated in."""

import dataclasses
from collections.abc import Sequence

from jaxmem.program.opaque import peak
from jaxmem.program.operations import Program


def fused_further(program: Program) -> Program:
    """A program that nothing is differentiated in. XLA fuses its gathers, and what is put among
    zeros (the derivative of a slice)."""
    operations = program.operations
    filled = {
        value
        for one in operations
        if one.name == "broadcast_in_dim" and not any(map(program.sizes.__getitem__, one.inputs))
        for value in one.outputs
    }
    fused = {
        number
        for number, one in enumerate(operations)
        if one.name == "gather" or (one.name == "dynamic_update_slice" and one.inputs[0] in filled)
    }
    if all(operations[number].fused for number in fused):
        return program
    operations = tuple(
        dataclasses.replace(one, fused=one.fused or number in fused)
        for number, one in enumerate(operations)
    )
    return dataclasses.replace(program, operations=operations)


def bytes_taken(program: Program) -> int:
    """The most bytes that a program takes beside its operands and results."""
    program = _in_two_kernels(program)
    inputs = set(range(program.input_count))
    results = set(program.outputs) - inputs
    taken = peak(program, program.kernels, inputs, last=results)
    return taken - sum(program.sizes[value] for value in results)


def turn_bytes(body: Program, carried: Sequence[int]) -> int:
    """The most bytes that a turn of a loop takes beside what is ``carried`` of its inputs, which it
    may write over: what it hands on has the same memory in the end."""
    body, handed = _in_two_kernels(body), set(carried)
    outside = {*range(body.input_count), *body.outputs} - handed - body.handed_on
    most = peak(body, body.kernels, outside, handed, body.handed_on)
    return max(most - sum(body.sizes[value] for value in handed), 0)


def _in_two_kernels(program: Program) -> Program:
    """A sum of its rows and what is made with it are two kernels here: the derivative of a maximum
    is none of a norm (attention in a ring, whose backward pass makes its scores again)."""
    rules = dataclasses.replace(program.rules, blocks_of_rows=False)
    return dataclasses.replace(program, rules=rules)
