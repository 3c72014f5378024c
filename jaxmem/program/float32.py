"""Where bfloat16 is float32: on a device that has no units for it, or for matmuls alone."""

import dataclasses
from collections.abc import Set
from typing import Any

from jaxmem.program.costs import CONTRACTIONS
from jaxmem.program.in_memory import InMemory
from jaxmem.program.readers import is_matmul, read_by_contractions, readers_of


def computed_in_float32(program: Any) -> Any:
    """A program whose matmuls and convolutions of bfloat16 are computed from copies."""
    operations = []
    for operation in program.operations:
        if operation.name in CONTRACTIONS:
            kinds = [program.types[value] for value in operation.inputs]
            wide = any(kind.startswith("bfloat16") for kind in kinds)
            operation = dataclasses.replace(operation, widened=wide and len(kinds) == 2)
        elif operation.residuals is not None and operation.body and not operation.is_region:
            operation = dataclasses.replace(operation, body=operation.body.widened)
        operations.append(operation)
    return dataclasses.replace(program, operations=tuple(operations))


def kept_in_float32(program: Any) -> set[int]:
    """The values that are in memory because they are expensive to compute again, as they are before
    they are rounded: those that no matmul reads, and none makes with its result."""
    memory, readers, read = InMemory(program), readers_of(program), read_by_contractions(program)

    def is_made_by_matmul(value: int) -> bool:
        while readers[value] < 2 or value in memory.expensive:
            operation = program.operations[memory.maker[value]]
            if is_matmul(operation):
                return True
            if not operation.fused or len(operation.inputs) != 1 or operation.inputs[0] < given:
                return False
            (value,) = operation.inputs
        return False

    given = program.input_count
    return {v for v in memory.expensive if not read[v] and not is_made_by_matmul(v)}


def in_float32(program: Any, values: Set[int]) -> Any:
    """A program that keeps some values in float32 which were bfloat16."""
    narrow = {value for value in values if program.types[value].startswith("bfloat16")}

    def sizes(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size * (1 + (value in narrow)) for value, size in enumerate(found))

    def types(found: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            kind.replace("bfloat16", "float32") if value in narrow else kind
            for value, kind in enumerate(found)
        )

    return dataclasses.replace(
        program,
        sizes=sizes(program.sizes),
        types=types(program.types),
        whole_sizes=sizes(program.whole_sizes),
        whole_types=types(program.whole_types),
    )
