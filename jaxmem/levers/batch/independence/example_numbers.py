"""The numbers of the examples, ``jnp.arange(n)``: each may pick its own part by them, no more."""

from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    ExampleIndex,
    GatherIndices,
    Kind,
    PerExample,
    same_growth,
)
from jaxmem.levers.batch.independence.layout import common_batch_axis
from jaxmem.levers.batch.independence.operation import BatchOperation


def by_number(op: BatchOperation) -> Kind | None:
    """Of the numbers of the examples, on their way from an iota to a gather that picks by them,
    and of what is chosen by a known number; None: it is no such operation."""
    kinds, name = op.kinds, op.name
    if name == "select_n" and isinstance(kinds[0], BatchInvariant) and kinds[0].value is not None:
        one, two = kinds[0].value
        chosen = kinds[1 + int(one)]
        alike = op.shapes[1 + int(one)] == op.results[0]
        if one == two and alike and isinstance(chosen, ExampleIndex | PerExample):
            return chosen
    if name == "concatenate" and any(isinstance(kind, ExampleIndex) for kind in kinds):
        last = len(op.results[0][0]) - 1
        single = all(shape[-1] == 1 for shape, _ in op.shapes)
        return GatherIndices(tuple(kinds)) if single and op.params["dimension"] == last else None
    if name == "gather" and isinstance(kinds[1], GatherIndices):
        return _picked(op)
    if not kinds or not isinstance(kinds[0], ExampleIndex):
        return None
    if name in ("lt", "ge") and isinstance(kinds[1], BatchInvariant) and kinds[1].is_zero:
        return BatchInvariant(value=(name == "ge",) * 2)
    if name == "broadcast_in_dim":
        broadcast = op.each(op.params["broadcast_dimensions"][kinds[0].axis], PerExample(0))
        return ExampleIndex(broadcast.axis) if isinstance(broadcast, PerExample) else None
    if name == "convert_element_type" and not op.inexact():
        return kinds[0]
    return None


def _picked(op: BatchOperation) -> Kind | None:
    """Of a gather in which each example picks from its own part: ``x[jnp.arange(n), labels]``."""
    operand, columns = op.kinds
    numbers = op.params["dimension_numbers"]
    if not isinstance(operand, PerExample) or (operand.outer, operand.inner) != (1, 1):
        return None
    if not same_growth(operand.growth, 1) or not op.same_params():
        return None
    if operand.axis not in numbers.start_index_map:
        return None
    at = numbers.start_index_map.index(operand.axis)
    own, rest = columns.parts[at], columns.parts[:at] + columns.parts[at + 1 :]
    if not isinstance(own, ExampleIndex) or operand.axis not in numbers.collapsed_slice_dims:
        return None
    if not all(
        (isinstance(kind, BatchInvariant) and kind.value is not None)
        or (isinstance(kind, PerExample) and common_batch_axis([kind, PerExample(own.axis)]))
        for kind in rest
    ):
        return None
    rows = [axis for axis in range(len(op.results[0][0])) if axis not in numbers.offset_dims]
    return op.each(rows[own.axis], operand)
