"""Operations that move elements without changing them: examples get another axis or place."""

import dataclasses

from jaxmem.levers.batch.independence.growth import result_growth
from jaxmem.levers.batch.independence.kinds import BatchInvariant, Kind, PerExample, same_growth
from jaxmem.levers.batch.independence.layout import flat, reshape_kind
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import Found, rule


@rule("broadcast_in_dim", sizes=("shape", "sharding"))
def broadcast(op: BatchOperation) -> Kind:
    """Axes go where the parameter says."""
    kind = op.kinds[0]
    return op.each(op.params["broadcast_dimensions"][kind.axis], kind)


@rule("reshape", sizes=("new_sizes", "sharding"), takes_flat=True)
def reshape(op: BatchOperation) -> Kind:
    """The axis of the result in which examples lie apart by as many elements as before."""
    kind = op.kinds[0]
    if op.params.get("dimensions") is not None:
        return op.unknown_primitive
    elements = flat(kind, op.shapes[0], op.sizes)
    found = None if elements is None else reshape_kind(elements, op.results[0], op.sizes)
    if found is None:
        return op.mixes_examples
    uniform = isinstance(kind, PerExample) and kind.inner is None
    if uniform and isinstance(found, PerExample) and found.outer == found.inner == 1:
        return PerExample(found.axis, 1, None, found.growth)
    return found


@rule("transpose")
def transpose(op: BatchOperation) -> Kind:
    """Axes change places."""
    return op.each(list(op.params["permutation"]).index(op.kinds[0].axis), op.kinds[0])


@rule("squeeze")
def squeeze(op: BatchOperation) -> Kind:
    """Axes of one index go."""
    kind, gone = op.kinds[0], op.params["dimensions"]
    if kind.axis in gone:
        return op.mixes_examples
    return op.each(kind.axis - sum(axis < kind.axis for axis in gone), kind)


@rule("concatenate")
def concatenate(op: BatchOperation) -> Kind:
    """Along another axis examples stay; along theirs whole blocks of all of them follow."""
    axis, growth = op.params["dimension"], result_growth(op)
    if growth is None:
        return op.depends_on_batch_size
    if op.has_other_array:
        return op.mixes_examples
    own, common = [kind for kind in op.kinds if isinstance(kind, PerExample)], op.common_batch_axis
    if common is not None and common.axis != axis:
        return op.each(common.axis, dataclasses.replace(common, growth=growth))
    if any(kind.axis != axis or kind.inner is None for kind in own) or len(own) < len(op.kinds):
        return op.mixes_examples
    if len({kind.inner for kind in own}) > 1:
        return op.mixes_examples
    outer = sum(kind.outer for kind in own)
    return op.each(axis, dataclasses.replace(own[0], outer=outer, growth=growth))


@rule("slice", sizes=None)
def slice_of(op: BatchOperation) -> Kind:
    """Of the axis of the examples all, or whole blocks of all examples."""
    kind = op.kinds[0]
    given = [step.equation.params for step in op.steps]
    axis, rank = kind.axis, len(op.shapes[0][0])
    starts = [params["start_indices"] for params in given]
    stops = [params["limit_indices"] for params in given]
    strides = [params["strides"] or (1,) * rank for params in given]
    others = [at for at in range(rank) if at != axis]
    for one, two in (starts, stops, strides):
        if any(one[at] != two[at] for at in others):
            return op.depends_on_batch_size
    if any(steps[axis] != 1 for steps in strides):
        return op.mixes_examples
    start, stop = (starts[0][axis], starts[1][axis]), (stops[0][axis], stops[1][axis])
    if start == (0, 0) and stop == tuple(shape[axis] for shape in op.shapes[0]):
        return op.each(axis, kind)
    return _part(op, 0, start, stop)


@rule("split", sizes=None)
def split(op: BatchOperation) -> Found:
    """As slices, one after the other."""
    kind, axis = op.kinds[0], op.params["axis"]
    one, two = (step.equation.params["sizes"] for step in op.steps)
    if kind.axis != axis:
        if tuple(one) != tuple(two):
            return op.depends_on_batch_size
        return [op.each(kind.axis, kind, at) for at in range(len(op.results))]
    found: list[Kind] = []
    start = (0, 0)
    for at, sizes in enumerate(zip(one, two, strict=True)):
        stop = (start[0] + sizes[0], start[1] + sizes[1])
        found.append(_part(op, at, start, stop))
        start = stop
    return found


def _part(op: BatchOperation, at: int, start: tuple[int, int], stop: tuple[int, int]) -> Kind:
    """Of a result with the indices between two places, given for both traces: they must be whole
    blocks of all examples."""
    kind = op.kinds[0]
    if kind.inner is None:
        return op.mixes_examples
    unit = [size * kind.inner for size in op.sizes]
    places = [
        (a // each, b // each)
        for a, b, each in zip(start, stop, unit, strict=True)
        if a % each == b % each == 0
    ]
    if len(places) != 2 or places[0] != places[1]:
        return op.mixes_examples
    first, last = places[0]
    if first == last:
        return op.mixes_examples
    return op.each(kind.axis, dataclasses.replace(kind, outer=last - first), at)


@rule("pad")
def pad(op: BatchOperation) -> Kind:
    """Along other axes than that of the examples."""
    kind = op.sole_batched_operand
    if kind is None or any(op.params["padding_config"][kind.axis]):
        return op.mixes_examples
    zero = isinstance(op.kinds[1], BatchInvariant) and op.kinds[1].is_zero
    if not same_growth(kind.growth, 1) and not zero:
        return op.depends_on_batch_size
    return op.each(kind.axis, kind)
