"""Arrays whose rows are normalised: a softmax, or what is less its mean.

XLA computes ``x - broadcast(reduce(x))`` and the like in one kernel with the reduction in
it, a block of rows at a time. Other threads read the row than write it, so the cotangent of ``x``
is not written over ``x``; and what takes single elements of the result has it in memory, since it
would reduce a row for each. So it is by `Rules.blocks_of_rows`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.program.readers import readers_of, shape_of

# What may stand between the reduction and the array, as XLA matches it: a selection, such as
# `jax.nn.logsumexp` has there, may not.
_ROW_OPERATIONS = frozenset(
    """
    abs add broadcast_in_dim convert_element_type copy div exp integer_pow log max min mul neg
    reshape rsqrt sqrt square squeeze stop_gradient sub
    """.split()
)
# Elements of a row: longer ones XLA sums up in parts. Measured, from one more on: losses of 16,384
# and of 16,385 classes, in float32 and bfloat16 (tests/test_row_norms.py has those of 16,384).
_MAX_ROW = 16384
_BINARY = frozenset("add div max min mul sub".split())


class RowNormalization(NamedTuple):
    """What a kernel with a reduction in it returns, the row that was taken for it, and the values
    in memory whose rows those are."""

    array: int
    row: int
    sources: frozenset[int]


@dataclasses.dataclass(frozen=True)
class RowNormalizations:
    """``sources``: for each reduction, by the number of its operation, the values in memory whose
    rows it is of and that are normalised by it. ``normalized``: for each value that is made so, or
    out of what is, what it is made of. ``stored``: which values are in memory: of an array that is
    the derivative is made of that, and in no kernel with sums of rows."""

    stored: Sequence[bool]
    sources: Mapping[int, frozenset[int]]
    normalized: Mapping[int, RowNormalization]

    def sources_of(self, values: Iterable[int]) -> frozenset[tuple[int, int]]:
        """The values in memory whose rows are normalised for any of some values, each with the row
        that is taken for it."""
        norms = [self.normalized[value] for value in values if value in self.normalized]
        blocks = [norm for norm in norms if not self.stored[norm.array]]
        return frozenset((source, norm.row) for norm in blocks for source in norm.sources)

    def sources_of_written(self, values: Iterable[int]) -> frozenset[int]:
        """The values in memory whose rows are read for any of some values that are in memory
        themselves, in a block at a time."""
        norms = [self.normalized[value] for value in values if value in self.normalized]
        written = (norm for norm in norms if norm.array in values and self.stored[norm.array])
        return frozenset().union(*(norm.sources for norm in written))

    def written_for(self, operation: Any, sizes: Sequence[int]) -> int:
        """Bytes of the array that is in memory because an operation takes elements of it, or
        reduces it further than to a row."""
        if operation.inputs[0] not in self.normalized:
            return 0
        array, row, _ = self.normalized[operation.inputs[0]]
        if self.stored[array]:
            return 0
        further = sum(sizes[value] for value in operation.outputs) < sizes[row]
        return sizes[array] if operation.name == "gather" or further else 0


def find_row_normalizations(
    program: Any,
    stored: Sequence[bool],
    reductions: frozenset[str],
) -> RowNormalizations:
    """Those of a program (`Program`), of which some values are in memory."""
    under: dict[int, frozenset[int]] = {}  # what an element is made of
    by: dict[int, frozenset[int]] = {}  # the reductions that it is of
    sources: dict[int, frozenset[int]] = {}
    reduced: dict[int, frozenset[int]] = {}
    made: dict[int, RowNormalization] = {}
    readers = readers_of(program)

    def of(value: int) -> frozenset[int]:
        return frozenset([value]) if stored[value] else under.get(value, frozenset())

    chosen = {
        value
        for operation in program.operations
        if operation.name in ("argmax", "argmin")
        for value in operation.inputs
    }

    def reductions_of(value: int) -> frozenset[int]:
        """The reductions that a row is of: what others read too is computed apart."""
        return by.get(value, frozenset()) if readers[value] == 1 else frozenset()

    for number, operation in enumerate(program.operations):
        inputs = operation.inputs
        elements = frozenset().union(*map(of, inputs))
        found: frozenset[int] = frozenset()
        own = None
        alone = chosen.isdisjoint(inputs)
        if operation.name in reductions and alone and is_of_rows(program, operation):
            found, reduced[number] = frozenset([number]), elements
        elif operation.name in _ROW_OPERATIONS and len(inputs) == 1:
            found = reductions_of(inputs[0])
        elif operation.name in _BINARY and len(inputs) == 2:
            for array, row in (inputs, inputs[::-1]):
                for reduction in reductions_of(row):
                    both = of(array) & reduced[reduction]
                    taken, result = program.operations[reduction].outputs[0], operation.outputs[0]
                    if both and program.sizes[result] > program.sizes[taken]:
                        sources[reduction] = sources.get(reduction, frozenset()) | both
                        own = RowNormalization(result, taken, both)
        before = [made[value] for value in inputs if value in made] if operation.fused else []
        norm = before[0] if before else own
        for value in operation.outputs:
            under[value], by[value] = elements, found
            if norm is not None:
                made[value] = norm
    return RowNormalizations(stored, sources, made)


def is_of_rows(program: Any, operation: Any) -> bool:
    """Whether a reduction is along the last axis alone, and of rows that are no longer than XLA
    sums up at once: of others it makes kernels apart."""
    if not program.types:
        return True
    if not operation.inputs:  # of a number of the program's
        return False
    shape, left = (shape_of(program, values[0]) for values in (operation.inputs, operation.outputs))
    return bool(shape) and left == shape[:-1] and shape[-1] <= _MAX_ROW
