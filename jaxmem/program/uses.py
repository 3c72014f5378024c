"""What becomes of the values of a program, in the kernels that read them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.program.costs import CONTRACTIONS
from jaxmem.program.norms import Norms, find_norms
from jaxmem.program.readers import (
    CUTS,
    SMALL,
    dtype_of,
    is_matmul,
    is_view,
    read_by_contractions,
    readers_of,
    reads_few_elements,
    views_of,
)

_CONCATENATES = frozenset({"concatenate", "pad"})
# What a value is made of is told apart up to so many arrays, the last ones. Chosen: it bounds the
# time that sums over all layers take. Of 128 programs the projections are the same at 64, and all
# but one at 4.
_MANY = 16


class Uses:
    """Of a program (`Program`); ``reduces`` says of an operation whether it makes little of much,
    ``read_for`` of a value what matmuls read for it, ``wanted`` whether it is in memory in any
    case."""

    def __init__(
        self,
        program: Any,
        reduces: Callable[[Any], bool],
        read_for: Sequence[int],
        wanted: Sequence[bool],
    ):
        self.program, self.reduces, self.read_for = program, reduces, read_for
        self.wanted = wanted

    @functools.cached_property
    def shared(self) -> list[bool]:
        """For each value whether several read it, operations or derivatives. (What is put beside
        others by all that read it is there: its own derivative reads it there.)"""
        readers = readers_of(self.program)
        moved = [True] * len(self.program.sizes)
        for operation in self.program.operations:
            for value in operation.inputs:
                moved[value] &= operation.name in _CONCATENATES
        for operation in self.program.operations:
            for value in operation.outputs:
                if moved[value] and operation.reads and value in operation.reads:
                    readers[value] -= 1
        for shown, view in views_of(self.program):
            readers[shown] += readers[view] - 1
        return [readers[value] > 1 for value in range(len(self.program.sizes))]

    @functools.cached_property
    def read_only_by_matmuls(self) -> list[bool]:
        """For each value whether only matmuls read what becomes of it, which compute that as they
        read: the backward pass alone computes it again."""
        if not self.program.rules.fuses_elements:
            return [False] * len(self.program.sizes)
        return self._all_consumers(
            lambda operation: operation.name == "dot_general",
            lambda operation: all(self.read_for[v] != v for v in operation.outputs),
        )

    @functools.cached_property
    def materialized_later(self) -> list[bool]:
        """For each value whether what becomes of it ends in memory, since matmuls or convolutions
        read it; what else reads that does not matter any more."""
        return self._ending(self.for_contractions, CONTRACTIONS)

    @functools.cached_property
    def normalised_later(self) -> list[bool]:
        """For each value whether what becomes of it is normalised."""
        return self._ending(self.norms.normalised)

    def _ending(self, wanted: Sequence[bool], readers: frozenset[str] = frozenset()) -> list[bool]:
        """For each value whether what becomes of it is ``wanted``, or read by some operations."""
        return self._all_consumers(
            lambda operation: (
                operation.name in readers
                or (
                    operation.fused
                    and not self.reduces(operation)
                    and all(wanted[value] for value in operation.outputs)
                )
            ),
            lambda operation: not self.reduces(operation),
        )

    @functools.cached_property
    def norms(self) -> Norms:
        """Which values are normalised."""
        return find_norms(self.program, self.reduces)

    @functools.cached_property
    def for_contractions(self) -> list[bool]:
        """For each value whether a matmul or a convolution reads it."""
        return read_by_contractions(self.program)

    @functools.cached_property
    def matmul_axes(self) -> dict[int, int]:
        """The results of matmuls, and how many axes XLA makes each with: none of those that it
        computes in float32 and rounds, and of complex ones, of whose parts are written what is
        read."""
        return {
            value: 3 if operation.contraction.batched else 2
            for operation in self.program.operations
            if is_matmul(operation) and not operation.widened
            for value in operation.outputs
            if not dtype_of(self.program, value).startswith("complex")
        }

    @functools.cached_property
    def fused_readers(self) -> list[list[Any]]:
        """For each value the fused operations that read it, and do not reduce it."""
        found: list[list[Any]] = [[] for _ in self.program.sizes]
        for operation in self.program.operations:
            if operation.fused and not self.reduces(operation):
                for value in set(operation.inputs):
                    found[value].append(operation)
        return found

    @functools.cached_property
    def kernel_counts(self) -> list[int]:
        """For each value how many kernels read it if it is computed in each: those of the forward
        pass, and one for all that the derivative makes, or two where a gate has cotangents of its
        own."""
        return self._kernel_counts[1]

    @functools.cached_property
    def forward_kernel_counts(self) -> list[int]:
        """The same of the forward pass: up to three that end in what is ``wanted`` in memory or a
        reduction."""
        return self._kernel_counts[0]

    @functools.cached_property
    def _kernel_counts(self) -> tuple[list[int], list[int]]:
        """What is made of several arrays and read by three kernels is in memory, too."""
        count = len(self.program.sizes)
        ends: list[frozenset[int]] = [frozenset()] * count
        gated = [value in self.gates for value in range(count)]

        def kernels(value: int) -> int:
            return len(ends[value]) + (1 + gated[value]) * self.program.active[value]

        for operation in reversed(self.program.operations):
            for result in operation.outputs:
                written = not is_view(operation) and (
                    not operation.fused
                    or self.wanted[result]
                    or self.reduces(operation)
                    or (kernels(result) > 2 and len(self.made_of[result]) > 1)
                )
                for value in operation.inputs:
                    more = frozenset([result]) if written else ends[result]
                    ends[value] = frozenset(sorted(ends[value] | more)[-3:])
                    gated[value] |= gated[result] and not written
        return [len(one) for one in ends], [kernels(value) for value in range(count)]

    @functools.cached_property
    def fused_of(self) -> list[tuple[int, ...]]:
        """For each value what the fused operation that makes it reads."""
        found: list[tuple[int, ...]] = [()] * len(self.program.sizes)
        for operation in self.program.operations:
            for value in operation.outputs if operation.fused else ():
                found[value] = operation.inputs
        return found

    @functools.cached_property
    def gates(self) -> dict[int, bool]:
        """The values that are multiplied with what is made of other arrays, and not of the same, so
        that the cotangents of both are made apart; whether either is made of slices, whose
        cotangents are put together."""
        active, made_of = self.program.active, self.made_of
        # By slices, what these are of, and that of in turn.
        cut: dict[int, frozenset[int]] = {}
        for operation in self.program.operations:
            if operation.name in CUTS and operation.inputs:  # no number of the program's
                whole = made_of[operation.inputs[0]]
                whole |= frozenset().union(*(cut.get(value, frozenset()) for value in whole))
                cut |= dict.fromkeys(operation.outputs, whole)

        def with_wholes(values: frozenset[int]) -> frozenset[int]:
            return values.union(*(cut.get(value, frozenset()) for value in values))

        found: dict[int, bool] = {}
        for operation in self.program.operations:
            if operation.name != "mul" or not operation.fused or len(operation.inputs) != 2:
                continue
            one, other = operation.inputs
            parts, others = made_of[one], made_of[other]
            if not (parts and others and active[one] and active[other]):
                continue
            if with_wholes(parts).isdisjoint(others) and with_wholes(others).isdisjoint(parts):
                of_slices = not cut.keys().isdisjoint(parts | others)
                found |= dict.fromkeys((one, other), of_slices)
        return found

    @functools.cached_property
    def made_of(self) -> list[frozenset[int]]:
        """For each value the wide ones that it is computed of, element by element: what no kernel
        makes so, and slices; of many, some."""
        sizes = self.program.sizes
        found = [frozenset([value]) for value in range(len(sizes))]
        for operation in self.program.operations:
            if operation.fused and not self.reduces(operation) and operation.name not in CUTS:
                for result in operation.outputs:
                    wide = [v for v in operation.inputs if sizes[v] * SMALL >= sizes[result]]
                    parts = frozenset().union(*(found[value] for value in wide))
                    found[result] = frozenset(sorted(parts)[-_MANY:])
        return found

    @functools.cached_property
    def broadcast_later(self) -> list[bool]:
        """For each value whether something several times as large is made of it, or of a view."""
        sizes, found = self.program.sizes, [False] * len(self.program.sizes)
        for operation in reversed(self.program.operations):
            for result in operation.outputs:
                for value in operation.inputs:
                    shown = is_view(operation) or adds_axes(self.program, operation)
                    found[value] |= sizes[result] >= 2 * sizes[value] or (shown and found[result])
        return found

    @functools.cached_property
    def sparsely_read(self) -> list[bool]:
        """For each value whether few elements of it are computed, since no more are read."""
        picks = functools.partial(reads_few_elements, sizes=self.program.sizes)
        return self._all_consumers(picks, lambda operation: not self.reduces(operation))

    def _all_consumers(
        self, at: Callable[[Any], bool], through: Callable[[Any], bool]
    ) -> list[bool]:
        """For each value whether all that reads it is of one kind, or is fused, of another, and
        read by the former alone."""
        found = [True] * len(self.program.sizes)
        for value in self.program.outputs:
            found[value] = False
        for operation in reversed(self.program.operations):
            passes = at(operation) or (
                operation.fused
                and through(operation)
                and all(found[value] for value in operation.outputs)
            )
            for value in operation.inputs:
                found[value] &= passes
        return found


def adds_axes(program: Any, operation: Any) -> bool:
    """Whether it has its operand with axes of one element."""
    sizes = program.sizes
    return operation.name == "broadcast_in_dim" and (
        [sizes[value] for value in operation.inputs] == [sizes[operation.outputs[0]]]
    )
