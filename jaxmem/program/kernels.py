"""What XLA makes of a program: kernels that read and write values in memory.

An expensive operation is a kernel of its own. Operations that XLA fuses join the kernels that read
their results, every one of them where there are several; a value in between is never in memory.
This is the granularity at which planning pays: what is not in memory costs no bytes to keep and
next to none to make again.
"""

from collections.abc import Iterator, Sequence

from jaxmem.program.convolutions import is_added_by_library, is_by_library
from jaxmem.program.in_memory import InMemory
from jaxmem.program.kernel import Aliasing, Gradients, Kernel
from jaxmem.program.kernel_bytes import BytesBeside
from jaxmem.program.members import Members
from jaxmem.program.ragged import groups_of
from jaxmem.program.readers import LOOPS, dtype_of, shared_cotangents
from jaxmem.program.row_norms import RowNormalizations, find_row_normalizations
from jaxmem.program.stored import REDUCTIONS, reduces_to_few
from jaxmem.program.workspaces import for_library
from jaxmem.targets.links import Ring


def read_kernels(program) -> tuple[Kernel, ...]:
    """Groups the operations of a program as XLA's fusion would."""
    reader, kernels = _KernelReader(program), list[Kernel]()
    for index, operation in enumerate(program.operations):
        results = tuple(value for value in operation.outputs if reader.memory.stored[value])
        if results:
            members = Members(reader.memory, index, results, reader.together)
            before = kernels[-1] if kernels else None
            kernels.extend(reader.sent(members))
            kernels.append(reader.kernel(members, results, before))
    return tuple(kernels)


class _KernelReader:
    """Reads the kernels of a program, one after the other."""

    def __init__(self, program):
        self.program, self.memory = program, InMemory(program)
        self.together = shared_cotangents(program, program.unsharded.sizes)
        self.norms = RowNormalizations((), {}, {})
        if program.rules.blocks_of_rows:
            self.norms = find_row_normalizations(program, self.memory.stored, REDUCTIONS)
        self.normalised = frozenset().union(*self.norms.sources.values())
        self.beside = BytesBeside(self.memory, self.norms)
        # What is gathered, and not yet: the operand that it is made of.
        self.gathered = {
            new: (old, ring)
            for operation in program.operations
            for old, new, ring in operation.communication.gathers
        }

    def sent(self, members: Members) -> Iterator[Kernel]:
        """What devices send each other before a kernel, in the order in which they do."""
        pending, found = sorted(members.sources, reverse=True), list[Kernel]()
        while pending:
            if (source := pending.pop()) in self.gathered:
                old, ring = self.gathered.pop(source)
                found.append(_gather(self.memory, members.index, old, source, ring))
                pending.extend(found[-1].sources)  # what is sent may be made of what was sent
        return reversed(found)

    def kernel(self, members: Members, results: tuple[int, ...], before: Kernel | None) -> Kernel:
        """A kernel, and the one ``before`` it, if there is one."""
        program, operation = self.program, members.operation
        beside = self.beside.of(members, results)
        reads = members.reads
        dtype = dtype_of(program, operation.inputs[0]) if operation.inputs else ""
        if operation.widened:
            dtype = "float32"
            if program.as_jax_derives:
                reads = reads - dict(beside.copies_kept).keys()
        return Kernel(
            operations=members.numbers,
            results=results,
            sources=tuple(sorted(members.sources)),
            reads=tuple(sorted(reads)),
            flops=operation.flops,
            moved=self._moved(members, results, before),
            dtype=dtype,
            fused=operation.fused,
            derivative_workspace=beside.backward,
            workspace=beside.forward,
            widened=operation.widened,
            residuals=operation.residuals,
            precision=operation.contraction.precision,
            summed_bytes=_sent_for_sum(operation, sum(map(program.sizes.__getitem__, results))),
            ring=operation.communication.summed,
            aliasing=self._aliasing(members),
            scattered=beside.scattered,
            expensive=self.memory.expensive.issuperset(results),
            gradients=Gradients(
                operands=members.read_for_gradients(
                    is_by_library(program, operation), beside.parts
                ),
                split_k_bytes=beside.parts,
                operand_copies=beside.copies_kept,
                ragged_groups=groups_of(operation) if program.rules.copies_groups else None,
                padded=beside.pads,
                numbers=tuple(members.batched_indices().items()),
                result_pieces=self.memory.split.get(members.index, ()),
            ),
        )

    def _moved(self, members: Members, results: Sequence[int], before: Kernel | None) -> int:
        """Bytes read and written. Reductions of the same values are one kernel of several results:
        it reads them once."""
        sizes, sources = self.program.sizes, members.sources
        if before and self._reduces(members.operation):
            last = self.program.operations[before.operations[-1]]
            if self._reduces(last):
                sources = sources.difference(before.sources)
        return members.gathered_again + sum(sizes[value] for value in (*sources, *results))

    def _reduces(self, operation) -> bool:
        return reduces_to_few(operation, self.program.sizes)

    def _aliasing(self, members: Members) -> Aliasing:
        program, operation = self.program, members.operation
        rows = self.norms.sources.get(members.index, frozenset())
        if program.rules.merges_reductions and self._reduces(operation):
            rows = frozenset(members.sources)
        computed = (v for number in members.numbers for v in program.operations[number].outputs)
        in_tuple = (
            operation.name in LOOPS
            or for_library(program, operation) > 0
            or is_by_library(program, operation)
            or is_added_by_library(program, operation, self.memory.maker, self.beside.readers)
        )
        expensive = self.memory.expensive.intersection(operation.outputs)
        return Aliasing(
            offset_reads=members.shifted,
            transposed=members.turned,
            read_by_rows=self.norms.sources_of_written(operation.outputs),
            row_reduced=rows,
            row_normalized=self.norms.sources_of(computed),
            in_tuple=in_tuple,
            beside_rows=not self.normalised.isdisjoint(expensive),
        )


def _gather(memory: InMemory, index: int, value: int, result: int, ring: Ring) -> Kernel:
    """What devices send each other of a value before an operation."""
    program, sources = memory.program, {value}
    if not memory.stored[value]:
        _, sources = memory.cluster([memory.maker[value]])
    read = sum(program.sizes[source] for source in sources)
    # What it has already is not sent to it. Pieces along another axis are no larger than those that
    # it had: of them at least the half is another's (derived; on two devices it is the half).
    sent = max(program.sizes[result] - program.sizes[value], program.sizes[result] // 2, 1)
    return Kernel(
        operations=(index,),
        results=(result,),
        sources=tuple(sorted(sources)),
        reads=(),
        flops=0,
        moved=read + program.sizes[result],
        dtype="",
        fused=False,
        derivative_workspace=0,
        workspace=0,
        widened=False,
        residuals=result,
        sent_bytes=sent,
        ring=ring,
    )


def _sent_for_sum(operation, size: int) -> int:
    """What each device sends where a result of that size is summed, in a ring: pieces of it once to
    be summed, and once as they are then."""
    ring = operation.communication.summed
    devices = ring.devices if ring else 1
    return 2 * size * (devices - 1) // devices
