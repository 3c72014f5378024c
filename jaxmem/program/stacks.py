"""Which stacks of a scan XLA lays out anew between its forward and its backward pass."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.jaxprs.equations import operation_of
from jaxmem.jaxprs.flat import FlatJaxpr, Step
from jaxmem.jaxprs.residuals import SavedResidual
from jaxmem.program.costs import derivative_reads, is_fused

Order = tuple[int, ...]  # axes of a value, the outermost in memory first


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
        (output, *others), equation = step.outputs or (-1,), step.equation
        if others or output < 0:
            continue
        if step.primitive == "dot_general":
            found[output] = tuple(range(len(flat.avals[output].shape)))
            continue
        for value in _like(flat, step):
            if value in found:
                found[output] = _moved(found[value], equation)
                break
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
        if len(step.outputs) == 1 and step.outputs[0] in found:
            for value in _like(flat, step):
                order, transposed = found[step.outputs[0]]
                moved = _moved_back(order, step.equation), _moved_back(transposed, step.equation)
                found.setdefault(value, moved)
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


def _like(flat: FlatJaxpr, step: Step) -> list[int]:
    """The operands of which an operation makes one like them, element by element."""
    if not (step.primitive == "transpose" or is_fused(step.equation)) or len(step.outputs) != 1:
        return []
    size = flat.avals[step.outputs[0]].size
    same = step.primitive == "transpose"
    shape = flat.avals[step.outputs[0]].shape
    return [
        value
        for value in step.uses
        if flat.avals[value].size == size and (same or flat.avals[value].shape == shape)
    ]


def _moved(order: Order, equation: Any) -> Order:
    """The order of a result, by that of an operand."""
    if operation_of(equation) != "transpose":
        return order
    places = {axis: at for at, axis in enumerate(equation.params["permutation"])}
    return tuple(places[axis] for axis in order)


def _moved_back(order: Order, equation: Any) -> Order:
    if operation_of(equation) != "transpose":
        return order
    return tuple(equation.params["permutation"][axis] for axis in order)


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
        elif reads != "nothing":
            found.update(step.uses)
    return found
