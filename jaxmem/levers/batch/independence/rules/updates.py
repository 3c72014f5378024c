"""Slices at places that are computed, and what is written or added at such places."""

import dataclasses

from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    BatchReduction,
    Kind,
    PerExample,
    same_growth,
)
from jaxmem.levers.batch.independence.layout import common_batch_axis
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import rule

_ADDING = ("scatter-add", "scatter_add")


@rule("dynamic_slice", sizes=("slice_sizes",), growing=False)
def dynamic_slice(op: BatchOperation) -> Kind:
    """Of the axis of the examples it must take all."""
    kind = op.sole_batched_operand
    if kind is None or op.results[0][0][kind.axis] != op.shapes[0][0][kind.axis]:
        return op.mixes_examples
    return op.each(kind.axis, kind)


@rule("dynamic_update_slice")
def dynamic_update_slice(op: BatchOperation) -> Kind:
    """Of the axis of the examples it must replace all."""
    if not all(isinstance(kind, BatchInvariant) for kind in op.kinds[2:]):
        return op.mixes_examples
    common = op.common_batch_axis
    if common is None or op.shapes[1][0][common.axis] != op.shapes[0][0][common.axis]:
        return op.mixes_examples
    if any(isinstance(kind, BatchInvariant) and kind.value is None for kind in op.kinds[:2]):
        return op.mixes_examples
    return op.each(common.axis, common)


@rule(
    *("scatter", *_ADDING, "scatter-max", "scatter-min", "scatter-mul"),
    *("scatter_max", "scatter_min", "scatter_mul"),
    sizes=("update_jaxpr",),
)
def scatter(op: BatchOperation) -> Kind:
    """Examples in the operand, the indices, the updates, or several of them."""
    (operand, indices, updates), numbers = op.kinds, op.params["dimension_numbers"]
    rows = [axis for axis in range(len(op.shapes[2][0])) if axis not in numbers.update_window_dims]
    growth = updates.growth
    if not same_growth(operand.growth, growth) and not (
        isinstance(operand, BatchInvariant) and operand.is_zero
    ):
        return op.depends_on_batch_size
    if not same_growth(indices.growth, 1) or (
        not same_growth(growth, 1) and op.name not in _ADDING
    ):
        return op.depends_on_batch_size
    if any(
        isinstance(kind, BatchInvariant) and kind.value is None and one != two
        for kind, (one, two) in zip(op.kinds, op.shapes, strict=True)
    ):
        return op.mixes_examples
    common = common_batch_axis(
        [dataclasses.replace(k, axis=0) for k in op.kinds if isinstance(k, PerExample)]
    )
    if common is None:
        return op.mixes_examples
    common = dataclasses.replace(common, growth=growth)
    of_indices = indices.axis if isinstance(indices, PerExample) else None
    if isinstance(updates, PerExample) and updates.axis in rows:
        row = rows.index(updates.axis)
        if of_indices not in (None, row):
            return op.mixes_examples
        return _into_own_row(op, row, common) or _summed(op, row)
    if of_indices is not None:
        found = None if isinstance(updates, PerExample) else _into_own_row(op, of_indices, common)
        return found or _counted(op) or op.mixes_examples
    return _into_each(op, common)


def _into_own_row(op: BatchOperation, row: int, common: PerExample) -> Kind | None:
    """Each example is written into its own part: a batched scatter, by this axis of the indices;
    None: it is not batched by that."""
    operand, numbers = op.kinds[0], op.params["dimension_numbers"]
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for axis, of_row in batched:
        if of_row == row:
            fits = not isinstance(operand, PerExample) or operand.axis == axis
            return op.each(axis, common) if fits else op.mixes_examples
    return None


def _summed(op: BatchOperation, row: int) -> Kind:
    """Each example is added where its indices say, to zeros that all have in common: their sum."""
    _, indices, updates = op.kinds
    own = isinstance(indices, PerExample) and indices.axis == row
    return BatchReduction(updates.growth) if own and _adds_to_zeros(op) else op.mixes_examples


def _counted(op: BatchOperation) -> Kind | None:
    """For each example one number is added where its indices say, to zeros: how many there are of
    each, as `jnp.bincount` has it; None: it is something else."""
    _, indices, updates = op.kinds
    if not isinstance(indices, PerExample) or indices.axis == len(op.shapes[1][0]) - 1:
        return None  # the last axis has the parts of one place
    if not isinstance(updates, BatchInvariant) or updates.value is None or updates.growth != 1:
        return None
    one, other = updates.value
    return BatchReduction(1.0) if one == other and _adds_to_zeros(op) else None


def _adds_to_zeros(op: BatchOperation) -> bool:
    """Whether it adds to zeros, whose shape is that of no batch."""
    (operand, *_), (of_slice, of_batch) = op.kinds, op.results[0]
    zeros = isinstance(operand, BatchInvariant) and operand.is_zero
    return op.name in _ADDING and zeros and of_slice == of_batch


def _into_each(op: BatchOperation, common: PerExample) -> Kind:
    """The same indices for all examples, whose axis is written whole."""
    (operand, _, updates), numbers = op.kinds, op.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [axis for axis in range(len(op.shapes[0][0])) if axis not in gone]
    for axis, of_update in zip(windows, numbers.update_window_dims, strict=True):
        if axis in numbers.scatter_dims_to_operand_dims:
            continue
        fits = op.shapes[0][0][axis] == op.shapes[2][0][of_update]
        same = not isinstance(operand, PerExample) or operand.axis == axis
        same = same and (not isinstance(updates, PerExample) or updates.axis == of_update)
        if fits and same and op.results[0][0][axis] != op.results[0][1][axis]:
            return op.each(axis, common)
    return op.mixes_examples
