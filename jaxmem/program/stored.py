"""Which values of a program are in memory."""

import functools
from collections.abc import Mapping

from jaxmem.program.convolutions import reads_copy
from jaxmem.program.costs import CONTRACTIONS
from jaxmem.program.poolings import pooled_as_computed
from jaxmem.program.readers import (
    SMALL,
    SUMS,
    concatenations,
    is_matmul,
    is_view,
    readers_of,
    scatters_few_elements,
    views_of,
)
from jaxmem.program.repeats import Repeats
from jaxmem.program.row_norms import RowNormalization, find_row_normalizations
from jaxmem.program.uses import Uses
from jaxmem.program.written_gathers import written_gathers

# A fused value that several kernels read is computed in each of them, unless that takes more than
# this: then it is written once. Chosen; half and twice: benchmarks/planner/sensitivity.py.
_LARGE_SOURCES = 3  # arrays as large as it
_SOURCES = 64  # arrays of any size, below what XLA's fusions take at most
_CHAIN = 64  # operations: no code is so long that one kernel runs all of it again

NAMED = "named"  # a name that a policy may save: what it marks is not made again for it
# These work in the memory of their results, where constants that they start from are made.
_IN_PLACE = ("scatter", "sort")
REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split()
)


def stored_values(
    program, in_matmuls: list[int], pieces: frozenset[int]
) -> tuple[list[bool], frozenset[int]]:
    """For each value whether it is in memory: inputs, outputs, what an expensive operation reads or
    makes, reductions, and what would take too much to compute in each of its readers. And the
    values that are there for no other reason than that they are expensive to compute again.
    ``in_matmuls`` has for each value what matmuls read for it, ``pieces`` are read by them."""
    sizes, count, rules = program.sizes, len(program.sizes), program.rules
    readers = [0] * count
    wanted = [False] * count
    constant = [False] * count
    reduces = functools.partial(reduces_to_few, sizes=sizes)
    pooled = pooled_as_computed(program)
    picked = _picked_rows(program)
    for operation in program.operations:
        for value in operation.outputs:
            constant[value] = all(constant[read] for read in operation.inputs)
        in_place = operation.name.startswith(_IN_PLACE)
        for value in set(operation.inputs):
            readers[value] += 1
            read = in_matmuls[value] if is_matmul(operation) else value
            norm = picked.get(value) if operation.name == "gather" else None
            if norm and sizes[operation.outputs[0]] <= sizes[norm.row]:
                wanted[norm.array] = True
                continue
            wanted[read] |= not (
                operation.fused
                or reads_copy(program, operation, value)
                or not pooled.isdisjoint(operation.outputs)
                or scatters_few_elements(operation, sizes)
                or (in_place and constant[value])
                or (in_place and operation.name != "sort" and value != operation.inputs[0])
                or (rules.fuses_operands and operation.name in CONTRACTIONS)
            )
        if operation.name == NAMED:
            wanted[operation.outputs[0]] = True
    written = concatenations(program) if rules.writes_concatenations else ()
    for value in (*program.outputs, *program.handed_on, *written, *pieces):
        wanted[value] = True
    # A view is where what it shows is.
    for shown, view in views_of(program):
        wanted[shown] |= wanted[view]
        readers[shown] += readers[view] - 1
    stored = [value < program.input_count for value in range(count)]
    under: list[frozenset[int]] = [frozenset()] * count
    for_each: list[frozenset[int]] = [frozenset()] * count  # what one element of it is made of
    length = [0] * count
    uses = Uses(program, reduces, in_matmuls, wanted)
    repeats = Repeats(uses)
    # What a program is given is read along the way; an operation's own is given values of another.
    given = 0 if program.differentiated == frozenset() else program.input_count
    expensive: set[int] = set()

    def are_more(name: str, value: int, sources: list[int]) -> bool:
        """Whether several sources are read for a value that an operation makes, as much as it or
        more: what is made of arrays that are broadcast for it (a state of Mamba's, 16 times as
        large) is not. And whether a sum is read by more than two kernels: two read its summands as
        fast as it is written and read. So do the norm of its rows, in blocks, and its
        derivative."""
        several = len(sources) > 1 and sum(sources) >= sizes[value]
        if name in SUMS:
            return several and uses.kernel_counts[value] > 2
        return several and not (rules.blocks_of_rows and uses.norms.by_rows[value])

    gathers = written_gathers(program, reduces)
    for operation in program.operations:
        inputs = operation.inputs
        for value in repeats.materialized(operation, stored):
            if not stored[value]:
                expensive.add(value)
            stored[value] = True
        sources = frozenset().union(*({v} if stored[v] else under[v] for v in inputs))
        parts = [frozenset([v]) if stored[v] else for_each[v] for v in inputs]
        if operation.name == "concatenate":
            element = max(parts, key=len, default=frozenset())
        else:
            element = frozenset().union(*parts)
        chain = 1 + sum(length[value] for value in inputs if not stored[value])
        for value in operation.outputs:
            large = [
                sizes[source]
                for source in element
                if source >= given and sizes[source] * SMALL >= sizes[value]
            ]
            if is_view(operation):
                write = value in program.outputs
            elif not operation.fused or wanted[value]:
                write = True
            else:
                shared = readers[value] > 1
                write = readers[value] > 0 and (
                    (reduces_to_few(operation, sizes) and bool(sources))
                    or (len(large) > _LARGE_SOURCES and (shared or operation.name not in SUMS))
                    or len(sources) > _SOURCES
                    or (shared and (are_more(operation.name, value, large) or chain > _CHAIN))
                    or value in gathers
                )
            if write:
                stored[value] = True
                expensive.discard(value)
            else:
                under[value], for_each[value], length[value] = sources, element, chain
    return stored, frozenset(expensive)


def _picked_rows(program) -> Mapping[int, RowNormalization]:
    """For each value that is made of normalised rows, what is in memory where a gather takes an
    element of each: what XLA writes in blocks of rows, a `log_softmax` before the logarithm is
    taken away. It is computed no further, and the derivative reads it too. (Not where what it is of
    is read for something else, as by a softmax of columns: tests/test_contrastive.py.)"""
    if not program.rules.blocks_of_rows or program.rules.writes_gathered:
        return {}
    made = [value < program.input_count for value in range(len(program.sizes))]
    for operation in program.operations:
        if not operation.fused:
            for value in operation.outputs:
                made[value] = True
    norms = find_row_normalizations(program, made, REDUCTIONS).normalized
    readers, arrays = readers_of(program), {norm.array for norm in norms.values()}
    alone = {
        operation.outputs[0]
        for operation in program.operations
        if operation.outputs and operation.outputs[0] in arrays
        if readers[operation.inputs[0]] == 2  # the reduction, and what is made with it
    }
    return {value: norm for value, norm in norms.items() if norm.array in alone}


def reduces_to_few(operation, sizes) -> bool:
    """Whether it makes little of much, in a kernel with what it reads; a gather that is fused takes
    one element of each row. So is a matmul of vectors."""
    if operation.name == "gather" and operation.fused:
        return sizes[operation.outputs[0]] < sizes[operation.inputs[0]]
    return operation.name in REDUCTIONS or (operation.fused and operation.name == "dot_general")
