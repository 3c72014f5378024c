"""Copies of what convolutions read, where a library cannot slide windows along it as it is.

It puts no zeros between the elements of what it reads. XLA writes a copy that has
them for a transposed convolution. The gradient of the kernel of a transposed or a dilated
convolution is a convolution of two copies, with examples and features exchanged. The copy of the
operand is computed as it is written: a `relu` before the convolution is in no memory. Of a dilated
one it is written in the forward pass already, where the channels are innermost.

The library also pads both sides of an axis alike. For one that is padded otherwise (a stride of 2
and "SAME", causal in time) XLA writes a padded copy too, and cuts one of the cotangent. It takes
the place of the operand where this is computed for the convolution alone, and is not counted then;
not of a `tanh`, whose derivative reads the result.

XLA exchanges what is convolved and its windows where the windows are the longer ones. The gradient
of an image that kernels take nearly whole is such a convolution: the kernel is padded there.
(tests/test_convolutions.py)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.program.readers import SUMS, dtype_of, shape_of


@dataclasses.dataclass(frozen=True, slots=True)
class ConvolutionCopies:
    """How many times as long as what they are copies of.

    Attributes:
        forward: that of the operand, in the forward pass.
        operand, result: those of the operand and of the result's cotangent, in the backward pass.
        uneven: that of the operand in both, unless it is computed for the convolution alone.
        kernel: that of the kernel, in the backward pass.
        turned: that of the operand with examples and features exchanged, which is written beside
            it for the backward pass; in the backward pass for an argument.
    """

    forward: float = 0.0
    operand: float = 0.0
    result: float = 0.0
    uneven: float = 0.0
    kernel: float = 0.0
    turned: float = 0.0


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
    uneven = padded if _is_uneven(padding) else 0.0
    if exchanged or _is_grouped(parameters):
        return ConvolutionCopies(result=exchanged, uneven=uneven, turned=exchanged)
    if math.prod(windows) <= math.prod(results):
        return ConvolutionCopies(uneven=uneven)
    strides = parameters["window_strides"]
    found = _copies_of_long_windows(lengths, windows, results, strides, padding)
    return dataclasses.replace(found, uneven=uneven)


def _copies_of_long_windows(
    lengths: list[int], windows: list[int], results: list[int], strides: Any, padding: Any
) -> ConvolutionCopies:
    """Those of a convolution whose windows are longer than its results."""
    spread = [1 + (n - 1) * stride for n, stride in zip(results, strides, strict=True)]
    # The cotangent, with zeros between its elements, slides along the kernel, to the operand's.
    along_kernel = [
        (n - 1 - low, length + low - k)
        for n, k, length, (low, _) in zip(spread, windows, lengths, padding, strict=True)
    ]
    is_padded = _is_uneven(along_kernel)
    kernel = _padded(windows, along_kernel) / math.prod(windows) if is_padded else 0.0
    if any(n > k for n, k in zip(results, windows, strict=True)):
        return ConvolutionCopies(kernel=kernel)
    # The gradient of the kernel is a convolution of both with examples and features exchanged.
    if math.prod(windows) > math.prod(lengths):  # so is the convolution itself
        return ConvolutionCopies(forward=1.0, result=1.0, kernel=kernel)
    reached = [k + n - 1 for k, n in zip(windows, spread, strict=True)]
    padded = [n + low + high for n, (low, high) in zip(lengths, padding, strict=True)]
    if reached == padded:
        turned = math.prod(padded) / math.prod(lengths)
        return ConvolutionCopies(result=1.0, kernel=kernel, turned=turned)
    # Where elements are left at the end, zeros are written between those of the cotangent.
    return ConvolutionCopies(
        operand=math.prod(reached) / math.prod(lengths),
        result=math.prod(spread) / math.prod(results),
        kernel=kernel,
    )


def _is_grouped(parameters: Any) -> bool:
    return parameters["feature_group_count"] > 1 or parameters["batch_group_count"] > 1


def _is_uneven(padding: Any) -> bool:
    return any(low != high or low < 0 for low, high in padding)


def _padded(lengths: list[int], padding: Any) -> int:
    """How many elements there are with the padding."""
    return math.prod(
        n + max(low, 0) + max(high, 0) for n, (low, high) in zip(lengths, padding, strict=True)
    )


def bytes_of_copies(
    program: Any,
    operation: Any,
    is_for_one: Callable[[int], bool],
    is_in_its_derivative: Callable[[int], bool],
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Bytes of the copies of an operation, forward and backward, and the operand and bytes of the
    one that its derivative reads again; ``is_for_one``: whether a value is computed element by
    element, for one operation, ``is_in_its_derivative``: whether the derivative of that reads
    it."""
    copies, axes = operation.contraction.copies, operation.contraction.axes
    last = program.rules.channels_last
    if last is None or not axes:
        return 0, 0, ()
    value = operation.inputs[0]
    operand, result = program.sizes[value], program.sizes[operation.outputs[0]]
    # (One in float32 is in the library's order already.)
    is_input = value < program.input_count and not operation.widened
    is_relaid = is_input and not _in_order(program, value, axes[0])
    is_active = program.active[value]
    is_trained = program.active[operation.inputs[1]]  # then the kernel has a gradient
    turned = copies.turned * is_trained
    is_turned_early = value >= program.input_count and _is_channels_last(program, value, axes[0])
    # A padded copy is in the library's order: it takes the place of one that is relaid.
    is_beside = is_in_its_derivative(value) or not is_for_one(value)
    uneven = max(copies.uneven, float(is_relaid)) * operand * is_beside
    if turned and is_turned_early:
        # It takes the place of an operand that is kept for nothing else.
        forward, kept, copied = uneven, turned * operand * is_beside, copies.operand
    else:
        kept = uneven * is_trained
        forward, copied = uneven - kept, copies.operand + turned
        uneven -= kept  # read for the kernel's gradient, before the operand's cotangent is cut
    # The operand's cotangent is made where its copy was; the result's is for the kernel's alone
    # where there is none of the operand.
    again = max(copied - is_active, 0) * operand + max(copies.result - (not is_active), 0) * result
    cut = uneven * is_active  # a cotangent, to what it is of
    padded = copies.kernel * program.sizes[operation.inputs[1]] * is_active
    return (
        round(copies.forward * operand + forward),
        round(max(again, cut, padded)),
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
            if value in origin and not _in_order(program, value, axes):
                found.add(origin[value])
    return frozenset(found)


def _is_channels_last(program: Any, value: int, axes: tuple[int, ...]) -> bool:
    return (dtype_of(program, value), len(axes) - 2) in program.rules.channels_last


def _in_order(program: Any, value: int, axes: tuple[int, ...]) -> bool:
    lengths, (example, channel, *slid) = shape_of(program, value), axes
    inner = [*slid, channel] if _is_channels_last(program, value, axes) else [channel, *slid]
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
