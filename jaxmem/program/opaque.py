"""What an operation takes that nothing is planned inside of: a conditional, a rule of the user's
own, a loop that has no derivative."""

import collections
import dataclasses
from collections.abc import Sequence, Set
from typing import Any

_LOOPS = ("scan", "while")
# Kernels of which another order is tried, in a time that grows with the square. Chosen: bodies of
# conditionals and rules that were met have fewer, half as many too (tests/test_opaque.py).
_MAX_REORDERED = 200


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBackwardBytes:
    """The bytes of an operation and of its derivative, beside operands, results, cotangents and
    gradients.

    Attributes:
        kept: what the derivative reads of it that is neither operand nor result.
        forward, backward: the most that each takes beside that.
        reads: the operands and results that the derivative reads, as values of the program.
    """

    kept: int
    forward: int
    backward: int
    reads: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class JointProgram:
    """An operation and its derivative as one program.

    Attributes:
        program: a `Program` of which ``boundary`` operations run forward and the others backward.
            Its inputs are operands and ``cotangents``; its outputs are ``results`` and gradients,
            of which ``gradients`` are counted elsewhere.
        values: its operands and results, each with the value of the program around that it is.
    """

    program: Any
    boundary: int
    cotangents: frozenset[int]
    results: frozenset[int]
    gradients: frozenset[int]
    values: tuple[tuple[int, int], ...]

    def bytes_of(self, program: Any) -> ForwardBackwardBytes:
        """Its bytes, of the program as a compiler runs it."""
        found = forward_backward_bytes(
            program, self.boundary, self.cotangents, self.results, self.gradients
        )
        reads = frozenset(outside for inside, outside in self.values if inside in found.reads)
        return dataclasses.replace(found, reads=reads)

    def kept_of_all(self, program: Any) -> int:
        """What the derivative reads that is neither operand nor result, of all devices."""
        return self.bytes_of(program.unsharded).kept


def forward_backward_bytes(
    program: Any, boundary: int, cotangents: Set[int], results: Set[int], gradients: Set[int]
) -> ForwardBackwardBytes:
    """The bytes of a program (`Program`) of which ``boundary`` operations run forward and the
    others backward. Its inputs are operands and ``cotangents``; its outputs are ``results`` and
    gradients, of which ``gradients`` are counted elsewhere."""
    first = [kernel for kernel in program.kernels if kernel.operations[-1] < boundary]
    second = program.kernels[len(first) :]
    inputs, outputs = set(range(program.input_count)), set(program.outputs)
    read = {value for kernel in second for value in kernel.sources}
    made = {value for kernel in first for value in kernel.results}
    kept = read & made - outputs

    def size(values: Set[int]) -> int:
        return sum(program.sizes[value] for value in values)

    operands = inputs - cotangents
    forward = peak(program, first, inputs, last=kept | results)
    backward = peak(program, second, operands | results, kept | cotangents, outputs - results)
    return ForwardBackwardBytes(
        size(kept),
        max(forward - size(kept | results - inputs), 0),
        max(backward - size(kept | cotangents | gradients - operands - results), 0),
        frozenset(read & (operands | results)),
    )


def peak(
    program: Any,
    kernels: Sequence[Any],
    outside: Set[int],
    first: Set[int] = frozenset(),
    last: Set[int] = frozenset(),
) -> int:
    """The most bytes that are alive while some kernels run, of values that are not ``outside``:
    those of ``first`` from the beginning, and those of ``last`` to the end. They run as they are
    written, or so that much is freed early, whichever takes less: XLA orders them to that end."""
    orders = [list(kernels)]
    if len(kernels) <= _MAX_REORDERED:
        orders.append(_freeing(program, kernels, outside, last))
    return min(_peak(program, order, outside, first, last) for order in orders)


def _peak(program, kernels, outside: Set[int], first: Set[int], last: Set[int]) -> int:
    sizes = program.sizes
    until: dict[int, int] = {}
    for number, kernel in enumerate(kernels):
        until.update(dict.fromkeys((*kernel.sources, *kernel.results), number))
    until |= dict.fromkeys(last, len(kernels))
    ends: list[list[int]] = [[] for _ in range(len(kernels) + 1)]
    for value, number in until.items():
        ends[number].append(value)
    alive = set(first - outside)
    most = now = sum(sizes[value] for value in alive)
    for number, kernel in enumerate(kernels):
        before = now
        fresh = {value for value in kernel.results if value not in outside} - alive
        alive |= fresh
        now += sum(sizes[value] for value in fresh)
        freed = sum(sizes[value] for value in ends[number] if value in alive)
        # XLA writes the result of an elementwise kernel over an operand that dies there, and what
        # a loop hands on over what it was given.
        over = kernel.fused or program.operations[kernel.operations[-1]].name in _LOOPS
        live_now = max(before, now - freed) if over else now
        most = max(most, live_now + kernel.workspace)
        alive.difference_update(ends[number])
        now -= freed
    return most


def _freeing(program, kernels, outside: Set[int], last: Set[int]) -> list:
    """The kernels in an order in which each may run, the one that leaves the least next."""
    sizes, left, order = program.sizes, list(kernels), []
    readers = collections.Counter(value for kernel in kernels for value in kernel.sources)
    pending = {value for kernel in kernels for value in kernel.results}

    def leaves(kernel) -> int:
        made = sum(
            sizes[v] for v in kernel.results if v not in outside and (v in readers or v in last)
        )
        ended = [v for v in kernel.sources if readers[v] == 1 and v not in outside | last]
        return made - sum(sizes[v] for v in ended)

    while left:
        ready = (kernel for kernel in left if pending.isdisjoint(kernel.sources))
        chosen = min(ready, key=leaves)
        left.remove(chosen)
        order.append(chosen)
        readers.subtract(chosen.sources)
        pending.difference_update(chosen.results)
    return order
