"""What is computed once, because it is expensive to compute again.

By rules with `Cycles` XLA computes an element-by-element operation in every kernel that reads its
result, unless that takes longer than to write the result once and to read it (its priority
fusion). The backward pass is one more reader: of a `tanh`, whose derivative reads the result, and
of what is between two of them.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxmem.program.readers import (
    CUTS,
    SMALL,
    dtype_of,
    is_view,
    reads_few_elements,
    shape_of,
)
from jaxmem.program.uses import Uses, adds_axes

# Times as long as it takes to move an array: computing longer than that and than it takes to start
# one more kernel is expensive. If a value is computed in both of its readers, it need not be
# written once and read twice, and what it is made of is read once more; most kernels move another
# array or two meanwhile. Derived, 3 to 5: of those 4 is best for chains of ten functions on several
# targets (tests/test_repeats.py has some of them).
_EXPENSIVE = 4
# The same where what becomes of it ends in memory, since matmuls read that (a `gelu`, and the
# derivative of it). Derived: a kernel that moves three arrays, and one that moves four, compute
# meanwhile. Here and above, each other array that such a kernel reads gives it as much more time.
_EXPENSIVE_IN_MEMORY = 7
# The same where what becomes of it is normalised: several kernels read that, and it is in memory.
# Measured with activations and five norms for two targets: of what takes as long as moving 8
# arrays nothing else is kept, and of 9.7 it is (tests/test_activations_normalised.py).
_EXPENSIVE_BEFORE_NORM = 8.5
# What is normalised is computed in several kernels in place of one: all but one of these together.
# Measured with the same: of 2.45 arrays it is in memory, of 2.3 it is not.
_EXPENSIVE_IN_NORM = 2.4
# The same of a value that is multiplied with one that is made of other arrays: it is read for the
# product, and for the cotangent of the other one; and where both are slices of one array, whose
# cotangent has a part of each. Measured with chains of `exp` for two targets: of what takes as long
# as moving 4.95 arrays nothing is written in the one case, and of 5.66 it is; 3.4 and 3.96 in the
# other (tests/test_gates.py).
_EXPENSIVE_IN_GATE = 5.3
_EXPENSIVE_IN_GATE_OF_SLICES = 3.7
# Arrays as large as a value that its readers move beside what it is made of: for the forward pass
# one is read and one written, for the backward pass one more is read, and one again. Derived.
_MOVED_BY_READERS = (2, 4)
# How much of the shorter of computing and moving is not hidden by the longer. Derived: as XLA
# counts (its model of performance).
_NOT_HIDDEN = 0.05
# Times as fast as from memory an array is read that the cache holds. Derived: as XLA counts.
_CACHED = 2.5
# Values that are looked at for what a kernel reads with one. Derived: no kernel has more operations
# (`kernels._CHAIN`).
_LOOK_AHEAD = 64
# XLA computes these in bfloat16, where they have no cycles; all others in float32.
_IN_BFLOAT16 = frozenset("div exp log logistic rsqrt sqrt".split())
_BYTES = {"bfloat16": 2, "float16": 2, "float64": 8, "complex64": 8, "complex128": 16}


class Repeats:
    """The values of a program (`Program`) that are expensive to compute again."""

    def __init__(self, uses: Uses):
        program = self.program = uses.program
        self.uses, self.reduces, self.cycles = uses, uses.reduces, program.rules.cycles
        count = len(program.sizes)
        # For each value the expensive operations that it is made of, by their results, as far as
        # they are computed for it: the cycles of one element. And what may be kept to shorten that.
        self.made_of: list[Mapping[int, int]] = [{}] * count
        self.shortcut: list[int | None] = [None] * count
        self.view_source = list(range(count))
        self.is_row, self.is_normalised = [False] * count, [False] * count
        # For each value the bytes that are read through views to compute it.
        self.viewed = [0] * count
        # For each value the last one on the way to it that is expensive, if all that is wide since
        # is made of that one.
        self.last_expensive: list[int | None] = [None] * count
        # Whether a value is computed of places (a causal mask is), since the last expensive one.
        self.of_places = [False] * count
        # Values that are expensive, and so in memory.
        self.written: set[int] = set()
        # For each value the wide ones in memory that it is computed of.
        self.sources: list[frozenset[int]] = [frozenset()] * count

    def materialized(self, operation: Any, stored: Sequence[bool]) -> Iterator[int]:
        """The values that are in memory because one more operation is computed of them, or because
        they are its results. The operations come in their order; ``stored`` are the values that are
        in memory so far."""
        if self.cycles is None:
            return
        sizes = self.program.sizes
        for result in operation.outputs:
            wide = {v for v in operation.inputs if sizes[v] * SMALL >= sizes[result]}
            fresh = [v for v in wide if not stored[v]]
            self.sources[result] = frozenset(wide.difference(fresh)).union(
                *(self.sources[value] for value in fresh)
            )
            row = any(self.is_row[v] for v in operation.inputs)
            normalised = row and not all(self.is_row[v] for v in wide)
            normalised |= any(self.is_normalised[v] for v in fresh)
            self.is_normalised[result] = operation.fused and normalised
            self.is_row[result] = self.reduces(operation) or (row and not normalised)
            self.viewed[result] = self._bytes_through_views(operation, wide, stored)
            places = any(self.of_places[value] for value in operation.inputs)
            self.of_places[result] = operation.name == "iota" or (operation.fused and places)
            if is_view(operation) or adds_axes(self.program, operation):
                (value,) = operation.inputs
                self.view_source[result] = self.view_source[value]
                self.last_expensive[result] = self.last_expensive[value]
                if fresh:
                    self.made_of[result] = self.made_of[value]
                    self.shortcut[result] = self.shortcut[value]
            elif operation.fused and not (
                self.uses.sparsely_read[result] or reads_few_elements(operation, sizes)
            ):
                read = [value for value in wide if stored[value] or self.sources[value]]
                only = read[0] if len(read) == 1 and read[0] in fresh else None
                for value in self._materialized(operation, result, fresh, only, stored):
                    self.written.add(self.view_source[value])
                    yield self.view_source[value]

    def _materialized(
        self,
        operation: Any,
        result: int,
        fresh: Sequence[int],
        only: int | None,
        stored: Sequence[bool],
    ) -> Iterator[int]:
        """``only``: the wide one that it is computed of, in no memory so far, if it is one."""
        sizes, fuses = self.program.sizes, bool(self.program.rules.fuses_elements)
        ends = fuses and self.uses.materialized_later[result] and not self.is_normalised[result]
        own = self._cycles_of(operation, result)
        if own:
            self.last_expensive[result], self.of_places[result] = result, False
        elif only is not None:
            self.last_expensive[result] = self.last_expensive[only]
        # What its derivative makes besides, where the value would be made again. (What is spread
        # out is in memory in any case, for the first that spreads it.)
        derivative_cycles = (
            0
            if self.uses.broadcast_later[result]
            else self._cycles(result, operation.source.derivative_calls)
        )
        moves: float = _EXPENSIVE_IN_MEMORY if ends else _EXPENSIVE
        # (A layer norm is one kernel where rows are normalised in blocks.)
        in_one = self.program.rules.blocks_of_rows and self.uses.norms.summed_by_rows[result]
        is_normalised = self.uses.norms.normalised[result] and not self.is_normalised[result]
        if is_normalised and not in_one:
            more = self.uses.forward_kernel_counts[result] - 1
            moves, derivative_cycles = _EXPENSIVE_IN_NORM / max(more, 1), 0
        elif self.uses.normalised_later[result] and not self.is_normalised[result]:
            moves = _EXPENSIVE_BEFORE_NORM
        elif own or any(self.made_of[value] for value in fresh):  # else nothing is expensive
            beside = self._fused_operand_count(result, stored)
            moves += beside
            if (of_slices := self.uses.gates.get(result)) is not None:
                gate = _EXPENSIVE_IN_GATE_OF_SLICES if of_slices else _EXPENSIVE_IN_GATE
                own_sources = self.sources[result] - self.written
                moves = min(moves, gate + max(beside - len(own_sources), 0))
        expensive = self._hidden_cycles(result, moves)
        cycles: dict[int, int] = {}
        shortcuts = []
        for value in fresh:
            times = sizes[result] / max(sizes[value], 1)
            if times >= 2 and times * self._cycles_per_element(value) > expensive:
                yield value  # each of its elements would be computed for several
                continue
            cycles |= self.made_of[value]
            worth = self._cycles_per_element(value) > self._hidden_cycles(value, 0)
            shortcut = value if worth and self._may_be_materialized(value) else self.shortcut[value]
            if shortcut is not None:
                shortcuts.append(shortcut)
        if own:
            cycles[result] = own
        # Where several kernels read the result, what is on the way to it helps none.
        shortcuts = [] if is_normalised else sorted(shortcuts, key=self._cycles_per_element)
        while shortcuts and sum(cycles.values()) > expensive:
            yield (shortcut := shortcuts.pop())
            self.viewed[result] = max(self.viewed[result] - self.viewed[shortcut], 0)
            for part in self.made_of[shortcut]:
                cycles.pop(part, None)
        total = sum(cycles.values())
        may_be_kept = self._may_be_materialized(result)
        in_norm = self.uses.norms.normalised[result] or self.is_normalised[result]
        in_norm = in_norm or self.uses.normalised_later[result]
        reads_again = may_be_kept and not in_norm and self._is_faster_written(result, total)
        if total + derivative_cycles > expensive or reads_again:
            if may_be_kept:
                yield self._kept_of_norm(result) if is_normalised else result
                cycles = {}
            else:
                cycles = {result: total}  # what it is made of in turn does not matter any more
        self.made_of[result] = cycles
        self.shortcut[result] = shortcuts[-1] if shortcuts else None

    def _kept_of_norm(self, result: int) -> int:
        """What is in memory of a value that is normalised: what is cheap to compute of the last
        expensive one alone (a soft cap's product, and a mask) is computed where it is read. Where
        rows are not normalised in one kernel, no mask is that is computed of places itself, as is
        measured with causal ones and with masks that are given (tests/test_soft_caps.py)."""
        last, in_one = self.last_expensive[result], self.program.rules.blocks_of_rows
        if last is None or not self._may_be_materialized(last):
            return result
        return last if in_one or not self.of_places[result] else result

    def _bytes_through_views(
        self, operation: Any, operands: Iterable[int], stored: Sequence[bool]
    ) -> int:
        """The bytes that a kernel reads for an operation through views. XLA has the results of
        matmuls with two axes, or three, and all others are views of them. It counts what one kernel
        reads of an array element by element once, but for each operation that reads a view."""
        sizes, (result, *_) = self.program.sizes, operation.outputs
        found = 0
        for value in operands:
            source = self.view_source[value]
            bytes_read = self.viewed[value]
            if stored[source]:
                is_read = not is_view(operation) and self._is_view_of(value, source)
                bytes_read = sizes[source] if is_read else 0
            if operation.name in CUTS:
                bytes_read = bytes_read * sizes[result] // max(sizes[value], 1)
            found += bytes_read
        return found * operation.source.operand_reads

    def _is_view_of(self, value: int, matmul_result: int) -> bool:
        axes = self.uses.matmul_axes.get(matmul_result)
        return axes is not None and len(shape_of(self.program, value)) > axes

    def _is_faster_written(self, result: int, cycles: int) -> bool:
        """Whether it takes less time to write a value and to read it twice than to compute it
        again, for what is read through views meanwhile, from the cache if it fits. (Where computing
        takes longer than reading, or what reads the value does, cycles decide. Of masks, a quarter
        as large, nothing is known.)"""
        size, dtype = self.program.sizes[result], dtype_of(self.program, result)
        if not self.viewed[result] or dtype == "bool":
            return False
        read = self.viewed[result] / (_CACHED if size <= self.cycles.cached_bytes else 1)
        wide = self.program.rules.keeps_float32 and dtype == "bfloat16"
        kept = 2 * size if wide else size
        per_cycle = size / (_BYTES.get(dtype, 4) * self.cycles.per_byte)
        readers = self.uses.fused_readers[result]
        later = max((self._cycles_of(reader, result) for reader in readers), default=0)
        if max(cycles, later) * per_cycle > read + kept:
            return False
        beside = [size * arrays for arrays in _MOVED_BY_READERS]
        again = sum(_longer(moved + read, cycles * per_cycle) for moved in beside)
        once = _longer(read + kept, cycles * per_cycle) + sum(moved + kept for moved in beside)
        return again > once

    def _fused_operand_count(self, result: int, stored: Sequence[bool]) -> int:
        """How many arrays in memory a kernel reads beside one, of which a value is computed, and
        what becomes of it until that is in memory. Of what is there because it is expensive itself,
        none
        counts: XLA chooses of all such at the same time."""
        sizes, own = self.program.sizes, self.sources[result]
        found: set[int] = set()
        fused_operands: set[int] = set()  # what is computed of others, for the same kernel
        seen, pending = {result}, [result]
        while pending and len(seen) < _LOOK_AHEAD:
            for operation in self.uses.fused_readers[pending.pop()]:
                for value in operation.inputs:
                    if sizes[value] * SMALL >= sizes[result]:
                        (found if stored[value] else fused_operands).add(self.view_source[value])
                for value in operation.outputs:
                    if value not in seen and not self.uses.for_contractions[value]:
                        seen.add(value)
                        pending.append(value)
        pending = list(fused_operands - seen)
        while pending and len(fused_operands) < _LOOK_AHEAD:
            for value in self.uses.fused_of[pending.pop()]:
                if sizes[value] * SMALL >= sizes[result]:
                    if stored[value]:
                        found.add(self.view_source[value])
                    elif value not in seen | fused_operands:
                        fused_operands.add(value)
                        pending.append(value)
        return max(len((found | own) - seen - self.written) - 1, 0)

    def _cycles_per_element(self, value: int) -> int:
        return sum(self.made_of[value].values())

    def _cycles_of(self, operation: Any, result: int) -> int:
        return self._cycles(result, [operation.name, *operation.source.calls])

    def _cycles(self, result: int, names: Sequence[str]) -> int:
        """Of operations that make a value, or are made for it."""
        native = not self.program.rules.keeps_float32
        if native and dtype_of(self.program, result) == "bfloat16":
            names = [name for name in names if name not in _IN_BFLOAT16]
        return sum(self._expensive.get(name, 0) for name in names)

    def _hidden_cycles(self, value: int, moves: float) -> float:
        """Cycles of an element in the time that it takes to start a kernel that moves so many such
        arrays."""
        itemsize, size = _BYTES.get(dtype_of(self.program, value), 4), self.program.sizes[value]
        per_element = self.cycles.per_kernel * itemsize / max(size, 1)
        return moves * self.cycles.per_byte * itemsize + per_element

    def _may_be_materialized(self, value: int) -> bool:
        """Whether several kernels would compute it."""
        return self.uses.shared[value] and not self.uses.read_only_by_matmuls[value]

    @functools.cached_property
    def _expensive(self) -> dict[str, int]:
        return dict(self.cycles.dear)


def _longer(moved: float, computed: float) -> float:
    """The time of a kernel that moves and computes, in bytes that are moved meanwhile."""
    return max(moved, computed) + _NOT_HIDDEN * min(moved, computed)
