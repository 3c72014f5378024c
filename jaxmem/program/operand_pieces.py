"""Operands that are put together of pieces, which a matmul reads where they are.

By `Rules.fuses_elements` XLA reads a concatenation in the kernel of a matmul in its pieces, as
long as it is put together along the one axis of the operand that the result has too, and each piece
is a multiple of `_TILE` there. Features beside features (`concatenate([x, z], -1) @ w`: graph
networks, recurrent cells, DenseNets, conditions) are put together along the axis that is summed.
The gradient of ``w`` has that axis: it reads the pieces, and the concatenation is gone as soon as
the forward pass has read it. The cotangent of what is split (gates of one matmul) is put together
of pieces likewise.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxmem.program.operands import has_matmul_dtype
from jaxmem.program.readers import SUMS, is_matmul, shape_of

# What the length of a piece is a multiple of, and how many a kernel reads at most. Measured with
# jaxlib 0.10.2 and 0.12.0 (tests/test_operand_pieces.py); both are in XLA's source, too.
_TILE = 64
_MOST = 4


def pieces_of_operands(program: Any, read: Sequence[int]) -> dict[tuple[int, int], frozenset[int]]:
    """By the number of a matmul and a value that it reads for one of its operands: the pieces that
    the gradient of the other one reads for that. ``read`` has for each value what matmuls read
    for it."""
    found: dict[tuple[int, int], frozenset[int]] = {}
    pieces: dict[int, tuple[frozenset[int], int]] = {}
    for number, operation in enumerate(program.operations):
        if operation.name == "concatenate":
            axis = _tiled_axis(program, operation.outputs[0], operation.inputs)
            if axis is not None:
                pieces[operation.outputs[0]] = frozenset(operation.inputs), axis
        elif len(operation.inputs) == 2 and is_matmul(operation):  # neither operand is a number
            for value, axes in zip(operation.inputs, operation.contraction.operands, strict=False):
                one, axis = pieces.get(read[value], (frozenset(), -1))
                if one and axis in axes.summed and len(axes.kept) == 1:
                    found[number, read[value]] = one
    return found


def split_matmuls(program: Any) -> dict[int, tuple[int, ...]]:
    """By the numbers of the matmuls whose results are split (`jnp.split`) in such pieces, and not
    read but for that, the bytes of the pieces: of the cotangent, which is put together of those of
    the pieces, the gradient of the right operand reads these, and that of the left one reads it
    whole."""
    readers = Counter(value for one in program.operations for value in one.inputs)
    readers.update(program.outputs)
    found: dict[int, tuple[int, ...]] = {}
    of: dict[int, frozenset[int]] = {}  # values that are sums of the results of matmuls
    for number, operation in enumerate(program.operations):
        sums = [one for v in operation.inputs if readers[v] == 1 and (one := of.get(v))]
        if is_matmul(operation) and len(operation.inputs) == 2:
            if all(len(axes.kept) == 1 for axes in operation.contraction.operands):
                of[operation.outputs[0]] = frozenset([number])
        elif operation.name in SUMS and len(operation.outputs) == 1:
            of[operation.outputs[0]] = frozenset().union(*sums)
        elif operation.name == "split" and sums:
            whole, last = operation.inputs[0], len(shape_of(program, operation.inputs[0])) - 1
            if _tiled_axis(program, whole, operation.outputs) == last:
                found |= dict.fromkeys(
                    sums[0], tuple(map(program.sizes.__getitem__, operation.outputs))
                )
    return found


def _tiled_axis(program: Any, whole: int, pieces: Sequence[int]) -> int | None:
    """The axis along which pieces lie that matmuls may read for an array."""
    distinct = 0 < len(set(pieces)) == len(pieces) <= _MOST
    if not distinct or not has_matmul_dtype(program, (whole,)):
        return None
    length, shapes = shape_of(program, whole), [shape_of(program, one) for one in pieces]
    axes = [axis for axis, own in enumerate(length) if shapes[0][axis] != own]
    if len(axes) != 1:
        return None
    (axis,) = axes
    lengths = [shape[axis] for shape in shapes]
    if sum(lengths) != length[axis]:  # a piece is a number of the program's
        return None
    return None if any(own % _TILE for own in lengths) else axis
