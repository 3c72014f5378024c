"""Products of arrays: a sum over the examples where both have them along a contracted axis."""

import math

from jaxmem.levers.batch.independence.batch_invariant import as_per_example
from jaxmem.levers.batch.independence.kinds import BatchReduction, FlatPerExample, Kind, PerExample
from jaxmem.levers.batch.independence.layout import common_batch_axis, flat
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import rule


@rule("dot_general", sizes=None, takes_flat=True)
def dot_general(op: BatchOperation) -> Kind:
    """By labels: of the axes that go together, the same."""
    if any(isinstance(kind, FlatPerExample) for kind in op.kinds) or not op.same_params():
        return _dot_of_one(op) or op.depends_on_batch_size
    contracted, batched = op.params["dimension_numbers"]
    rank = len(op.shapes[0][0])
    left, right = list(range(rank)), [rank + at for at in range(len(op.shapes[1][0]))]
    for one, two in (*zip(*contracted, strict=True), *zip(*batched, strict=True)):
        right[two] = left[one]
    rows = [left[axis] for axis in batched[0]]
    out = rows + [label for label in left if label not in right]
    return _contraction(op, left, right, out + [label for label in right if label not in left])


@rule("wide_einsum")
def einsum(op: BatchOperation) -> Kind:
    """An einsum of our own, of two arrays."""
    left, right, out = op.params["spec"].replace("->", ",").split(",")
    return _contraction(op, left, right, out)


def _contraction(op: BatchOperation, left, right, out) -> Kind:
    """Of a product of two arrays, whose axes and those of the result have labels."""
    growth = math.prod(kind.growth for kind in op.kinds)
    labels, own = [], []
    for at, names in enumerate((left, right)):
        kind = as_per_example(op, at)
        if isinstance(kind, PerExample):
            labels.append(names[kind.axis])
            own.append(PerExample(0, kind.outer, kind.inner, growth))
    common, label = common_batch_axis(own), labels[0]
    both = label in left and label in right
    if common is None or labels != [label] * (2 if both else 1):
        return op.mixes_examples
    if label in out:
        return op.each(list(out).index(label), common)
    return BatchReduction(growth) if both else op.mixes_examples


def _dot_of_one(op: BatchOperation) -> Kind | None:
    """Of a matmul whose first axis, that of the batch, is gone for one example."""
    left, right = (
        flat(kind, shapes, op.sizes) for kind, shapes in zip(op.kinds, op.shapes, strict=True)
    )
    if left is None or right is None or not op.same_params("dimension_numbers"):
        return None
    (contracted, batched), (of_one, batched_of_one) = (
        step.equation.params["dimension_numbers"] for step in op.steps
    )
    growth = left.growth * right.growth
    for at, kind in enumerate((left, right)):
        (size, *rest), alone = op.shapes[at]
        fits = (
            kind.outer == 1
            and size == op.sizes[0]
            and tuple(rest) == alone
            and batched[at][:1] == (0,)
            and tuple(batched[at][1:]) == tuple(axis + 1 for axis in batched_of_one[at])
            and tuple(contracted[at]) == tuple(axis + 1 for axis in of_one[at])
        )
        if not fits:
            return None
    return FlatPerExample(1, math.prod(op.results[0][1]), growth)


@rule("conv_general_dilated")
def convolution(op: BatchOperation) -> Kind:
    """Along the axis that XLA calls the batch, if it is not divided into groups."""
    kind, numbers = op.sole_batched_operand, op.params["dimension_numbers"]
    if kind is None or kind.axis != numbers.lhs_spec[0] or op.params["batch_group_count"] != 1:
        return op.mixes_examples
    return op.each(numbers.out_spec[0], kind)
