"""Matmuls whose sums are cut into parts (`Rules.parts`), and what these take in memory.

The sums of the parts are there until they are added up. Where the parts are not equally long,
operands are padded as they are written, and those that are inputs of the program in a copy.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxmem.program.readers import dtype_of, is_matmul, shape_of
from jaxmem.targets import Matmul

_ALIGNED = 16  # bytes that a part is a multiple of. Derived: XLA pads to that, too.
_SUMMED = {"float64": 8, "complex64": 8, "complex128": 16}


def parts_of(one: Matmul, rules: Any) -> int:
    """Into how many the sums of a matmul are cut."""
    return rules.parts(one) if rules.parts else 1


def has_padded_parts(one: Matmul, rules: Any) -> bool:
    """Whether the parts of its sums would not be equally long."""
    return _padded(one, rules) > one.depth


def pads_gradients(one: Matmul | None, rules: Any) -> bool:
    """Whether an operand is padded for a gradient."""
    return one is not None and any(has_padded_parts(g, rules) for g in (one.of_left, one.of_right))


def _padded(one: Matmul, rules: Any) -> int:
    """How many products each sum of a matmul is of, with the zeros that make its parts equal."""
    parts = parts_of(one, rules)
    equal = parts * max(_ALIGNED // one.itemsize, 1) if parts > 1 else 1
    return math.ceil(one.depth / equal) * equal


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedCopies:
    """Bytes of padded copies of operands: of those that a matmul reads, of those that its
    derivative reads, and of the others that this reads by operand: one kernel writes them with the
    first."""

    forward: int = 0
    backward: int = 0
    kept: tuple[tuple[int, int], ...] = ()


def padded_copies(
    program: Any,
    operation: Any,
    one: Matmul | None,
    sources_of: Callable[[int], Collection[int]],
    read_to_derive: Mapping[int, Collection[int]],
) -> PaddedCopies:
    """The padded copies of what an operation, the matmul that it is, and its derivative read.
    ``sources_of`` a value: what is in memory that it is computed of; ``read_to_derive`` an operand:
    what the derivative of what makes it reads, if it is computed element by element.

    An operand that is an input of the program, or made of inputs element by element, is there
    beside its copies. What a kernel has written is there as it was until its copy is made, which is
    soon. The cotangent is read as it is by the other gradient. That comes first, unless it is the
    larger of the two; then comes the derivative of what makes the operand, and what that reads is
    gone when the cotangent's copy is made (tests/test_splitting.py).
    """
    if one is None or program.in_loop:
        return PaddedCopies()
    forward = backward = 0
    kept = []

    def copy(of: Matmul, value: int) -> int:
        padded = _padded(of, program.rules)
        return program.sizes[value] * padded // of.depth if padded > of.depth else 0

    left, right = operation.inputs[0], operation.inputs[-1]
    both = program.active[left] and program.active[right]
    for value, other, gradient in ((left, right, one.of_right), (right, left, one.of_left)):
        sources = sources_of(value)
        derived = copy(gradient, value) if program.active[other] else 0
        of_cotangent = copy(gradient, operation.outputs[0]) if both else 0
        if max(sources, default=program.input_count) >= program.input_count:
            gone = sum(program.sizes[one] for one in read_to_derive[value])
            # What the matmul computes, nothing has written.
            unwritten = derived if gone and value not in sources else 0
            if program.sizes[value] > of_cotangent + unwritten:
                gone = program.sizes[value]
            backward += max(of_cotangent - gone, 0) + unwritten
            continue
        backward += of_cotangent
        read = copy(one, value)
        forward += read
        if read and derived:
            kept.append((value, derived))
        else:
            backward += derived
    return PaddedCopies(forward, backward, tuple(kept))


def matmul_of(program: Any, operation: Any) -> Matmul | None:
    """The matmul that an operation is; None: it is none, no sums are cut, or nothing is known of
    it."""
    if not (program.rules.parts and program.types and is_matmul(operation)):
        return None
    left, right, result = (
        math.prod(shape_of(program, value))
        for value in (operation.inputs[0], operation.inputs[-1], operation.outputs[0])
    )
    if not left * right * result:
        return None
    dtype = dtype_of(program, operation.outputs[0])
    products = 8 if dtype.startswith("complex") else 2
    depth = max(operation.flops // (products * result), 1)
    batch = max(round(left * right / (result * depth**2)), 1)
    itemsize = program.sizes[operation.outputs[0]] // result
    return Matmul(
        batch,
        max(round(left / (batch * depth)), 1),
        max(round(right / (batch * depth)), 1),
        depth,
        itemsize,
        _SUMMED.get(dtype, 4),
    )


def bytes_of_parts(program: Any, operation: Any, one: Matmul | None) -> tuple[int, dict[int, int]]:
    """Bytes of the parts of an operation, the matmul that it is, and of those of the gradients of
    its operands."""
    if one is None:
        return 0, {}

    def size(of: Matmul) -> int:
        parts = parts_of(of, program.rules)
        return parts * of.batch * of.rows * of.columns * of.summed * (parts > 1)

    gradients = zip(operation.inputs, (one.of_left, one.of_right), strict=False)
    return size(one), {value: size(of) for value, of in gradients if program.active[value]}
