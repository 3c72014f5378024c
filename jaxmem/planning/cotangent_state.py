"""How the cotangent of a value comes about, as far as the derivatives of its readers say."""

import dataclasses

from jaxmem.program import CotangentEdge, Kernel


@dataclasses.dataclass(slots=True)
class CotangentState:
    """Which of the kernels that read a value have given it a cotangent, and how.

    Attributes:
        written: those that write one: in the value's order of axes, in another one (True), or both.
        spread: those that spread out one of a reduction, where it is read, and sum it up for
            another gradient besides: in the value's order, in another one (True), or both.
        broadcast: whether any is spread out where it is read.
        shifted: whether it is not written over the value, since elements are read at other places.
        row_reduced: nor if it is made by reductions of rows.
        padded: whether pieces of it are padded where they are read.
        scattered: bytes by which one that is scattered into is larger than the value.
    """

    written: set[bool] = dataclasses.field(default_factory=set)
    spread: set[bool] = dataclasses.field(default_factory=set)
    broadcast: bool = False
    shifted: bool = False
    row_reduced: bool = False
    padded: bool = False
    scattered: int = 0

    @property
    def is_turned(self) -> bool:
        """Whether it is there in another order of axes alone."""
        return self.written == {True}

    def is_written_first(self, kernel: Kernel, is_scan: bool) -> bool:
        """Whether it is in memory before the derivative of the kernel that makes the value reads
        it, though no kernel has written it."""
        if self.shifted or (is_scan and self.broadcast):
            return True  # a loop reads slices of it
        # By rows and by columns: it is written over neither.
        apart = (
            self.row_reduced
            or len(self.spread) > 1
            or (self.padded and not (is_scan or kernel.fused))
            or (self.broadcast and kernel.aliasing.in_tuple)  # a library reads it whole
        )
        return apart and not self.written

    def spread_by(self, kernel: Kernel, edge: CotangentEdge, is_turned: bool, alone: bool) -> None:
        """A kernel that reduces the value has its cotangent spread out where that is read; unless
        ``alone`` it sums it up for another gradient besides."""
        self.broadcast = True
        self.shifted |= edge.value in kernel.aliasing.offset_reads
        of_rows = bool(edge.rows and edge.last is not None)
        self.row_reduced |= of_rows or edge.value in kernel.aliasing.row_reduced
        if not alone:
            self.spread.add(is_turned)
