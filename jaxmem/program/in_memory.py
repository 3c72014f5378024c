"""Which values of a program XLA has in memory, and what is read for the others."""

import functools
from collections.abc import Iterable

from jaxmem.program.operand_pieces import pieces_of_operands, split_matmuls
from jaxmem.program.operands import made_in_matmuls
from jaxmem.program.readers import views_of
from jaxmem.program.stored import reduces_to_few, stored_values


class InMemory:
    """The values of a program that are in memory.

    Attributes:
        stored: whether a value is, by its number.
        expensive: those that are because they are expensive to compute again, and for no other
            reason.
        pieces: what is read for the operand of an operation, by the numbers of both, where that is
            no one value.
        split: of matmuls whose results are read in pieces alone, the bytes of these.
    """

    def __init__(self, program):
        whole = program.unsharded
        self.program = program
        in_matmuls = list(range(len(program.sizes)))
        pieces: dict[tuple[int, int], frozenset[int]] = {}
        self.split: dict[int, tuple[int, ...]] = {}
        read_in_pieces: frozenset[int] = frozenset()
        if elements := program.rules.fuses_elements:
            reduces = functools.partial(reduces_to_few, sizes=whole.sizes)
            in_matmuls = made_in_matmuls(whole, reduces)
            pieces, self.split = pieces_of_operands(program, in_matmuls), split_matmuls(program)
            read_in_pieces = frozenset().union(*pieces.values())
            if elements.behind_pieces:
                read_in_pieces = frozenset(in_matmuls[value] for value in read_in_pieces)
        self.stored, self.expensive = stored_values(whole, in_matmuls, read_in_pieces)
        shown = {view: value for value, view in views_of(whole)}

        def read(piece: int) -> int:
            """What is in memory of it: it is computed in the matmul, or a view."""
            while not self.stored[piece]:
                piece = in_matmuls[piece] if in_matmuls[piece] != piece else shown[piece]
            return piece

        self.pieces = {key: frozenset(map(read, values)) for key, values in pieces.items()}
        self.stored.extend([True] * (len(program.sizes) - len(self.stored)))  # what is gathered
        self.maker = {
            value: index
            for index, operation in enumerate(program.operations)
            for value in operation.outputs
        }

    def cluster(self, operations: Iterable[int]) -> tuple[set[int], set[int]]:
        """The operations that a kernel computes to have the results of some, and what it reads."""
        cluster, pending = set(operations), list(operations)
        sources: set[int] = set()
        while pending:
            member = self.program.operations[pending.pop()]
            for value in map(member.gathered_operand, member.inputs):
                if self.stored[value]:
                    sources.add(value)
                elif self.maker[value] not in cluster:
                    cluster.add(self.maker[value])
                    pending.append(self.maker[value])
        return cluster, sources

    def read_for(self, operand: tuple[int, int]) -> frozenset[int]:
        """What is read for the operand of an operation, by the numbers of both."""
        return self.pieces.get(operand, frozenset([operand[1]]))
