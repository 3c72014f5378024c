"""Matmuls whose sums are cut into parts (`Rules.parts`), and what these take in memory.

The sums of the parts are there until they are added up. Where the parts are not equally long,
operands are padded as they are written.
"""

import dataclasses
import math
from typing import Any

from jaxmem.program.readers import dtype_of, shape_of

_ALIGNED = 16  # bytes that a part is a multiple of: XLA pads to that, too
_SUMMED = {"float64": 8, "complex64": 8, "complex128": 16}


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """``batch`` matmuls of so many rows and columns, each element a sum of ``depth`` products, of
    elements of so many bytes, ``summed`` while they are summed up."""

    batch: int
    rows: int
    columns: int
    depth: int
    itemsize: int
    summed: int

    @property
    def of_left(self) -> "Matmul":
        """The one that gives the left operand its gradient."""
        return dataclasses.replace(self, columns=self.depth, depth=self.columns)

    @property
    def of_right(self) -> "Matmul":
        """The one that gives the right operand its gradient."""
        return dataclasses.replace(self, rows=self.depth, depth=self.rows)

    def parts(self, rules: Any) -> int:
        """Into how many its sums are cut."""
        return rules.parts(*dataclasses.astuple(self)) if rules.parts else 1

    def is_padded(self, rules: Any) -> bool:
        """Whether its parts would not be equally long."""
        parts = self.parts(rules)
        return parts > 1 and self.depth % (parts * max(_ALIGNED // self.itemsize, 1)) != 0

    def bytes_of_parts(self, rules: Any) -> int:
        """What its parts take beside operands and result."""
        parts = self.parts(rules)
        return parts * self.batch * self.rows * self.columns * self.summed * (parts > 1)


def matmul_of(program: Any, operation: Any) -> Matmul | None:
    """The matmul that an operation is; None: it is none, or nothing is known of it."""
    if operation.name != "dot_general" or operation.fused or not program.types:
        return None
    left, right, result = (
        math.prod(shape_of(program, value))
        for value in (operation.inputs[0], operation.inputs[-1], operation.outputs[0])
    )
    if not left * right * result:
        return None
    dtype = dtype_of(program, operation.outputs[0])
    products = 8 if dtype.startswith("complex") else 2
    depth = max(operation.flops // (products * result), 1)
    batch = max(round(left * right / (result * depth**2)), 1)
    itemsize = program.sizes[operation.outputs[0]] // result
    return Matmul(
        batch,
        max(round(left / (batch * depth)), 1),
        max(round(right / (batch * depth)), 1),
        depth,
        itemsize,
        _SUMMED.get(dtype, 4),
    )


def bytes_of_parts(program: Any, operation: Any) -> tuple[int, dict[int, int]]:
    """Bytes of the parts of an operation, and of those of the gradients of its operands."""
    one, rules = matmul_of(program, operation), program.rules
    if one is None or rules.parts is None:
        return 0, {}
    gradients = {
        value: gradient.bytes_of_parts(rules)
        for value, gradient in zip(operation.inputs, (one.of_left, one.of_right), strict=False)
        if program.active[value]
    }
    return one.bytes_of_parts(rules), gradients
