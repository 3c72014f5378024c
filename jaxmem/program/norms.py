"""What is normalised: several kernels read it, of which one reduces it.

Each of them would compute it, so it is sooner in memory than what two read: the forward pass and
the derivative.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmem.program.readers import views_of
from jaxmem.program.row_norms import is_of_rows


@dataclasses.dataclass(frozen=True)
class Norms:
    """By value.

    Attributes:
        normalised: whether several operations read it, and it, or its square and the like, is
            reduced.
        by_rows: whether, besides, all that it is reduced to are rows.
        summed_by_rows: whether it is itself summed up by rows, as a layer norm does.
    """

    normalised: list[bool]
    by_rows: list[bool]
    summed_by_rows: list[bool]


def find_norms(program: Any, reduces: Callable[[Any], bool]) -> Norms:
    """Those of a program (`Program`); ``reduces`` says of an operation whether it makes little of
    much."""
    count = len(program.sizes)
    reduced, read, readers = [False] * count, [False] * count, [0] * count
    otherwise, summed = [False] * count, [False] * count  # reduced not by rows; summed up by rows
    for operation in reversed(program.operations):
        made, operands = operation.outputs, set(operation.inputs)
        is_alone = len(operands) == 1 and operation.fused
        is_reduction = reduces(operation)
        of_rows = is_reduction and is_of_rows(program, operation)
        of_reduced = is_alone and all(reduced[value] and not read[value] for value in made)
        for value in operands:
            readers[value] += 1
            if is_reduction:
                otherwise[value] |= not of_rows
                summed[value] |= of_rows and operation.name == "reduce_sum"
            elif of_reduced:
                otherwise[value] |= any(otherwise[one] for one in made)
            (reduced if is_reduction or of_reduced else read)[value] = True
    found = [a and b > 1 for a, b in zip(reduced, readers, strict=True)]
    for shown, view in views_of(program):
        found[shown] |= found[view]
        otherwise[shown] |= otherwise[view]
    by_rows = [a and not b for a, b in zip(found, otherwise, strict=True)]
    return Norms(found, by_rows, summed)
