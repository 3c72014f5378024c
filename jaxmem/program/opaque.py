"""What an operation takes that nothing is planned inside of: a conditional, a rule of the user's
own, a loop that has no derivative."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence, Set
from typing import Any

from jaxmem.program.readers import LOOPS, SUMS, is_matmul

# Kernels of which another order is tried, in a time that grows with the square. Chosen: bodies of
# conditionals and rules that were met have fewer, half as many too (tests/test_opaque.py).
_MAX_REORDERED = 200


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBackwardBytes:
    """The bytes of an operation and of its derivative, beside operands, results, cotangents and
    gradients.

    Attributes:
        kept: what the derivative reads of it that is neither operand nor result.
        kept_of_all: the same on all devices together.
        forward, backward: the most that each takes beside that.
        reads: the operands and results that the derivative reads, as values of the program around.
    """

    kept: int
    kept_of_all: int
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

    @property
    def bytes(self) -> ForwardBackwardBytes:
        """What it takes and keeps, by the rules of its program."""
        key = "bytes", self.boundary, self.cotangents, self.results, self.gradients
        if key not in self.program.cache:
            self.program.cache[key] = self._bytes()
        found = self.program.cache[key]
        reads = frozenset(outside for inside, outside in self.values if inside in found.reads)
        return dataclasses.replace(found, reads=reads)

    def _bytes(self) -> ForwardBackwardBytes:
        """That, but that what is read are values of its own."""
        program, cotangents, results = self.program, self.cotangents, self.results
        first, second = self._passes(program)
        inputs, outputs = set(range(program.input_count)), set(program.outputs)
        own = inputs - cotangents | results
        kept, whole = _kept(program, first, second), program.unsharded
        forward = peak(program, first, inputs, last=kept | results)
        backward = peak(program, second, own, kept | cotangents, outputs - results)
        return ForwardBackwardBytes(
            _size(program, kept),
            _size(whole, _kept(whole, *self._passes(whole))),
            max(forward - _size(program, kept | results - inputs), 0),
            max(backward - _size(program, kept | cotangents | self.gradients - own), 0),
            frozenset({value for kernel in second for value in kernel.sources} & own),
        )

    def _passes(self, program: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """The kernels that run forward, and those that run backward."""
        kernels = program.kernels
        count = sum(kernel.operations[-1] < self.boundary for kernel in kernels)
        return kernels[:count], kernels[count:]


def _kept(program: Any, first: Sequence[Any], second: Sequence[Any]) -> set[int]:
    """What the first kernels make and the second ones read, but for results."""
    read = {value for kernel in second for value in kernel.sources}
    made = {value for kernel in first for value in kernel.results}
    return read & made - set(program.outputs)


def _size(program: Any, values: Set[int]) -> int:
    return sum(program.sizes[value] for value in values)


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
    sizes = _without_added_up(program, kernels, outside - first, last)
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
        loops = program.operations[kernel.operations[-1]].name in LOOPS
        over = kernel.fused or (loops and not kernel.sent_bytes)
        live_now = max(before, now - freed) if over else now
        most = max(most, live_now + kernel.workspace)
        alive.difference_update(ends[number])
        now -= freed
    return most


def _without_added_up(program, kernels, outside: Set[int], last: Set[int]) -> list[int]:
    """The bytes of all values, of which products that a matmul adds to what was there have none:
    the library writes the sum over that, rounded as it is, where nothing else reads it."""
    sizes = list(program.sizes)
    readers = collections.Counter(value for kernel in kernels for value in set(kernel.sources))
    makers = {value: kernel for kernel in kernels for value in kernel.results}

    def is_product(value: int) -> bool:
        if value not in makers:
            return False
        made = program.operations[makers[value].operations[-1]]
        return is_matmul(made) and not made.widened

    for kernel in kernels:
        *before, name = (program.operations[number].name for number in kernel.operations)
        if name not in SUMS or len(kernel.sources) != 2 or set(before) - {"convert_element_type"}:
            continue
        if any(readers[value] > 1 or value in outside | last for value in kernel.sources):
            continue
        for product, other in itertools.permutations(kernel.sources):
            same = [program.types[other]] == [program.types[value] for value in kernel.results]
            if same and is_product(product):
                sizes[product] = 0
                break
    return sizes


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
