"""A program as a family of targets runs it."""

import dataclasses
import math
import re
from collections.abc import Callable

from jaxmem.program.float32 import in_float32, kept_in_float32
from jaxmem.program.opaque import ForwardBackwardBytes, JointProgram
from jaxmem.program.operations import Operation, Program
from jaxmem.program.readers import gathers_repeatedly
from jaxmem.program.undifferentiated import turn_bytes
from jaxmem.program.workspaces import sorted_rows
from jaxmem.targets import Rules

_TYPE = re.compile(r"[^\[\]<>]+\[([\d, ]*)\]")
# Within what is opaque any chain is computed again where it is read. Measured: the steps of an
# associative scan (`jax.lax.cumlogsumexp`) are within 4 % of compiled so, and up to 31 % above it
# where dear ones are counted as written (tests/test_opaque.py).
_ANY_CYCLES = Rules().cycles
# What makes an array of other dimensions, or in another order: it may be laid out anew.
_CHANGES_LAYOUT = frozenset("broadcast_in_dim dot_general gather reshape transpose".split())


def apply_compiler_rules(program: Program, rules: Rules) -> Program:
    """The program with the bytes of values, and the kernels, that a compiler makes of it."""
    if rules not in program.cache:
        program.cache[rules] = _apply_compiler_rules(program, rules)
    return program.cache[rules]


def _apply_compiler_rules(program: Program, rules: Rules) -> Program:
    program = program.widened if rules.widens_bfloat16 else program
    multiplies = rules.multiplies_vectors and _any(
        program, lambda operation: operation.contraction.vectors
    )
    like_default = (
        dataclasses.replace(rules, computes_bfloat16="all", multiplies_vectors=False) == Rules()
    )
    takes = _any(program, lambda operation: operation.name == "top_k")
    if like_default and not multiplies and not takes:
        return program
    others = _sorted_results(program, rules)
    operations = []
    for operation in program.operations:
        if multiplies and operation.contraction.vectors:
            operation = dataclasses.replace(operation, flops=0, fused=True, widened=False)
        if rules.fuses_gathers and gathers_repeatedly(program, operation):
            operation = dataclasses.replace(operation, fused=True)
        if operation.name == "ragged_dot_general" and not rules.copies_groups:
            operation = dataclasses.replace(operation, derivative_workspace=0, workspace=0)
            if operation.residuals is not None:
                others[operation.residuals] = 0, 0
        elif operation.joint:
            operation, taken = _opaque(operation, operation.joint, rules)
            # Residuals that are an earlier one's too are counted there (`jaxmem.program.ragged`).
            if operation.residuals is not None and program.sizes[operation.residuals]:
                others[operation.residuals] = taken.kept, taken.kept_of_all
        body = operation.body and apply_compiler_rules(operation.body, rules)
        if operation.name == "scan" and body and body.differentiated == frozenset():
            operation = dataclasses.replace(operation, workspace=turn_bytes(body, operation.carry))
        operations.append(dataclasses.replace(operation, body=body))
    found = dataclasses.replace(program, operations=tuple(operations), rules=rules)
    if rules.keeps_float32 and any(kind.startswith("bfloat16") for kind in program.types):
        found = in_float32(found, kept_in_float32(found))
    if rules.tile is None and not others:
        return found
    never_minor = _never_minor_axes(program)

    def sizes(types, bare, of_all: bool) -> tuple[int, ...]:
        return tuple(
            others[value][of_all]
            if value in others
            else _bytes(kind, size, never_minor[value], rules)
            for value, (kind, size) in enumerate(zip(types, bare, strict=True))
        )

    return dataclasses.replace(
        found,
        sizes=sizes(found.types, found.sizes, False),
        whole_sizes=sizes(found.whole_types, found.whole_sizes, True),
    )


def _sorted_results(program: Program, rules: Rules) -> dict[int, tuple[int, int]]:
    """Results of which more is in memory than the program has, and the bytes of that on one device
    and on all: of a ``top_k`` whole rows that are sorted, since what reads it computes which part
    it reads. What the program returns is cut out."""
    whole_types = program.whole_types or program.types

    def laid_out(rows: int, sizes: tuple[int, int]) -> tuple[int, int]:
        kinds = program.types[rows], whole_types[rows]
        one, of_all = (_bytes(*pair, frozenset(), rules) for pair in zip(kinds, sizes, strict=True))
        return one, of_all

    return {
        value: laid_out(operation.inputs[0], sizes)
        for operation in program.operations
        for value, sizes in sorted_rows(program, operation, rules).items()
        if value not in program.outputs
    }


def _opaque(
    operation: Operation, joint: JointProgram, rules: Rules
) -> tuple[Operation, ForwardBackwardBytes]:
    """What is opaque as it is compiled with its derivative."""
    rules = dataclasses.replace(rules, cycles=_ANY_CYCLES)
    joint = dataclasses.replace(joint, program=apply_compiler_rules(joint.program, rules))
    found = joint.bytes
    operation = dataclasses.replace(
        operation,
        derivative_workspace=found.backward,
        workspace=found.forward,
        reads=found.reads,
        joint=joint,
    )
    return operation, found


def _any(program: Program, suits: Callable[[Operation], bool]) -> bool:
    """Whether any operation suits, in loops and calls too."""
    return any(
        suits(operation) or (operation.body is not None and _any(operation.body, suits))
        for operation in program.operations
    )


def _bytes(kind: str, size: int, never_minor: frozenset[int], rules: Rules) -> int:
    match = _TYPE.fullmatch(kind)
    if match is None or not size:
        return size  # residuals, of several arrays
    shape = [int(length) for length in match[1].split(",") if length.strip()]
    return rules.bytes_of(shape, size // math.prod(shape), never_minor)


def _never_minor_axes(program: Program) -> list[frozenset[int]]:
    """For each value its axes that are never innermost: those that a convolution slides along,
    of its result, and of what is made of that without moving axes."""
    never_minor: list[frozenset[int]] = [frozenset()] * len(program.sizes)
    for operation in program.operations:
        found = operation.contraction.slides
        if not found and operation.name not in _CHANGES_LAYOUT:
            found = max(
                (never_minor[value] for value in operation.inputs), key=len, default=frozenset()
            )
        for value in operation.outputs:
            never_minor[value] = found
    return never_minor
