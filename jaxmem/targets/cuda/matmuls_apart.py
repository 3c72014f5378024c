"""Matmuls that XLA's own kernels refuse, kept apart from what is around them (run by path, in a
worker).

XLA computes what a matmul reads in the kernel that multiplies, which Triton makes, and cuts it into
tiles of powers of two. It cannot cut rows so that come of two axes of an odd length (``x @ w`` of
examples by 1,023 tokens, if ``x`` is transposed on the way): then it refuses the whole program. On
a GPU it tries other kernels first, and takes a library's for such a matmul alone. That reads what
is in memory, as a matmul between barriers does.
"""

import math
from collections.abc import Collection
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo


def keep_apart(module: Any, shapes: Collection[tuple[int, ...]], count: int) -> None:
    """Puts barriers before and behind the matmuls with results of these shapes, as XLA has them:
    one axis of the batch, if there is one, one of rows, one of columns. On so many devices a result
    may be a part of one in the module."""
    if shapes:
        _visit(module.operation, shapes, count)


def _visit(operation: Any, shapes: Collection[tuple[int, ...]], count: int) -> None:
    for region in operation.regions:
        for block in region.blocks:
            for one in list(block.operations):
                _visit(one, shapes, count)
                if one.operation.name == "stablehlo.dot_general":
                    _keep_dot_apart(one, shapes, count)


def _keep_dot_apart(dot: Any, shapes: Collection[tuple[int, ...]], count: int) -> None:
    numbers = stablehlo.DotDimensionNumbers(dot.dot_dimension_numbers)
    left = list(numbers.lhs_batching_dimensions), list(numbers.lhs_contracting_dimensions)
    right = list(numbers.rhs_batching_dimensions), list(numbers.rhs_contracting_dimensions)
    whole = dot.result.type.shape
    batched = bool(left[0])
    first, rows = len(left[0]), len(dot.lhs.type.shape) - len(left[1])
    parts = [whole[:first]] * batched + [whole[first:rows], whole[rows:]]
    shape = tuple(map(math.prod, parts))
    if not any(_is_part(one, shape, count) for one in shapes):
        return
    with ir.InsertionPoint(dot), dot.location:
        operands = [_matrices(dot.lhs, *left), _matrices(dot.rhs, *right)]
        batch = [0] * batched
        result = stablehlo.DotGeneralOp(
            ir.RankedTensorType.get(shape, dot.result.type.element_type),
            *stablehlo.OptimizationBarrierOp(operands).results,
            stablehlo.DotDimensionNumbers.get(batch, batch, [batched + 1], [batched + 1]),
            precision_config=dot.precision_config,
            algorithm=dot.algorithm,
        ).result
        (kept,) = stablehlo.OptimizationBarrierOp([result]).results
        same = stablehlo.ReshapeOp(dot.result.type, kept).result
    dot.result.replace_all_uses_with(same)
    dot.operation.erase()


def _is_part(part: tuple[int, ...], whole: tuple[int, ...], count: int) -> bool:
    """Whether one of so many devices may have that of a result."""
    if len(part) != len(whole) or not all(part):
        return False
    cuts = [divmod(length, of) for length, of in zip(whole, part, strict=True)]
    return not any(rest for _, rest in cuts) and count % math.prod(n for n, _ in cuts) == 0


def _matrices(operand: Any, batch: list[int], summed: list[int]) -> Any:
    """An operand of a matmul with its axes of the batch in one, then its own, then the summed."""
    shape = operand.type.shape
    own = [axis for axis in range(len(shape)) if axis not in (*batch, *summed)]
    order = [*batch, *own, *summed]
    if order != sorted(order):
        operand = stablehlo.TransposeOp(operand, order).result
    parts = [batch] * bool(batch) + [own, summed]
    sizes = [math.prod(shape[axis] for axis in part) for part in parts]
    few = ir.RankedTensorType.get(sizes, operand.type.element_type)
    return stablehlo.ReshapeOp(few, operand).result
