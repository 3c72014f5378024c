"""The bytes that a kernel, and its derivative, take beside what they read and make."""

import collections
import dataclasses
from collections.abc import Collection, Sequence

from jaxmem.program.convolutions import bytes_of_copies
from jaxmem.program.in_memory import InMemory
from jaxmem.program.members import Members
from jaxmem.program.operands import spread_factors
from jaxmem.program.poolings import scattered_places
from jaxmem.program.ragged import copies_of_groups
from jaxmem.program.readers import (
    SLICES,
    SMALL,
    is_matmul,
    read_by_derivative,
    scatters_few_elements,
)
from jaxmem.program.row_norms import RowNormalizations
from jaxmem.program.splitting import bytes_of_parts, matmul_of, padded_copies, pads_gradients
from jaxmem.program.stored import reduces_to_few
from jaxmem.program.workspaces import float32_copy, for_library, sorted_apart


@dataclasses.dataclass(frozen=True, slots=True)
class KernelBytes:
    """The bytes beside a kernel.

    Attributes:
        forward, backward: that it takes, and that its derivative does.
        scattered: see `Kernel.scattered`.
        parts: those of parts of sums that the gradient of each source takes.
        copies_kept: operands, and the bytes of copies of them that are kept for the derivative.
        pads: whether a gradient reads a padded operand.
    """

    forward: int
    backward: int
    scattered: int
    parts: tuple[int, ...]
    copies_kept: tuple[tuple[int, int], ...]
    pads: bool


