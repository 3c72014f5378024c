"""Operations that mix the elements along some axes: not that of the examples, but for a sum."""

from jaxmem.levers.batch.independence.kinds import BatchInvariant, BatchReduction, Kind, PerExample
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import Found, rule
from jaxmem.program.slicing import REDUCTIONS


@rule(*REDUCTIONS)
def reduction(op: BatchOperation) -> Kind:
    """A sum over the examples is what a loss is made of; no other reduction over them is."""
    kind, axes = op.kinds[0], op.params["axes"]
    if kind.axis not in axes:
        return op.each(kind.axis - sum(axis < kind.axis for axis in axes), kind)
    if op.name == "reduce_sum" and op.results[0][0] == op.results[0][1]:
        return BatchReduction(kind.growth)
    return op.mixes_examples


def _mixing(op: BatchOperation, *axes: int) -> Found:
    """Of an operation that mixes along these axes of all operands."""
    common = op.common_batch_axis
    if common is None or op.has_other_array or common.axis in axes:
        return op.mixes_examples
    return [op.each(common.axis, common, at) for at in range(len(op.results))]


@rule("cumsum", "rev", growing=False)
@rule("cumprod", "cummax", "cummin", "cumlogsumexp", "sort")
def along(op: BatchOperation) -> Found:
    """Of what works along one axis, or several, that a parameter names."""
    names = {"rev": "dimensions", "sort": "dimension"}
    given = op.params[names.get(op.name, "axis")]
    return _mixing(op, *(given if isinstance(given, tuple | list) else (given,)))


def _mixing_last(op: BatchOperation, count: int) -> Found:
    rank = len(op.shapes[0][0])
    return _mixing(op, *range(rank - count, rank))


@rule("top_k")
def top_k(op: BatchOperation) -> Found:
    """Along the axis that it names; before jax named any, the last."""
    return _mixing(op, op.params["axis"]) if "axis" in op.params else _mixing_last(op, 1)


@rule("fft")
def fourier(op: BatchOperation) -> Found:
    """Along the last axes, of which lengths are given."""
    return _mixing_last(op, len(op.params["fft_lengths"]))


@rule("triangular_solve")
def triangular(op: BatchOperation) -> Found:
    """Right-hand sides of one matrix, solved each by itself."""
    matrix, sides = op.kinds
    rank = len(op.shapes[0][0])
    axis = rank - 1 if op.params["left_side"] else rank - 2
    if isinstance(matrix, BatchInvariant) and isinstance(sides, PerExample) and sides.axis == axis:
        return op.each(axis, sides)
    return matrices(op)


@rule("cholesky", "eigh", "householder_product", "lu", "qr", "svd")
def matrices(op: BatchOperation) -> Found:
    """Along the last two axes."""
    return _mixing_last(op, 2)


@rule("random_bits", "random_split", "random_wrap", "random_unwrap")
def by_keys(op: BatchOperation) -> Found:
    """Random numbers by a key of each example: its axes come first in the result."""
    return _mixing(op)


@rule("reduce_window_max", "reduce_window_min", "reduce_window_sum")
def windows(op: BatchOperation) -> Kind:
    """Examples are apart where the window is one index long and the axis is as it was."""
    kind = op.sole_batched_operand
    if kind is None:
        return op.mixes_examples
    neutral = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    neutral |= {"base_dilation": 1, "window_dilation": 1}
    for name, value in neutral.items():
        given = op.params.get(name)
        if given is not None and given[kind.axis] != value:
            return op.mixes_examples
    return op.each(kind.axis, kind)
