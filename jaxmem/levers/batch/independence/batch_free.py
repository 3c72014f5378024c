"""Operations none of whose operands has anything of the batch."""

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.growth import grown
from jaxmem.levers.batch.independence.kinds import Each, Free, Index, Kind, Unproved, close
from jaxmem.levers.batch.independence.layout import resized_axes
from jaxmem.levers.batch.independence.operation import Operation

RANDOM = frozenset("random_bits random_fold_in random_seed random_split random_wrap".split())
# Operations whose results are their operands.
PASSED = jaxprs.BARRIERS | {"device_put"}


def of_free(op: Operation) -> list[Kind]:
    """The kinds of the results."""
    kinds = op.kinds
    random = op.name in RANDOM
    changed = any(kind.moved for kind in kinds)
    drawn = any(kind.drawn for kind in kinds) or (random and changed)
    if any(one != two for one, two in op.results):
        return [_made(op, at, drawn) for at in range(len(op.results))]
    growth = grown(op)
    # A parameter that is a program is the same if all else is.
    if growth is None or not op.alike("update_jaxpr"):
        return op.every(op.sized)
    if op.name in PASSED:
        return list(kinds)
    return op.every(Free(growth, drawn=drawn, moved=changed and not random))


def _made(op: Operation, at: int, drawn: bool) -> Kind:
    """Of a result whose shape has the batch in it, though no operand has."""
    one, two = op.results[at]
    axes = resized_axes(op.results[at])
    if len(axes) != 1:
        return op.mixes
    (axis,) = axes
    if any(not close(kind.growth, 1) for kind in op.kinds):
        return op.sized
    if op.name in ("random_bits", "random_split", "rng_bit_generator"):
        if not drawn:
            return Unproved(
                f"it draws random numbers for the batch from a key that all slices would have in "
                f"common; take it from key= ({op.where})"
            )
        inner, rest = divmod(one[axis], op.sizes[0])
        return op.each(axis, Each(axis, 1, inner), at) if not rest else op.mixes
    if op.name == "iota" and op.params["dimension"] == axis:
        alone = one[axis] == op.sizes[0] and two[axis] == op.sizes[1]
        return Index(axis) if alone else op.numbered
    if op.name == "iota" or (op.name == "broadcast_in_dim" and op.alike("shape", "sharding")):
        return op.each(axis, Each(axis, 1, None), at)
    return op.sized


def spread(op: Operation, at: int) -> Free | Each:
    """The kind of an operand; of one number in the shape of the batch, as examples."""
    kind, shapes = op.kinds[at], op.shapes[at]
    if isinstance(kind, Each) or shapes[0] == shapes[1]:
        return kind
    return Each(resized_axes(shapes)[0], 1, None, kind.growth)
