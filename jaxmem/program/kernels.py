"""What XLA makes of a program: kernels that read and write values in memory.

An expensive operation is a kernel of its own. Operations that XLA fuses join the kernels that read
their results, every one of them where there are several; a value in between is never in memory.
This is the granularity at which planning pays: what is not in memory costs no bytes to keep and
next to none to make again.
"""

import collections
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxmem.program.convolutions import bytes_of_copies, is_added_by_library, is_by_library
from jaxmem.program.kernel import Aliasing, Gradients, Kernel
from jaxmem.program.operand_pieces import pieces_of_operands, split_matmuls
from jaxmem.program.operands import made_in_matmuls, spread_factors
from jaxmem.program.ragged import copies_of_groups, groups_of
from jaxmem.program.readers import (
    CUTS,
    LOOPS,
    SLICES,
    SMALL,
    dtype_of,
    gathers_repeatedly,
    is_matmul,
    is_view,
    read_by_derivative,
    scatters_few_elements,
    shared_cotangents,
)
from jaxmem.program.row_norms import RowNormalizations, find_row_normalizations
from jaxmem.program.splitting import bytes_of_parts, matmul_of, padded_copies, pads_gradients
from jaxmem.program.stored import REDUCTIONS, reduces_to_few, stored_values
from jaxmem.program.workspaces import float32_copy, for_library, sorted_rows
from jaxmem.targets.links import Ring

# What reads other elements than it writes: its derivative cannot be written over what it read.
_SHIFTS = CUTS | {"concatenate", "pad", "rev"}


