"""Where bfloat16 is float32: on a device that has no units for it."""

import dataclasses
from collections.abc import Set
from typing import Any

from jaxmem.program.costs import CONTRACTIONS


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
