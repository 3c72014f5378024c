"""What a scan stacks, and which stacks XLA lays out anew between its forward and backward pass."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.residuals import SavedResidual
from jaxmem.program.costs import derivative_reads, is_fused

Order = tuple[int, ...]  # axes of a value, the outermost in memory first


@dataclasses.dataclass(frozen=True, slots=True)
class LoopStacks:
    """What a scan stacks, and adds up.

    Attributes:
        results: bytes that each iteration would keep for the derivative, and returns.
        relaid: bytes of the largest stack that is laid out anew between the passes.
        kept: the types and bytes of the stacks that it keeps for the derivative.
        summed: the operands of which the derivative adds up, or stacks, a cotangent.
        unread: those that the derivative does not read, not where it makes all again either.
    """

    results: int = 0
    relaid: int = 0
    kept: tuple[tuple[str, int], ...] = ()
    summed: tuple[int, ...] = ()
    unread: frozenset[int] = frozenset()


NO_STACKS = LoopStacks()


def relaid_bytes(flat: FlatJaxpr, kept: Sequence[SavedResidual], sizes: Sequence[int]) -> int:
    """Bytes of one turn of the largest such stack: XLA copies one after the other. ``kept`` is what
    JAX stacks of a scan with that body, and ``sizes`` are bytes of the body's values."""
    stacked = {(one.aval.shape, one.aval.dtype) for one in kept}
    found = (value for value in relaid_stacks(flat) if _type(flat, value) in stacked)
    return max((sizes[value] for value in found), default=0)


def _type(flat: FlatJaxpr, value: int) -> tuple:
    return flat.avals[value].shape, flat.avals[value].dtype


def relaid_stacks(flat: FlatJaxpr) -> Iterator[int]:
    """The values of a scan's body that its derivative reads in another order of their axes than
    they were made in. Matmuls make their results with the axes of the batch outermost, then those
    of their operands; what is computed of them element by element, and transposed, stays as it
    lies. So does a cotangent that comes from a matmul's derivative. Where the two orders differ XLA
    keeps the stack in the first until the forward pass ends, and copies all of it then: but for one
    that lies row by row, and that a matmul reads transposed. Attention whose heads share keys has
    queries and heads in one order forward and in another one backward. Found in what XLA makes of
    attention with its axes in many orders (tests/test_stacks.py)."""
    made, read, kept = _made_in(flat), _read_in(flat), _kept(flat)
    for value in made.keys() & read.keys() & kept:
        shape, (order, transposed) = flat.avals[value].shape, read[value]
        own, rows = _long(made[value], shape), _long(range(len(shape)), shape)
        as_it_lies = own == rows == _long(transposed, shape)
        if own != _long(order, shape) and not as_it_lies:
            yield value


def _made_in(flat: FlatJaxpr) -> dict[int, Order]:
    """The order of each value that is made of a matmul's result."""
    found: dict[int, Order] = {}
    for step in flat.steps:
        if step.primitive == "dot_general":
            (output,) = step.outputs
            found[output] = tuple(range(len(flat.avals[output].shape)))
            continue
        known = [value for value in _like(flat, step) if value in found]
        if known:
            found[step.outputs[0]] = _transposed(found[known[0]], step)
    return found


def _read_in(flat: FlatJaxpr) -> dict[int, tuple[Order, Order]]:
    """The order of each value's cotangent, where that comes from a matmul's derivative, and that of
    the same matmul transposed."""
    found: dict[int, tuple[Order, Order]] = {}
    for step in reversed(flat.steps):
        if step.primitive == "dot_general":
            for place, value in enumerate(step.inputs):
                if isinstance(value, int):
                    found[value] = _of_gradient(step.equation, place)
            continue
        for value in _like(flat, step):
            if step.outputs[0] in found:
                order, transposed = (_transposed_back(o, step) for o in found[step.outputs[0]])
                found.setdefault(value, (order, transposed))
    return found


def _of_gradient(equation: Any, place: int) -> tuple[Order, Order]:
    """How a matmul's derivative makes the cotangent of an operand: its axes in the batch, those
    that the result has, and those that are summed, in the other operand's order of them
    (``_dot_general_transpose_lhs`` of JAX). The second: those that are summed before the others."""
    summed, batch = equation.params["dimension_numbers"]
    own, other = summed[place], summed[1 - place]
    sums = [axis for _, axis in sorted(zip(other, own, strict=True))]
    rank = equation.invars[place].aval.ndim
    free = [axis for axis in range(rank) if axis not in (*batch[place], *own)]
    return (*batch[place], *free, *sums), (*batch[place], *sums, *free)


def _like(flat: FlatJaxpr, step: FlatStep) -> list[int]:
    """The operands of which an operation makes one like them, element by element."""
    if step.primitive == "transpose":
        return list(step.uses)
    if len(step.outputs) != 1 or not is_fused(step.equation):
        return []
    shape = flat.avals[step.outputs[0]].shape
    return [value for value in step.uses if flat.avals[value].shape == shape]


def _transposed(order: Order, step: FlatStep) -> Order:
    """The order of a result, by that of an operand."""
    if step.primitive != "transpose":
        return order
    places = {axis: at for at, axis in enumerate(step.equation.params["permutation"])}
    return tuple(places[axis] for axis in order)


def _transposed_back(order: Order, step: FlatStep) -> Order:
    """The order of an operand, by that of a result."""
    if step.primitive != "transpose":
        return order
    return tuple(step.equation.params["permutation"][axis] for axis in order)


def _long(order: Sequence[int], shape: Sequence[int]) -> Order:
    """Of the axes of more than one element alone."""
    return tuple(axis for axis in order if shape[axis] > 1)


def _kept(flat: FlatJaxpr) -> set[int]:
    """What derivatives read."""
    found: set[int] = set()
    for step in flat.steps:
        reads = derivative_reads(step)
        if reads == "result":
            found.update(step.outputs)
        elif reads not in ("nothing", "flat"):
            found.update(step.uses)
    return found