def read_kernels(program) -> tuple[Kernel, ...]:
    """Groups the operations of a program as XLA's fusion would."""
    whole = program.unsharded
    in_matmuls = list(range(len(program.sizes)))
    pieces: dict[tuple[int, int], frozenset[int]] = {}
    split: dict[int, tuple[int, ...]] = {}
    read_in_pieces: frozenset[int] = frozenset()
    if elements := program.rules.fuses_elements:
        in_matmuls = made_in_matmuls(whole, functools.partial(reduces_to_few, sizes=whole.sizes))
        pieces, split = pieces_of_operands(program, in_matmuls), split_matmuls(program)
        read_in_pieces = frozenset().union(*pieces.values())
        if elements.behind_pieces:
            read_in_pieces = frozenset(in_matmuls[value] for value in read_in_pieces)
    stored, expensive = stored_values(whole, in_matmuls, read_in_pieces)
    for key, values in pieces.items():
        pieces[key] = frozenset(v if stored[v] else in_matmuls[v] for v in values)
    maker = {}
    for index, operation in enumerate(program.operations):
        for value in operation.outputs:
            maker[value] = index
    readers = collections.Counter(
        value for operation in program.operations for value in {*operation.inputs}
    )

    def is_for_one(value: int) -> bool:
        """Whether it is computed element by element, for one operation."""
        return value in maker and program.operations[maker[value]].fused and readers[value] == 1

    kernels: list[Kernel] = []
    # What is gathered, and not yet: the operand that it is made of.
    gathered = {
        new: (old, ring)
        for operation in program.operations
        for old, new, ring in operation.communication.gathers
    }
    stored.extend([True] * (len(program.sizes) - len(stored)))
    norms = RowNormalizations({}, {})
    if program.rules.blocks_of_rows:
        norms = find_row_normalizations(program, stored, REDUCTIONS)
    cut, copies = _cut(program, stored), copies_of_groups(program)
    together = shared_cotangents(program, whole.sizes)
    spread: dict[int, int] = {}  # bytes of a factor that the matmul for its gradient reads
    reduced = False  # whether the kernel before is a reduction
    read_for: dict[int, set[int]] = {}  # what derivatives read, by what they are of, if it is fused
    for index, operation in enumerate(program.operations):
        results = tuple(value for value in operation.outputs if stored[value])
        if not results:
            continue
        cluster, sources = _cluster(program, [index], stored, maker)
        pending = sorted(sources, reverse=True)
        sending: list[Kernel] = []
        while pending:
            if (source := pending.pop()) in gathered:
                old, ring = gathered.pop(source)
                sending.append(_gather(program, index, old, source, ring, stored, maker))
                pending.extend(sending[-1].sources)  # what is sent may be made of what was sent
        kernels.extend(reversed(sending))
        reads: set[int] = set()
        # What the derivatives read: a stored value itself, of others what they are made of.
        made_of: dict[int, frozenset[int]] = {}
        shifted: frozenset[int] = frozenset()
        turned: frozenset[int] = frozenset()
        gathered_again = 0  # bytes that are read more often than they are there
        ordered = tuple(sorted(cluster))

        def made(member, value: int, made_of=made_of) -> frozenset[int]:
            value = member.gathered_operand(value)
            return made_of.get(value, frozenset([value]))

        last = index  # what makes the result, but for the order of its axes
        while last in cluster and program.operations[last].name == "transpose":
            last = next((maker.get(value, -1) for value in program.operations[last].inputs), -1)
        for number in ordered:
            member = program.operations[number]
            under = frozenset().union(*(made(member, value) for value in member.inputs))
            own = frozenset(results) if number == last else under
            for value in read_by_derivative(member, program.active):
                of = own if value in member.outputs else made(member, value)
                reads.update(*(pieces.get((number, one), (one,)) for one in of))
            shifts = member.name in _SHIFTS and not member.communication.aligned
            if shifts and together.isdisjoint(member.outputs):
                shifted |= under
            if member.name == "transpose":
                turned |= under
            if member.fused and gathers_repeatedly(program, member):
                more = program.sizes[member.outputs[0]] - program.sizes[member.inputs[0]]
                gathered_again += max(more, 0)
            made_of.update(dict.fromkeys(member.outputs, under))
        if operation.residuals is not None:
            reads.add(operation.residuals)
        inside = max(operation.derivative_workspace, copies.get(index, 0))
        inside += sum(cut.pop(number, 0) for number in ordered)
        scattered = 0
        if scatters_few_elements(operation, whole.sizes) and not stored[operation.inputs[0]]:
            # Its derivative scatters into a cotangent of the operand, which it has to write.
            of_few = sum(program.sizes[v] for v in made(operation, operation.inputs[0]))
            scattered = max(program.sizes[operation.inputs[0]] - of_few, 0)
            inside += scattered
        reduces = reduces_to_few(operation, program.sizes)
        # Reductions of the same values are one kernel of several results: it reads them once.
        again = set(kernels[-1].sources) if reduces and reduced else set()
        reduced = reduces
        touched = (*(sources - again), *results)
        moved = gathered_again + sum(program.sizes[value] for value in touched)
        dtype = dtype_of(program, operation.inputs[0]) if operation.inputs else ""
        workspace = max(operation.workspace, sorted_rows(program, operation))
        # (What is reduced may be a number of the program's.)
        takes = reduces or operation.name == "gather"
        if takes and operation.inputs and not stored[operation.inputs[0]]:
            workspace += norms.written_for(operation, program.sizes)
            if program.rules.writes_gathered and operation.name == "gather":
                workspace += program.sizes[operation.inputs[0]]
        library = for_library(program, operation)
        matmul = matmul_of(program, operation)
        forward, gradients = bytes_of_parts(program, operation, matmul)
        parts = {source: size for v, size in gradients.items() for source in made(operation, v)}
        of_operand = functools.partial(made, operation)
        read_to_derive: dict[int, Collection[int]] = {}
        for value in operation.inputs if matmul else ():
            read_to_derive[value] = read_for.get(value, ())
            if not stored[value]:
                derived = read_by_derivative(program.operations[maker[value]], program.active)
                read_to_derive[value] = frozenset().union(*map(of_operand, derived))
        padded = padded_copies(program, operation, matmul, of_operand, read_to_derive)
        copied, copied_again, kept = bytes_of_copies(program, operation, is_for_one)
        copies_kept = padded.kept + kept
        workspace += library + forward + padded.forward + copied
        inside += sum(spread.get(v, 0) for v in operation.inputs) if matmul else 0
        parts_and_whole = max(gradients.values(), default=0)
        if index in split and program.active[left := operation.inputs[0]]:
            # The whole cotangent is there beside its pieces before the gradient that reads it is.
            later = 0 if left < program.input_count else program.sizes[left]
            parts_and_whole = max(parts_and_whole, program.sizes[operation.outputs[0]] - later)
        inside += library + parts_and_whole + padded.backward + copied_again
        rows = norms.sources.get(index, frozenset())
        computed = (v for number in ordered for v in program.operations[number].outputs)
        normalised = norms.sources_of(computed)
        if reduces and program.rules.merges_reductions:
            rows = frozenset(sources)
        spread |= spread_factors(program, operation, sources)
        if operation.widened:
            dtype = "float32"
            left, right, wide = (float32_copy(program, v) for v in (*operation.inputs, *results))
            # What is rounded is made, in the place of what was wide, once the operands are gone.
            workspace += wide // 2
            inside += wide
            if program.as_jax_derives:  # XLA keeps the copies of the operands for the derivative
                pairs = zip(operation.inputs, (left, right), strict=True)
                copies_kept = tuple((value, size) for value, size in pairs if size)
                reads -= dict(copies_kept).keys()
            else:
                workspace += left + right
                inside += left // 2 + right
        if operation.fused and not any(
            program.sizes[one] * SMALL >= program.sizes[results[0]] for one in sources - reads
        ):
            read_for |= dict.fromkeys(results, reads)
        kernels.append(
            Kernel(
                ordered,
                results,
                tuple(sorted(sources)),
                tuple(sorted(reads)),
                operation.flops,
                moved,
                dtype,
                operation.fused,
                inside,
                workspace,
                operation.widened,
                operation.residuals,
                operation.contraction.precision,
                summed_bytes=_sent_for_sum(operation, sum(map(program.sizes.__getitem__, results))),
                ring=operation.communication.summed,
                aliasing=Aliasing(
                    shifted,
                    turned,
                    rows,
                    normalised,
                    is_by_library(program, operation)
                    or is_added_by_library(program, operation, maker, readers)
                    or library > 0
                    or operation.name in LOOPS,
                ),
                scattered=scattered,
                expensive=expensive.issuperset(results),
                gradients=Gradients(
                    _read_for_gradients(program, index, sources, ordered, of_operand, pieces),
                    tuple(parts.get(value, 0) for value in sorted(sources)),
                    copies_kept,
                    groups_of(operation) if program.rules.copies_groups else None,
                    pads_gradients(matmul, program.rules),
                    split.get(index, ()),
                ),
            )
        )
    return tuple(kernels)


