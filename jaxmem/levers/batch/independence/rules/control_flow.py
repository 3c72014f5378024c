"""Programs inside: calls, branches and loops."""

import functools
from typing import TYPE_CHECKING, Any

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import (
    ANOTHER,
    Each,
    Flat,
    Free,
    Index,
    Kind,
    Sizes,
    Total,
    Unproved,
    close,
    is_same,
    mean_growth,
)
from jaxmem.levers.batch.independence.layout import agreed
from jaxmem.levers.batch.independence.operation import Operation
from jaxmem.levers.batch.independence.registry import inside

if TYPE_CHECKING:
    from jaxmem.levers.batch.independence.walk import Walk

# What a loop carries may become another kind each time: after so many times it is given up.
# Chosen: at half and at twice tests/test_mean.py passes too.
_ROUNDS = 8


@inside("closed_call", "core_call", "jit", "pjit")
def call(walk: "Walk", operation: Operation) -> list[Kind]:
    """A function that is called as it is."""
    return walk.called(operation)


@inside("cond")
def branch(walk: "Walk", operation: Operation) -> list[Kind]:
    """The branch must be the same for all examples."""
    index, *kinds = operation.kinds
    if isinstance(index, Unproved):
        return operation.every(index)
    if not is_same(index):
        return operation.every(operation.mixes)
    whole, sliced = (jaxprs.branches_of(step.equation) for step in operation.steps)
    if whole is None or sliced is None:
        return operation.every(operation.unknown)
    if len(whole) != len(sliced):
        return operation.every(operation.another)
    pairs = zip(whole, sliced, strict=True)
    found = [walk.inner([one, two]).kinds(kinds) for one, two in pairs]
    join = functools.partial(_join, sizes=walk.sizes)
    return [functools.reduce(join, each) for each in zip(*found, strict=True)]


@inside("scan", "while")
def loop(walk: "Walk", operation: Operation) -> list[Kind]:
    """What is carried must be of one kind each time, and the number of times the same for all."""
    loops = [jaxprs.loop_of(step.equation) for step in operation.steps]
    one, two = loops
    if one.condition is None and one.options["length"] != two.options["length"]:
        return _scan_of_examples(walk, operation, loops)
    if (one.options, one.carry, one.body_consts) != (two.options, two.carry, two.body_consts):
        return operation.every(operation.sized)
    count = one.carry.stop - one.carry.start if one.condition is None else None
    body = walk.inner([loop.body for loop in loops])
    consts, carry = operation.kinds[one.body_consts], operation.kinds[one.carry]
    slices: list[Kind] = []
    if one.condition is None:
        slices = [_of_slice(kind) for kind in operation.kinds[one.carry.stop :]]
    for _ in range(_ROUNDS):
        found = body.kinds([*consts, *carry, *slices])
        pairs = zip(carry, found[:count], strict=True)
        joined = [_join(before, after, walk.sizes) for before, after in pairs]
        if joined == carry:
            break
        carry = joined
    else:
        return operation.every(operation.bends)
    if one.condition is None or two.condition is None:
        return [*carry, *map(_stacked, found[count:])]
    condition = walk.inner([one.condition, two.condition])
    (goes_on,) = condition.kinds([*operation.kinds[one.condition_consts], *carry])
    if is_same(goes_on):
        return list(carry)
    return operation.every(goes_on if isinstance(goes_on, Unproved) else operation.mixes)


def _scan_of_examples(walk: "Walk", operation: Operation, loops: list[Any]) -> list[Kind]:
    """Of a scan along the examples: each is on its own if nothing is carried."""
    one, two = loops
    kinds, consts = operation.kinds, operation.kinds[one.body_consts]
    for kind in kinds:
        if isinstance(kind, Unproved):
            return operation.every(kind)
    own = [kind for kind in kinds[one.carry.stop :] if isinstance(kind, Each)]
    common = agreed(own) if own else None
    rest = [*consts, *(kind for kind in kinds[one.carry.stop :] if kind not in own)]
    alone = one.carry.start == one.carry.stop
    alone = alone and {**one.options, "length": 0} == {**two.options, "length": 0}
    if common is None or common.axis or not close(common.growth, 1):
        return operation.every(operation.mixes)
    if not alone or not all(map(is_same, rest)):
        return operation.every(operation.mixes)
    body = walk.inner([loop.body for loop in loops])
    # To the body the part of one example is a value like any other.
    found = body.kinds([Free() if isinstance(kind, Each) else kind for kind in kinds])
    return [
        common if is_same(kind) else kind if isinstance(kind, Unproved) else operation.sized
        for kind in found
    ]


def _join(before: Kind, after: Kind, sizes: Sizes) -> Kind:
    """The kind of what may be of either."""
    if before == after:
        return before
    for kind in (before, after):
        if isinstance(kind, Unproved):
            return kind
    if isinstance(before, Free) and isinstance(after, Free):
        if not (close(before.growth, 1) and close(after.growth, 1)):
            return Unproved("it depends on the size of the batch in a loop or a branch")
        return Free(drawn=before.drawn and after.drawn, moved=before.moved or after.moved)
    if isinstance(after, Free):
        before, after = after, before
    if isinstance(before, Free) and isinstance(after, Each | Total):
        mean = isinstance(after, Total) and close(after.growth, mean_growth(sizes))
        fits = mean or (isinstance(after, Each) and close(after.growth, 1))
        if before.is_zero or (fits and close(before.growth, 1) and not before.moved):
            return after
    if isinstance(before, Each) and isinstance(after, Each):
        common = agreed([before, after])
        if common is not None and close(before.growth, after.growth):
            return common
    if (
        isinstance(before, Total)
        and isinstance(after, Total)
        and close(before.growth, after.growth)
    ):
        return before
    return Unproved("a loop or a branch makes other things of its examples each time")


def _of_slice(kind: Kind) -> Kind:
    """Of one slice along the first axis, which is not that of the examples."""
    return _moved(kind, -1)


def _stacked(kind: Kind) -> Kind:
    return _moved(kind, 1)


def _moved(kind: Kind, by: int) -> Kind:
    """With the axis of the examples elsewhere."""
    if isinstance(kind, Each):
        return Each(kind.axis + by, kind.outer, kind.inner, kind.growth)
    if isinstance(kind, Index):
        return Index(kind.axis + by)
    return ANOTHER if isinstance(kind, Flat) else kind
