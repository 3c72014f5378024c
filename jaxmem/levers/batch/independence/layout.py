"""Where the examples lie in an array, told from its shapes in both traces."""

import math
from collections.abc import Sequence

from jaxmem.levers.batch.independence.kinds import FlatPerExample, Kind, PerExample, Sizes

Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape]  # of the batch, of the slice


def have_the_same_ranks(several: Sequence[Shapes]) -> bool:
    """Whether values have as many axes for the slice as for the batch."""
    return all(len(one) == len(two) for one, two in several)


def resized_axes(shapes: Shapes) -> list[int]:
    """The axes whose length depends on the size of the batch, in shapes of one rank."""
    return [axis for axis, (one, two) in enumerate(zip(*shapes, strict=True)) if one != two]


def is_consistent(kind: PerExample, shapes: Shapes, sizes: Sizes) -> bool:
    """Whether a value of these shapes can have the examples as the kind says, and nowhere else."""
    one, two = shapes
    if len(one) != len(two) or not 0 <= kind.axis < len(one):
        return False
    if any(axis != kind.axis for axis in resized_axes(shapes)):
        return False
    lengths = one[kind.axis], two[kind.axis]
    if kind.inner is None:
        return lengths[0] * sizes[1] == lengths[1] * sizes[0]
    return lengths == tuple(kind.outer * size * kind.inner for size in sizes)


def flat(kind: Kind, shapes: Shapes, sizes: Sizes) -> FlatPerExample | None:
    """A value by its elements in row-major order; None: it has no examples in order."""
    if isinstance(kind, FlatPerExample):
        return kind
    if not isinstance(kind, PerExample):
        return None
    shape, outer, inner = shapes[0], kind.outer, kind.inner
    if inner is None:
        outer, (inner, rest) = 1, divmod(shape[kind.axis], sizes[0])
        if rest:
            return None
    before, behind = math.prod(shape[: kind.axis]), math.prod(shape[kind.axis + 1 :])
    return FlatPerExample(before * outer, inner * behind, kind.growth)


def reshape_kind(kind: FlatPerExample, shapes: Shapes, sizes: Sizes) -> Kind | None:
    """The kind of elements in row-major order in these shapes; None: one axis is not enough."""
    one, two = shapes
    if len(one) != len(two):
        return kind
    axes = resized_axes(shapes)
    if len(axes) != 1:
        return None
    (axis,) = axes
    inner, rest = divmod(kind.inner, math.prod(one[axis + 1 :]) or 1)
    outer, more = divmod(one[axis], inner * sizes[0]) if inner else (0, 1)
    found = PerExample(axis, outer, inner, kind.growth)
    return found if not rest and not more and is_consistent(found, shapes, sizes) else None


def common_batch_axis(kinds: Sequence[PerExample]) -> PerExample | None:
    """The place of the examples in values that go together, or None: it is not the same."""
    found = kinds[0]
    for kind in kinds[1:]:
        if kind.axis != found.axis:
            return None
        if found.inner is None:
            found = kind
        elif kind.inner is not None and (kind.outer, kind.inner) != (found.outer, found.inner):
            return None
    return found