def _read_for_gradients(
    program,
    index: int,
    sources: Collection[int],
    ordered: Sequence[int],
    of_operand: Callable[[int], frozenset[int]],
    pieces: Mapping[tuple[int, int], frozenset[int]],
) -> tuple[frozenset[int], ...]:
    """Where the two operands of a matmul are made of one value each, by the element or not at all:
    what is read for the one, and for the other, and not again once their gradients are there."""
    operation = program.operations[index]
    if len(sources) != 2 or not (is_matmul(operation) or is_by_library(program, operation)):
        return ()
    members = [program.operations[number] for number in ordered[:-1]]
    found = {one: pieces.get((index, one), frozenset([one])) for one in sources}
    if all(map(is_view, members)):
        return tuple(found[one] for one in sorted(sources))
    operands = {value: of_operand(value) for value in operation.inputs}
    by_element = all(member.fused for member in members) and all(
        len(of) == 1 and program.sizes[value] == program.sizes[min(of)]
        for value, of in operands.items()
    )
    if not by_element or len(frozenset().union(*operands.values())) != 2:
        return ()
    for value, of in operands.items():
        if value not in of:  # what it is made of is read again, where its cotangent is written
            found[min(of)] = frozenset()
    return tuple(found[one] for one in sorted(sources))


def _cluster(
    program, operations: list[int], stored: list[bool], maker: dict[int, int]
) -> tuple[set[int], set[int]]:
    """The operations that a kernel computes to have the results of some, and what it reads."""
    cluster, pending = set(operations), list(operations)
    sources: set[int] = set()
    while pending:
        member = program.operations[pending.pop()]
        for value in map(member.gathered_operand, member.inputs):
            if stored[value]:
                sources.add(value)
            elif maker[value] not in cluster:
                cluster.add(maker[value])
                pending.append(maker[value])
    return cluster, sources


def _cut(program, stored: list[bool]) -> dict[int, int]:
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
            if stored[value]:
                continue
            read[value] = largest
            cut = readers[value] > 1 and not whole[value] and program.active[value]
            if cut and not made and largest < program.sizes[value]:
                found[number] = program.sizes[value]
            under[value] = made or number in found
    return found


def _gather(
    program,
    index: int,
    value: int,
    result: int,
    ring: Ring,
    stored: list[bool],
    maker: dict[int, int],
) -> Kernel:
    """What devices send each other of a value before an operation."""
    sources = {value}
    if not stored[value]:
        _, sources = _cluster(program, [maker[value]], stored, maker)
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
