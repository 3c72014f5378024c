"""One kernel that XLA makes of a program: what it computes, reads and writes."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxmem.targets.links import Ring


@dataclasses.dataclass(frozen=True, slots=True)
class Aliasing:
    """The sources of a kernel that its derivative, or itself, does not write over as it might.

    Attributes:
        offset_reads: those that it reads from other places than it writes to (a slice's, say).
        transposed: those that it reads in another order of their axes than it writes: nothing is
            written over them.
        read_by_rows: those of which it takes the maximum of a row, and then writes what is less
            that: it does not write over them itself.
        row_reduced: those that it reduces in one kernel with what is computed of them: their
            cotangents are not written over them.
        row_normalized: those whose rows it normalises, each with the row that is taken for it: its
            derivative sums up rows of its cotangent in the kernel that writes theirs, over nothing
            that it reads.
        in_tuple: whether what it makes, and its gradients, are parts of tuples, as what a library
            or a loop returns is: no kernel writes over them. Measured: of 1,056 that a library
            returned and a kernel of as many bytes read last none was written over
            (tests/test_written_over.py).
        beside_rows: whether what it makes is expensive, and normalised: where a barrier parts it
            from what it is made of, the kernel of its rows' maxima or sums writes it beside these,
            as a part of a tuple. (Else a matmul's own kernel writes it.)
    """

    offset_reads: frozenset[int] = frozenset()
    transposed: frozenset[int] = frozenset()
    read_by_rows: frozenset[int] = frozenset()
    row_reduced: frozenset[int] = frozenset()
    row_normalized: frozenset[tuple[int, int]] = frozenset()
    in_tuple: bool = False
    beside_rows: bool = False

    @property
    def lasting(self) -> frozenset[int]:
        """Those that its derivative writes nothing over."""
        return self.transposed | self.offset_reads


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """How the derivative of a matmul or a convolution makes its gradients.

    Attributes:
        operands: where its operands are two values in memory as they are, what is read for the one
            and for the other: of their gradients the one may be made first. (Those of a library's
            convolutions are made side by side, but where one has to wait: a U-Net.)
        split_k_bytes: the bytes of parts of sums (`jaxmem.program.splitting`) that the gradient of
            each source takes, which are among those that the derivative takes inside.
        operand_copies: operands, and the bytes of copies of them that are made for the matmul
            itself and
            kept: padded ones, or in float32.
        ragged_groups: of rows in groups, the value that has their lengths: the residuals are copies
            of rows, which a region writes together with those for the same groups.
        result_pieces: the bytes of the pieces that the cotangent of its result is made in, if that
            is read in them (`jaxmem.program.operand_pieces`).
        numbers: of gathers, values that indices are made of, and the bytes of the numbers of slices
            that XLA writes beside them for the gather and its derivative; where one of these is
            in a region, each computes its own.
        padded: whether a gradient reads a padded operand: a copy may be there beside it.
    """

    operands: tuple[frozenset[int], ...] = ()
    split_k_bytes: tuple[int, ...] = ()
    operand_copies: tuple[tuple[int, int], ...] = ()
    ragged_groups: int | None = None
    padded: bool = False
    numbers: tuple[tuple[int, int], ...] = ()
    result_pieces: tuple[int, ...] = ()

    def copies(self, in_region: bool) -> tuple[tuple[int, int], ...]:
        """What a kernel writes of its operands for itself and for its derivative."""
        return self.operand_copies if in_region else self.operand_copies + self.numbers

    def in_operands(self, reads: Sequence[int], read: Sequence[int]) -> Iterator[list[int]]:
        """Of the instances that are ``read`` for the values of ``reads``, those of the one operand
        and of the other."""
        for values in self.operands:
            yield [one for value, one in zip(reads, read, strict=False) if value in values]


_ALL, _NONE = Aliasing(), Gradients()


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel.

    Attributes:
        operations: numbers of the operations it computes, the last of which completes it.
        results: values that it writes.
        sources: values in memory that it reads, inputs of the program among them.
        reads: those of all values in memory that its derivative reads, its results among them.
        flops: of its matmuls and convolutions, whose operands have ``dtype``, multiplied with
            ``precision``.
        moved: bytes read and written.
        fused: whether it is made of operations that XLA fuses, none of them expensive.
        derivative_workspace: bytes that its derivative takes beside sources, results and
            cotangents.
        scattered: those of them by which a cotangent that its derivative scatters into is larger
            than its source: until that is rounded, say, and written where it belongs.
        workspace: those that it takes itself beside sources and results.
        widened: whether it is computed in float32, from copies, and its result rounded.
        residuals: the one of its results that only its own derivative reads (a scan's), or None.
        sent_bytes: bytes that a device is sent by others, where that is all it does: it is none of
            the program's operations, but comes before the last of ``operations``, which reads its
            result. That is no value with a name, and counts as its ``residuals``.
        summed_bytes: bytes that a device sends and is sent where the results of several are summed.
        ring: among which devices either is.
        aliasing: what it, or its derivative, does not write over.
        expensive: whether it is a kernel for no other reason than that its result is expensive to
            compute
            again: cotangents pass through it.
        gradients: how its derivative makes those, where it is a matmul.
    """

    operations: tuple[int, ...]
    results: tuple[int, ...]
    sources: tuple[int, ...]
    reads: tuple[int, ...]
    flops: int
    moved: int
    dtype: str
    fused: bool
    derivative_workspace: int
    workspace: int
    widened: bool
    residuals: int | None
    precision: str = "default"
    sent_bytes: int = 0
    ring: Ring | None = None
    summed_bytes: int = 0
    aliasing: Aliasing = _ALL
    scattered: int = 0
    expensive: bool = False
    gradients: Gradients = _NONE

    @property
    def reusable_results(self) -> tuple[int, ...]:
        """The results that need not be made again where they were saved. A policy saves a value by
        its name, which it gets when it is there: what made it has a derivative that reads it
        without (that of `tanh`, say)."""
        return tuple(v for v in self.results if v != self.residuals and v not in self.reads)
