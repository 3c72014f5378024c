"""What lies in tiles is padded to whole ones: the arrays that are at the peak of a step."""

import dataclasses
import re
from collections.abc import Iterable

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.where.timeline import Placed
from jaxmem.reports.xla.hlo import array_bytes

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]+)\]\{([\d,]+):T\((\d+(?:,\d+)?)\)")

# Of a step's bytes: less padding than this is not shown. Chosen.
WORTH_A_LOOK = 0.01


@dataclasses.dataclass(frozen=True)
class Padded:
    """Arrays of one shape and layout, which are longer in memory than what is in them.

    Attributes:
        shape: dtype and lengths, as in ``"f32[16,256,256,64]"``.
        count: how many there are.
        bytes: those that all of them take, ``logical`` those that are in them.
        why: the axes that are padded, in words.
    """

    shape: str
    count: int
    bytes: int
    logical: int
    why: str

    @property
    def padding(self) -> int:
        """Bytes with nothing in them."""
        return self.bytes - self.logical

    def __str__(self):
        each = f"{format_bytes(self.bytes)} for {format_bytes(self.logical)}"
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{many}{self.shape}: {each}; {self.why}"


def padded_arrays(placed: Iterable[Placed]) -> tuple[Padded, ...]:
    """The arrays among buffers that are padded, the most padding first. Bytes are those that a
    buffer has to itself, and its share of what is in it."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in placed:
        match = _ARRAY.match(one.value.shape)
        if match is None:
            continue
        dtype, lengths, order, tile = match.groups()
        logical = array_bytes(dtype, lengths)
        if one.value.size <= logical:
            continue
        shape = [int(length) for length in lengths.split(",")]
        axes = [int(axis) for axis in order.split(",")]
        why = _why(shape, axes, [int(length) for length in tile.split(",")])
        counts = found.setdefault((f"{dtype}[{lengths}]", why), [0, 0, 0])
        counts[0] += 1
        counts[1] += one.bytes
        counts[2] += one.bytes * logical // one.value.size
    rows = [
        Padded(shape, count, taken, logical, why)
        for (shape, why), (count, taken, logical) in found.items()
        if why
    ]
    return tuple(sorted(rows, key=lambda row: (-row.padding, row.shape)))


def _why(shape: list[int], axes: list[int], tile: list[int]) -> str:
    """Which of the innermost axes do not fill their tiles."""
    names = ("lanes", "rows") if len(tile) == 2 else ("lanes",)
    parts = []
    for name, axis, whole in zip(names, axes, reversed(tile), strict=False):
        length = shape[axis]
        tiles = -(-length // whole)
        if length % whole:
            parts.append(f"axis {axis} has {length} of {tiles * whole} {name}")
    return ", ".join(parts)