class BytesBeside:
    """Reads them, kernel by kernel in their order."""

    def __init__(self, memory: InMemory, norms: RowNormalizations):
        self.memory, self.norms, self.program = memory, norms, memory.program
        self.readers = collections.Counter(
            value for operation in self.program.operations for value in {*operation.inputs}
        )
        self._cut = _cut(self.program, memory)
        self._copies = copies_of_groups(self.program)
        # Bytes of a factor that the matmul for its gradient reads.
        self._spread: dict[int, int] = {}
        # What derivatives read, by what they are of, if it is fused.
        self._read_for: dict[int, set[int]] = {}

    def of(self, members: Members, results: Sequence[int]) -> KernelBytes:
        """The bytes beside a kernel with some operations and results."""
        program, operation = self.program, members.operation
        scattered = self._scattered(members)
        matmul = matmul_of(program, operation)
        in_parts, gradients = bytes_of_parts(program, operation, matmul)
        parts = {source: size for v, size in gradients.items() for source in members.made_of(v)}
        read_to_derive = self._read_to_derive(members) if matmul else {}
        padded = padded_copies(program, operation, matmul, members.made_of, read_to_derive)
        copied, copied_again, kept = bytes_of_copies(
            program, operation, self._is_for_one, self._is_in_its_derivative
        )
        copies_kept = padded.kept + kept
        library = for_library(program, operation)
        forward = operation.workspace
        if operation.name == "top_k":
            read = {*self.readers, *program.outputs}
            read |= members.reads if operation.outputs[0] in read else set()
            forward = sorted_apart(program, operation, read)
        forward += self._written(operation) + library + in_parts + padded.forward + copied
        backward = max(operation.derivative_workspace, self._copies.get(members.index, 0))
        backward += sum(self._cut.pop(number, 0) for number in members.numbers) + scattered
        backward += sum(self._spread.get(v, 0) for v in operation.inputs) if matmul else 0
        backward += scattered_places(program, operation)
        backward += self._first_of_two_gradients(members) if matmul else 0
        backward += library + padded.backward + copied_again
        backward += max(max(gradients.values(), default=0), self._whole_beside_pieces(members))
        self._spread |= spread_factors(program, operation, members.sources)
        if operation.widened:
            left, right, wide = (float32_copy(program, v) for v in (*operation.inputs, *results))
            # What is rounded is made, in the place of what was wide, once the operands are gone.
            forward += wide // 2
            backward += wide
            if program.as_jax_derives:  # XLA keeps the copies of the operands for the derivative
                pairs = zip(operation.inputs, (left, right), strict=True)
                copies_kept = tuple((value, size) for value, size in pairs if size)
            else:
                forward += left + right
                backward += left // 2 + right
        if operation.fused and not any(
            program.sizes[one] * SMALL >= program.sizes[results[0]]
            for one in members.sources - members.reads
        ):
            self._read_for |= dict.fromkeys(results, members.reads)
        by_source = tuple(parts.get(value, 0) for value in sorted(members.sources))
        pads = pads_gradients(matmul, program.rules)
        return KernelBytes(forward, backward, scattered, by_source, copies_kept, pads)

    def _is_for_one(self, value: int) -> bool:
        """Whether it is computed element by element, for one operation."""
        maker = self.memory.maker.get(value)
        return maker is not None and (
            self.program.operations[maker].fused and self.readers[value] == 1
        )

    def _is_in_its_derivative(self, value: int) -> bool:
        """Whether the derivative of what makes it reads it."""
        maker = self.memory.maker.get(value)
        return maker is not None and self.program.operations[maker].derivative_reads == "result"

    def _first_of_two_gradients(self, members: Members) -> int:
        """Of a matmul of a value with itself (`x @ x.T`, the interactions of DLRM), or with what is
        computed of it: the gradient by one operand, which waits to be added to the other one. (The
        newest compiler adds both up in the matmul that reads their sum.)"""
        program, inputs = self.program, members.operation.inputs
        if len(inputs) < 2 or not all(program.active[value] for value in inputs):
            return 0
        one, other = map(members.made_of, inputs)
        sizes = {program.sizes[value] for value in (*inputs, *one)}
        if one != other or len(one) != 1 or len(sizes) != 1:
            return 0
        maker = self.memory.maker.get(*one)
        of_matmul = maker is not None and is_matmul(program.operations[maker])
        elements = program.rules.fuses_elements
        adds_up = elements is not None and elements.behind_pieces and inputs[0] == inputs[1]
        return 0 if adds_up and of_matmul else sizes.pop()

    def _scattered(self, members: Members) -> int:
        """Of a kernel whose derivative scatters into a cotangent of the operand, which it has to
        write."""
        program, operation = self.program, members.operation
        few = scatters_few_elements(operation, program.unsharded.sizes)
        if not few or self.memory.stored[operation.inputs[0]]:
            return 0
        of_few = sum(program.sizes[value] for value in members.made_of(operation.inputs[0]))
        return max(program.sizes[operation.inputs[0]] - of_few, 0)

    def _written(self, operation) -> int:
        """Of an array that is in memory because elements of it are taken, or sums over it."""
        program = self.program
        gathers = operation.name == "gather"
        # (What is reduced may be a number of the program's.)
        if not operation.inputs or self.memory.stored[operation.inputs[0]]:
            return 0
        if not (gathers or reduces_to_few(operation, program.sizes)):
            return 0
        own = program.sizes[operation.inputs[0]] if program.rules.writes_gathered and gathers else 0
        return self.norms.written_for(operation, program.sizes) + own

    def _read_to_derive(self, members: Members) -> dict[int, Collection[int]]:
        """What the derivatives of what the operands of a matmul are made of read."""
        program, found = self.program, dict[int, Collection[int]]()
        for value in members.operation.inputs:
            found[value] = self._read_for.get(value, ())
            if not self.memory.stored[value]:
                maker = program.operations[self.memory.maker[value]]
                derived = read_by_derivative(maker, program.active)
                found[value] = frozenset().union(*map(members.made_of, derived))
        return found

    def _whole_beside_pieces(self, members: Members) -> int:
        """Of a cotangent that is there whole beside its pieces, before the gradient that reads it
        is."""
        program, operation = self.program, members.operation
        if members.index not in self.memory.split:
            return 0
        left = operation.inputs[0]
        if not program.active[left]:
            return 0
        later = 0 if left < program.input_count else program.sizes[left]
        return program.sizes[operation.outputs[0]] - later


def _cut(program, memory: InMemory) -> dict[int, int]:
    """Operations whose results are in no memory and larger than what they are made of, and are cut
    into slices alone: the bytes of the cotangent, which is there whole. Of what is made of such
    slices in turn it is not, beside that."""
    readers = [0] * len(program.sizes)
    whole = [False] * len(program.sizes)
    for operation in program.operations:
        for value in operation.inputs:
            readers[value] += 1
            whole[value] |= operation.name not in SLICES
    found: dict[int, int] = {}
    under = [False] * len(program.sizes)  # whether it is made of what was found
    read = list(program.sizes)  # the largest that is read for a value
    for number, operation in enumerate(program.operations):
        made = any(under[value] for value in operation.inputs)
        largest = max((read[value] for value in operation.inputs), default=0)
        for value in operation.outputs:
            if memory.stored[value]:
                continue
            read[value] = largest
            cut = readers[value] > 1 and not whole[value] and program.active[value]
            if cut and not made and largest < program.sizes[value]:
                found[number] = program.sizes[value]
            under[value] = made or number in found
    return found
