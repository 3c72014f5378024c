"""The lengths of a matmul, which decide how a compiler runs it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """``batch`` matmuls of so many rows and columns, each element a sum of ``depth`` products.
    ``itemsize`` are the bytes of an element of operands and result, and ``summed`` those of one
    while it is summed up."""

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
