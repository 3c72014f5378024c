"""What a compiler makes of a program, as far as plans go by it."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxmem.ground.plain_data import fields_from_plain, from_plain
from jaxmem.targets.matmul import Matmul


@dataclasses.dataclass(frozen=True, slots=True)
class Cycles:
    """What element-by-element operations cost on a device, as its compiler counts: what is dear is
    not computed again in each kernel that reads it.

    Attributes:
        dear: primitives, and the cycles that one element of float32 takes; all others are next to
            free.
        per_byte: cycles that the device computes while it moves a byte.
        per_kernel: those that it computes while a kernel is started.
        cached_bytes: arrays up to this are read faster.
    """

    dear: tuple[tuple[str, int], ...]
    per_byte: float
    per_kernel: float
    cached_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ElementRules:
    """What matmuls compute of an operand as they read it.

    Attributes:
        behind_pieces: whether they compute pieces of it, too, that are put together there
            (`jaxmem.program.operand_pieces`).
    """

    behind_pieces: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LoopRules:
    """What a compiler makes of loops.

    Attributes:
        row_major: whether what a scan keeps had better lie row by row. Who reads it may ask for
            another layout, of the layers' axis too, and XLA then makes a copy of the whole stack
            between the passes (plans of attention compiled to 1.4 times their bytes).
        hosts_in_regions: whether what is made in a region inside of a loop's body may wait in host
            memory: it comes back through the region's barrier, which libtpu takes for a result of
            the program ("OutputLocationMismatch").
        shares_zeros: whether the zeros that loops fill are one array for all of a shape, which
            each loop has a copy of (`jaxmem.program.loop_zeros`).
    """

    row_major: bool = True
    hosts_in_regions: bool = True
    shares_zeros: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """How XLA of a family of targets fuses, lays out and differentiates.

    Attributes:
        fuses_operands: whether what makes an operand of a matmul or a convolution out of values in
            memory, element by element, is computed inside it and never in memory.
        fuses_elements: how the same is so of matmuls alone, and of chains of operations that read
            one value and make no less (`jaxmem.program.operands`); None: it is not.
        fuses_derivatives: whether what is recomputed element by element is made by the kernel of
            its derivative, over what that reads (`jaxmem.planning.derivative_fusion`), what a loop
            has stacked is read there, and of the two gradients of a matmul that one is made first
            which leaves less. It is so on GPUs, and not on a v5e (MLPs and attention).
        writes_concatenations: whether these, what is padded, and what is repeated along an axis,
            are in memory all the same.
        writes_gathered: whether what a gather takes elements of is in memory while it does, as
            logits in float32 are of which a loss takes those of the labels.
        fuses_gathers: whether what is gathered many times over, such as the rows of nodes at the
            ends of edges, is read where it is used, and in memory only if a matmul or the like
            reads it.
        blocks_of_rows: whether rows are normalised (a softmax, what is less its mean) in kernels
            that have the reduction in them.
        merges_reductions: whether what is computed of the values that a reduction reads is written
            by one kernel with it.
        multiplies_vectors: whether matmuls with batch dimensions, of one row or one column each
            time, are products and sums like any other, fused with what is around them.
        copies_groups: whether a matmul of rows in groups is one of copies of them
            (`jaxmem.program.ragged`).
        channels_last: the dtypes, and along how many axes, that a library convolves with channels
            innermost, and others with channels before those axes; it reads copies of what is
            padded or in another order (`jaxmem.program.convolutions`). None: there is no library.
        takes_of_rows: how many of each row a ``top_k`` takes at most in a kernel of its own, and
            of how long rows at least; others are sorted whole. Measured for an H100 and a T4,
            float32 and bfloat16, with 16 and 17, of rows of 1,023 and 1,024.
        tile: rows and columns of 32 bits that the two dimensions of an array which lie innermost
            are padded to; None: arrays are as long as they are.
        picks_poolings: whether a derivative of poolings made of slices is fused.
        computes_bfloat16: what does: "all", "matmuls" and convolutions alone, or "none". What is
            computed in float32 and written because it is expensive to compute again is written
            before it is rounded.
        loops: how loops are compiled.
        library: the dtypes of matmuls that a library has kernels for and the compiler has none, and
            the bytes of the workspace that it gives each of them.
        parts: into how many the sums of a matmul are cut; None: into none.
        cycles: what is not computed again; None: all that is fused may be.
    """

    fuses_operands: bool = False
    fuses_elements: ElementRules | None = None
    fuses_derivatives: bool = False
    writes_concatenations: bool = False
    writes_gathered: bool = False
    fuses_gathers: bool = False
    blocks_of_rows: bool = True
    merges_reductions: bool = False
    multiplies_vectors: bool = False
    copies_groups: bool = True
    channels_last: tuple[tuple[str, int], ...] | None = tuple(
        (dtype, axes) for dtype in ("bfloat16", "float16", "float32") for axes in (1, 2)
    )
    takes_of_rows: tuple[int, int] = (16, 1024)
    tile: tuple[int, int] | None = None
    picks_poolings: bool = True
    computes_bfloat16: str = "all"
    loops: LoopRules = LoopRules()
    library: tuple[tuple[str, ...], int] = ((), 0)
    parts: Callable[[Matmul], int] | None = None
    cycles: Cycles | None = None

    @property
    def widens_bfloat16(self) -> bool:
        """Whether matmuls of bfloat16 are computed in float32."""
        return self.computes_bfloat16 == "none"

    @property
    def keeps_float32(self) -> bool:
        """Whether all but matmuls of bfloat16 is computed in float32."""
        return self.computes_bfloat16 == "matmuls"

    @classmethod
    def read(
        cls, row: Mapping[str, Any], splitting: Callable[..., Any] | None, name: str = "rules"
    ) -> "Rules":
        """What JSON has of them (`dataclasses.asdict`); ``splitting`` is what ``parts`` are.

        Raises:
            ValueError: it has something else; in words.
        """
        fields = fields_from_plain(cls, row, name, {"parts": None})
        if splitting and row["parts"] is not None:
            fields["parts"] = from_plain(splitting, row["parts"], f"{name}.parts")
        return cls(**fields)

    def bytes_of(
        self, shape: Sequence[int], itemsize: int, never_minor: Collection[int] = ()
    ) -> int:
        """Bytes of an array as it is laid out: with the two dimensions innermost that are padded
        least, none of ``never_minor`` among them. Rows are padded to no more than the next power of
        two.
        """
        size = math.prod(shape) * itemsize
        if self.tile is None or not size:
            return size
        rows, columns = self.tile
        inner = [
            length for axis, length in enumerate(shape) if axis not in never_minor and length > 1
        ]
        wide = [_padding(length, columns) for length in inner]
        tall = [_padding(length, min(rows, 1 << (length - 1).bit_length())) for length in inner]
        pairs = [
            across * down
            for lane, across in enumerate(wide)
            for row, down in enumerate(tall)
            if lane != row
        ]
        return round(size * min(pairs or wide, default=1.0))


def _padding(length: int, tile: int) -> float:
    return math.ceil(length / tile) * tile / length
