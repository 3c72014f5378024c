"""Copies of what convolutions read, where a library cannot slide windows along it as it is.

It puts no zeros between the elements of what it reads. XLA writes a copy that has
them for a transposed convolution. The gradient of the kernel of a transposed or a dilated
convolution is a convolution of two copies, with examples and features exchanged. The copy of the
operand is computed as it is written: a `relu` before the convolution is in no memory.

The library also pads both sides of an axis alike. For one that is padded otherwise (a stride of 2
and "SAME", causal in time) XLA writes a padded copy too, and cuts one of the cotangent. It takes
the place of the operand where this is computed for the convolution alone, and is not counted then.
(tests/test_convolutions.py)
"""

import dataclasses
import math
from collections.abc import Callable, Container, Mapping
from typing import Any

from jaxmem.program.readers import SUMS, dtype_of, shape_of


@dataclasses.dataclass(frozen=True, slots=True)
class ConvolutionCopies:
    """How many times as long as what they are copies of.

    Attributes:
        forward: that of the operand, in the forward pass.
        operand, result: those of the operand and of the result's cotangent, in the backward pass.
        uneven: that of the operand in both, unless it is computed for the convolution alone.
    """

    forward: float = 0.0
    operand: float = 0.0
    result: float = 0.0
    uneven: float = 0.0


NO_COPIES = ConvolutionCopies()


def copies_of(equation: Any, is_reversed: bool) -> ConvolutionCopies:
    """Those of a convolution, whose kernel is or is not one that was reversed: as the gradient of
    another one a transposed one needs none forward."""
    parameters = equation.params
    operand, kernel = (variable.aval.shape for variable in equation.invars)
    numbers = parameters["dimension_numbers"]
    lengths = [operand[axis] for axis in numbers.lhs_spec[2:]]
    windows = [kernel[axis] for axis in numbers.rhs_spec[2:]]
    results = [equation.outvars[0].aval.shape[axis] for axis in numbers.out_spec[2:]]
    padding = parameters["padding"]
    between, apart = parameters["lhs_dilation"], parameters["rhs_dilation"]
    if not math.prod([*lengths, *windows, *results]):
        return NO_COPIES
    spread = [1 + (n - 1) * zeros for n, zeros in zip(lengths, between, strict=True)]
    padded = _padded(spread, padding) / math.prod(lengths)
    if max(between, default=1) > 1:
        # Its gradient is a convolution with the strides that zeros are put in.
        gradient_padding = [
            ((k - 1) * d - low, (k - 1) * d - high)
            for k, d, (low, high) in zip(windows, apart, padding, strict=True)
        ]
        even = not _is_uneven(gradient_padding)
        return ConvolutionCopies(
            0.0 if is_reversed else padded,
            1.0 if even else math.prod(spread) / math.prod(lengths),
            1.0 if even else _padded(results, gradient_padding) / math.prod(results),
        )
    exchanged = float(max(apart, default=1) > 1)
    return ConvolutionCopies(0.0, exchanged, exchanged, padded if _is_uneven(padding) else 0.0)


def _is_uneven(padding: Any) -> bool:
    return any(low != high or low < 0 for low, high in padding)


def _padded(lengths: list[int], padding: Any) -> int:
    """How many elements there are with the padding."""
    return math.prod(
        n + max(low, 0) + max(high, 0) for n, (low, high) in zip(lengths, padding, strict=True)
    )


def bytes_of_copies(
    program: Any, operation: Any, is_for_one: Callable[[int], bool]
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Bytes of the copies of an operation, forward and backward, and the operand and bytes of the
    one that its derivative reads again; ``is_for_one``: whether a value is computed element by
    element, for one operation."""
    copies, axes = operation.contraction.copies, operation.contraction.axes
    last = program.rules.channels_last
    if last is None or not axes:
        return 0, 0, ()
    value = operation.inputs[0]
    operand, result = program.sizes[value], program.sizes[operation.outputs[0]]
    # (One in float32 is in the library's order already.)
    is_input = value < program.input_count and not operation.widened
    is_relaid = is_input and not _in_order(program, value, axes[0], last)
    # The operand's cotangent is made where its copy was.
    copied = max(copies.operand - program.active[value], 0) * operand
    # A padded copy is in the library's order: it takes the place of one that is relaid.
    uneven = 0.0 if is_for_one(value) else max(copies.uneven, float(is_relaid)) * operand
    kept = uneven if program.active[operation.inputs[1]] else 0.0  # for the kernel's gradient
    cut = uneven if program.active[value] else 0.0  # a cotangent, to what it is of
    return (
        round(copies.forward * operand + uneven - kept),
        round(max(copied + copies.result * result, cut)),
        ((value, round(kept)),) if kept else (),
    )


def convolved_axes(equation: Any) -> tuple[tuple[int, ...], ...]:
    """Those of the operand of a convolution and of its kernel: of the examples (results), of the
    channels, and those that it slides along; of other operations none."""
    if equation.primitive.name != "conv_general_dilated":
        return ()
    numbers = equation.params["dimension_numbers"]
    return tuple(numbers.lhs_spec), tuple(numbers.rhs_spec)


def inputs_in_another_order(program: Any) -> frozenset[int]:
    """The inputs of a program (`Program`) that a library convolves, in the dtype that they have or
    are cast to, in another order of axes."""
    last = program.rules.channels_last
    if last is None:
        return frozenset()
    origin, found = {value: value for value in range(program.input_count)}, set()
    for operation in program.operations:
        if operation.name == "convert_element_type":  # of a literal it has no inputs
            origins = (origin[value] for value in operation.inputs if value in origin)
            origin |= dict(zip(operation.outputs, origins, strict=False))
        for value, axes in zip(operation.inputs, operation.contraction.axes, strict=False):
            if value in origin and not _in_order(program, value, axes, last):
                found.add(origin[value])
    return frozenset(found)


def _in_order(program: Any, value: int, axes: tuple[int, ...], last: Container[Any]) -> bool:
    lengths, (example, channel, *slid) = shape_of(program, value), axes
    is_last = (dtype_of(program, value), len(slid)) in last
    inner = [*slid, channel] if is_last else [channel, *slid]
    order = [axis for axis in (example, *inner) if lengths[axis] > 1]
    return order == sorted(order)


def is_by_library(program: Any, operation: Any) -> bool:
    """Whether it is a convolution by a library."""
    has_library = program.rules.channels_last is not None
    return has_library and operation.name == "conv_general_dilated"


def reads_copy(program: Any, operation: Any, value: int) -> bool:
    """Whether a library reads a copy of an operand, which is computed as it is written."""
    copied = operation.contraction.copies.forward > 0 and value == operation.inputs[0]
    return copied and is_by_library(program, operation)


def is_added_by_library(
    program: Any, operation: Any, maker: Mapping[int, int], readers: Mapping[int, int]
) -> bool:
    """Whether a library adds something to what it convolves for that alone, in the same call."""
    return operation.name in SUMS and any(
        value in maker
        and readers[value] == 1
        and is_by_library(program, program.operations[maker[value]])
        for value in operation.inputs
    )
