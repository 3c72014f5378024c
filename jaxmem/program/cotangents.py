"""Which values of a program have cotangents, and where they are made."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmem.program.readers import CUTS, SUMS, shape_of

# Times smaller than what it is made of: the result of a reduction. Chosen
# (benchmarks/planner/sensitivity.py).
_REDUCED = 16
# The same, where the last operation is one. Measured: cotangents of sums over 4 elements and more
# are spread out where they are read (tests/test_reductions.py); of those over 2 some are.
_SUMMED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class CotangentEdge:
    """How a kernel's derivative gives one of its sources a cotangent.

    Attributes:
        value: the source.
        reduces: whether the kernel reduces it: the cotangent is spread out where it is read.
        rows: those that are taken for it where the kernel normalises its rows.
        last: the first reduction of its rows (or columns), if the kernel reads that too: its
            derivative is computed last.
        cuts: whether the kernel reads no more than slices of it, and others read it too: what it
            has of a cotangent is padded where all of them are summed up.
        passes: whether it is never in memory: it is computed element by element, and in memory
            because it is expensive, and so is all that reads it. The derivatives of both are one
            kernel.
        linear: whether what the kernel makes is linear in it: its cotangent is made without it.
        adds: whether the kernel does no more than to add it to others: its cotangent is that of the
            sum, and no array of its own.
    """

    value: int
    reduces: bool
    rows: tuple[int, ...]
    last: int | None
    cuts: bool
    passes: bool
    linear: bool
    adds: bool


@dataclasses.dataclass(frozen=True, slots=True)
class KernelEdges:
    """How a kernel's derivative gives its sources cotangents, one after the other.

    Attributes:
        adds: whether any of them does no more than to add.
        by_columns: whether the kernel normalises columns of any.
    """

    edges: tuple[CotangentEdge, ...]
    adds: bool
    by_columns: bool

    @classmethod
    def of(cls, edges: Iterable[CotangentEdge]) -> "KernelEdges":
        found = tuple(edges)
        by_columns = any(edge.last is not None and not edge.rows for edge in found)
        return cls(found, any(edge.adds for edge in found), by_columns)


def active_of(program: Any) -> list[bool]:
    """For each value of a program (`Program`) whether it has a cotangent: it is of a floating type
    and depends on a differentiated input."""
    count = len(program.sizes)
    if program.types:
        real = [kind.startswith(("float", "bfloat", "complex")) for kind in program.types]
    else:
        real = [True] * count
    wanted = program.differentiated
    active = [
        real[value] and value < program.input_count and (wanted is None or value in wanted)
        for value in range(count)
    ]
    for operation in program.operations:
        for value, gathered, _ in operation.communication.gathers:
            active[gathered] = active[value]
        if operation.derivative_reads != "flat" and any(active[v] for v in operation.inputs):
            for value in operation.outputs:
                active[value] = real[value] and value != operation.residuals
    return active


def cotangent_edges(program: Any) -> tuple[KernelEdges, ...]:
    """How each kernel of a program (`Program`) gives its sources the cotangents that it does not
    leave to other kernels."""
    moving = [_moving(program, kernel) for kernel in program.kernels]
    passed = _passed(program, moving)
    readers = collections.Counter(value for sources in moving for value in sources)
    shared = frozenset(value for value, count in readers.items() if count > 1)
    first = program.cotangent_of
    return tuple(
        KernelEdges.of(
            edge
            for edge in _cotangent_edges(program, moving, passed, shared, number)
            if first[edge.value] == edge.value
        )
        for number in range(len(moving))
    )


def cotangents_in_common(program: Any) -> list[int]:
    """For each value of a program (`Program`) the one in memory that is made first of those that
    have its cotangent: what is added up, and read for nothing else, has that of the sum."""
    found = list(range(len(program.sizes)))
    readers = collections.Counter(value for one in program.operations for value in one.inputs)
    readers.update(program.outputs)
    summands: dict[int, list[int]] = {}  # of sums that are in no memory, what is
    for operation in program.operations:
        if operation.name not in SUMS or not program.active[operation.outputs[0]]:
            continue
        (result,) = operation.outputs
        parts: list[int] = []
        for value in operation.inputs:
            if readers[value] == 1 and program.sizes[value] == program.sizes[result]:
                parts += [value] if program.made[value] else summands.get(value, [])
        parts = sorted(
            (value for value in parts if program.active[value]), key=program.made.__getitem__
        )
        if not program.made[result]:
            summands[result] = parts
        for value in parts:
            found[value] = parts[0]
    return found


def _cotangent_edges(
    program: Any,
    moving: Sequence[frozenset[int]],
    passed: Mapping[int, frozenset[int]],
    shared: frozenset[int],
    number: int,
) -> tuple[CotangentEdge, ...]:
    kernel, sizes = program.kernels[number], program.sizes
    written = sum(sizes[value] for value in kernel.results)
    adds = _adds(program, kernel)
    last = _completed(program, moving, number)
    later = {one for value in kernel.sources for one in passed.get(value, ())}
    return tuple(
        CotangentEdge(
            value,
            kernel.fused and sizes[value] > _least(program, kernel) * written,
            tuple(row for array, row in kernel.aliasing.row_normalized if array == value),
            last.get(value),
            value in shared and sizes[value] > written and _cuts(program, kernel, value),
            value in passed,
            value in passed and _is_linear(program, kernel, value),
            adds and value >= program.input_count,
        )
        for value in kernel.sources
        if value in moving[number] and value not in later
    )


def _adds(program: Any, kernel: Any) -> bool:
    """Whether a kernel adds up arrays of one size, and does no more."""
    sizes = {program.sizes[value] for value in (*kernel.results, *kernel.sources)}
    names = {program.operations[number].name for number in kernel.operations}
    return len(sizes) == 1 and names <= SUMS


def _least(program: Any, kernel: Any) -> int:
    """How many times larger than its results a value is at least that a kernel reduces."""
    last = program.operations[kernel.operations[-1]].name
    return _SUMMED if last.startswith("reduce_") or last == "dot_general" else _REDUCED


def _cuts(program: Any, kernel: Any, value: int) -> bool:
    """Whether a kernel reads no more than slices of a value, or of what it computes of it element
    by element."""
    whole, sizes = {value}, program.sizes
    shape = functools.partial(shape_of, program) if program.types else sizes.__getitem__
    for number in kernel.operations if kernel.fused else ():
        one = program.operations[number]
        if one.name in CUTS or whole.isdisjoint(one.inputs):
            continue
        if any(shape(made) != shape(value) for made in one.outputs):
            return False
        whole.update(one.outputs)
    return kernel.fused and whole.isdisjoint(kernel.results)


def _is_linear(program: Any, kernel: Any, value: int) -> bool:
    """Whether what a kernel computes is linear in a value: sums, and products with what is not made
    of it."""
    made = {value}
    for number in kernel.operations:
        one = program.operations[number]
        if made.isdisjoint(one.inputs):
            continue
        factors = [operand for operand in one.inputs if operand in made]
        if one.derivative_reads != "nothing" and (one.name != "mul" or factors[1:]):
            return False
        made.update(one.outputs)
    return True


def _moving(program: Any, kernel: Any) -> frozenset[int]:
    """The sources that have a cotangent of a kernel: not those that it reads behind a
    `jax.lax.stop_gradient` alone."""
    sources = frozenset(value for value in kernel.sources if program.active[value])
    if kernel.sent_bytes:
        return sources
    members = (program.operations[number] for number in reversed(kernel.operations))
    return sources & _reached(program, kernel.results, members)


def with_gradients(program: Any) -> frozenset[int]:
    """The inputs of a program (`Program`) that have a gradient: those that it returns something of,
    and not behind a `jax.lax.stop_gradient` or a rounding alone."""
    reached = _reached(program, program.outputs, reversed(program.operations))
    return frozenset(value for value in range(program.input_count) if value in reached)


def _reached(program: Any, results: Iterable[int], backwards: Iterable[Any]) -> set[int]:
    """What cotangents of results reach through some operations, from the last to the first."""
    reached = {value for value in results if program.active[value]}
    for one in backwards:
        if one.derivative_reads != "flat" and not reached.isdisjoint(one.outputs):
            operands = {*one.inputs, *map(one.gathered_operand, one.inputs)}
            reached.update(value for value in operands if program.active[value])
    return reached


def _passed(program: Any, moving: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
    """The values whose cotangents pass, and the sources of their kernels that have one. What a
    kernel reduces passes too, if nothing that is spread out is derived with it: that is summed up,
    in a kernel that writes over none of its operands."""
    found = {
        kernel.results[0]: moving[number]
        for number, kernel in enumerate(program.kernels)
        if kernel.expensive and not kernel.results[1:] and kernel.results[0] not in program.outputs
    }
    for number, kernel in enumerate(program.kernels):
        for value in found.keys() & {*kernel.sources}:
            if not _passes(program, kernel, value, found[value] | moving[number]):
                del found[value]
    return found


def _passes(program: Any, kernel: Any, value: int, derived: frozenset[int]) -> bool:
    """Whether a kernel computes its result of a source element by element, or reduces what it
    computes so, and with it no gradient but of arrays of the source's shape is ``derived``."""
    shape, last = shape_of(program, value), program.operations[kernel.operations[-1]]
    made = set(kernel.results[:1])
    reduces = last.name.startswith("reduce_") and value not in kernel.aliasing.offset_reads
    if reduces and all(shape_of(program, one) == shape for one in derived):
        made.update(last.inputs)
    return kernel.fused and any(shape_of(program, one) == shape for one in made)


def _completed(program: Any, moving: Sequence[frozenset[int]], number: int) -> dict[int, int]:
    """The sources of a kernel that a reduction among its sources is of too, and the first one."""
    kernels, own = program.kernels, moving[number]
    found: dict[int, int] = {}
    if not kernels[number].fused:
        return found
    for one in sorted({program.made[value] - 1 for value in own if program.made[value]}):
        written = sum(program.sizes[value] for value in kernels[one].results)
        for value in moving[one] & own if kernels[one].fused else ():
            if program.sizes[value] > _least(program, kernels[one]) * written:
                found.setdefault(value, one)
    return found
