"""The operations that one kernel computes, and what they and their derivatives read in memory."""

from collections.abc import Collection, Sequence

from jaxmem.program.in_memory import InMemory
from jaxmem.program.readers import (
    CUTS,
    gathers_repeatedly,
    is_matmul,
    is_view,
    read_by_derivative,
    shape_of,
)

# What reads other elements than it writes: its derivative cannot be written over what it read.
_SHIFTS = CUTS | {"concatenate", "pad", "rev"}


class Members:
    """The operations of a kernel, the last of which, ``index``, completes it.

    Attributes:
        numbers: of all of them, in their order.
        sources: the values in memory that they read.
        reads: those that their derivatives read: a value in memory itself, of others what they are
            made of.
        shifted, turned: the sources that are read from other places than is written to, and in
            another order of their axes.
        gathered_again: bytes that are read more often than they are there.
    """

    def __init__(
        self, memory: InMemory, index: int, results: Sequence[int], together: Collection[int]
    ):
        self.memory, self.index = memory, index
        cluster, self.sources = memory.cluster([index])
        self.numbers = tuple(sorted(cluster))
        self.reads: set[int] = set()
        self.shifted: frozenset[int] = frozenset()
        self.turned: frozenset[int] = frozenset()
        self.gathered_again = 0
        self._made_of: dict[int, frozenset[int]] = {}
        last = self._last()
        for number in self.numbers:
            self._add(number, frozenset(results) if number == last else None, together)
        if self.operation.residuals is not None:
            self.reads.add(self.operation.residuals)

    @property
    def operation(self):
        """The one that completes the kernel."""
        return self.memory.program.operations[self.index]

    def made_of(self, value: int) -> frozenset[int]:
        """The values in memory that an operand of the last operation is made of."""
        return self._made(self.operation, value)

    def batched_indices(self) -> dict[int, int]:
        """The bytes that gathers have in memory beside the largest of the values that their indices
        are made of, by that: the numbers of the slices that they take of."""
        program, found = self.memory.program, dict[int, int]()
        for number in self.numbers:
            one = program.operations[number]
            if not one.contraction.batch_axes or not program.active[one.inputs[0]]:
                continue
            width = max(shape_of(program, one.inputs[1])[-1], 1)
            columns = width + one.contraction.batch_axes
            size = program.sizes[one.inputs[1]] * columns // width
            made_of = self._made(one, one.inputs[1]) & self.reads
            if made_of:
                source = max(made_of, key=lambda value: (program.sizes[value], value))
                if source >= program.input_count:  # it is no longer there itself
                    size -= program.sizes[source]
                found[source] = max(size, found.get(source, 0))
        return found

    def _last(self) -> int:
        """What makes the result, but for the order of its axes."""
        operations, maker, last = self.memory.program.operations, self.memory.maker, self.index
        while last in self.numbers and operations[last].name == "transpose":
            last = next((maker.get(value, -1) for value in operations[last].inputs), -1)
        return last

    def _made(self, member, value: int) -> frozenset[int]:
        value = member.gathered_operand(value)
        return self._made_of.get(value, frozenset([value]))

    def _add(self, number: int, results: frozenset[int] | None, together: Collection[int]) -> None:
        """An operation; ``results`` are in memory for its own."""
        program = self.memory.program
        member = program.operations[number]
        under = frozenset().union(*(self._made(member, value) for value in member.inputs))
        own = under if results is None else results
        for value in read_by_derivative(member, program.active):
            if value not in member.outputs:
                of = self._made(member, value)
            else:  # of several results the one
                of = frozenset([value]) if value in own else own
            self.reads.update(*(self.memory.read_for((number, one)) for one in of))
        shifts = member.name in _SHIFTS and not member.communication.aligned
        if shifts and not any(value in together for value in member.outputs):
            self.shifted |= under
        if member.name == "transpose":
            self.turned |= under
        if member.fused and gathers_repeatedly(program, member):
            more = program.sizes[member.outputs[0]] - program.sizes[member.inputs[0]]
            self.gathered_again += max(more, 0)
        self._made_of.update(dict.fromkeys(member.outputs, under))

    def read_for_gradients(
        self, by_library: bool, parts: Sequence[int]
    ) -> tuple[frozenset[int], ...]:
        """Where the two operands of a matmul are made of one value each, by the element or not at
        all: what is read for the one, and for the other, and not again once their gradients are
        there. Not where ``parts`` of a gradient's sums take more than what an operand is made of by
        the element: XLA makes that gradient late (docs/limits.md)."""
        program, operation = self.memory.program, self.operation
        if len(self.sources) != 2 or not (is_matmul(operation) or by_library):
            return ()
        members = [program.operations[number] for number in self.numbers[:-1]]
        found = {one: self.memory.read_for((self.index, one)) for one in sorted(self.sources)}
        if all(map(is_view, members)):
            return tuple(found.values())
        operands = {value: self.made_of(value) for value in operation.inputs}
        by_element = all(member.fused for member in members) and all(
            len(of) == 1 and program.sizes[value] == program.sizes[min(of)]
            for value, of in operands.items()
        )
        if not by_element or len(frozenset().union(*operands.values())) != 2:
            return ()
        made_of = [min(of) for value, of in operands.items() if value not in of]
        if max(parts) > min(map(program.sizes.__getitem__, made_of)):
            return ()
        for value, of in operands.items():
            if value not in of:  # what it is made of is read again, where its cotangent is written
                found[min(of)] = frozenset()
        return tuple(found.values())
