"""Elements that are taken by indices."""

import dataclasses
import math

from jaxmem.levers.batch.independence.kinds import BatchInvariant, FlatPerExample, Kind, PerExample
from jaxmem.levers.batch.independence.layout import common_batch_axis, flat
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import rule


@rule("gather", sizes=None, growing=False, takes_flat=True)
def gather(op: BatchOperation) -> Kind:
    """Examples in the operand, in the indices, or in both."""
    (operand, indices), numbers = op.kinds, op.params["dimension_numbers"]
    if not op.same_params("slice_sizes"):
        return _along_axis(op) or op.depends_on_batch_size
    if isinstance(indices, FlatPerExample):
        return _along_axis(op) or op.mixes_examples
    sizes = [step.equation.params["slice_sizes"] for step in op.steps]
    rank = len(op.results[0][0])
    rows = [axis for axis in range(rank) if axis not in numbers.offset_dims]  # those of indices
    axis = operand.axis if isinstance(operand, PerExample) else None
    others = [(a, b) for at, (a, b) in enumerate(zip(*sizes, strict=True)) if at != axis]
    if any(a != b for a, b in others) or len(rows) != len(op.shapes[1][0]) - 1:
        return op.depends_on_batch_size
    if isinstance(operand, BatchInvariant):
        return _from_table(op, rows)
    if isinstance(indices, PerExample):
        return _from_own_row(op, rows)
    return _from_each(op, sizes)


def _from_table(op: BatchOperation, rows: list[int]) -> Kind:
    """Each example looks up something of a table that all have in common."""
    operand, indices = op.kinds
    if operand.value is not None and op.shapes[0][0] != op.shapes[0][1]:
        return op.mixes_examples
    if indices.axis >= len(rows):
        return op.mixes_examples
    return op.each(rows[indices.axis], indices)


def _from_own_row(op: BatchOperation, rows: list[int]) -> Kind:
    """Each example has indices of its own into its own part: a batched gather."""
    (operand, indices), numbers = op.kinds, op.params["dimension_numbers"]
    paired = list(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    common = common_batch_axis([dataclasses.replace(kind, axis=0) for kind in op.kinds])
    if common is None or (operand.axis, indices.axis) not in paired:
        return op.mixes_examples
    return op.each(rows[indices.axis], common)


def _from_each(op: BatchOperation, sizes: list[tuple[int, ...]]) -> Kind:
    """The same indices for all examples, whose axis is taken whole."""
    operand, numbers = op.kinds[0], op.params["dimension_numbers"]
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = all(
        size[operand.axis] == shape[operand.axis]
        for size, shape in zip(sizes, op.shapes[0], strict=True)
    )
    if not whole or operand.axis in {*taken, *numbers.start_index_map}:
        return op.mixes_examples
    if op.shapes[1][0] != op.shapes[1][1]:
        return op.mixes_examples
    windows = [at for at in range(len(op.shapes[0][0])) if at not in taken]
    return op.each(numbers.offset_dims[windows.index(operand.axis)], operand)


def _along_axis(op: BatchOperation) -> Kind | None:
    """Of `jnp.take_along_axis` with one index a row: for one example it is another gather."""
    operand, indices = op.kinds
    axes = {_axis_of_rows(op, which) for which in (0, 1)}
    if len(axes) != 1 or not op.same_params("slice_sizes", "dimension_numbers"):
        return None
    (axis,) = axes
    if axis is None or not isinstance(operand, PerExample) or operand.axis == axis:
        return None
    rows = flat(operand, op.results[0], op.sizes)
    same = rows is not None and rows == flat(indices, op.shapes[1], op.sizes)
    return op.each(operand.axis, operand) if same else None


def _axis_of_rows(op: BatchOperation, which: int) -> int | None:
    """The axis along which a gather takes elements of each row, the indices being in the order of
    the result; None: it takes something else."""
    params = op.steps[which].equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, of_indices = op.shapes[0][which], op.shapes[1][which]
    result = op.results[0][which]
    if len(numbers.start_index_map) != 1 or set(sizes) != {1} or len(result) != len(shape):
        return None
    axis = int(numbers.start_index_map[0])
    rows = list(numbers.operand_batching_dims)
    of_rows = list(numbers.start_indices_batching_dims)
    rest = [at for at in range(len(of_indices) - 1) if at not in of_rows]
    places = [at for at in range(len(result)) if at not in numbers.offset_dims]
    fits = (
        tuple(numbers.collapsed_slice_dims) == (axis,)
        and rows == sorted(rows)
        and of_rows == sorted(of_rows)
        and all(shape[at] == 1 for at in range(len(shape)) if at != axis and at not in rows)
        and [places[at] for at in rest] == [axis]
        and all(result[at] == shape[at] for at in range(len(shape)) if at != axis)
        and math.prod(of_indices) == math.prod(result)
    )
    return axis if fits else None
