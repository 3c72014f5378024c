"""Programs inside: calls, branches and loops."""

import functools
from typing import TYPE_CHECKING, Any

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import (
    DIFFERENT_PROGRAM,
    BatchInvariant,
    BatchReduction,
    ExampleIndex,
    FlatPerExample,
    Kind,
    NotProved,
    PerExample,
    Sizes,
    is_same,
    mean_growth,
    same_growth,
)
from jaxmem.levers.batch.independence.layout import common_batch_axis
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import inside

if TYPE_CHECKING:
    from jaxmem.levers.batch.independence.walk import Walk

# What a loop carries may become another kind each time: after so many times it is given up.
# Chosen: at half and at twice tests/test_mean.py passes too.
_ROUNDS = 8


@inside("closed_call", "core_call", "jit", "pjit")
def call(walk: "Walk", operation: BatchOperation) -> list[Kind]:
    """A function that is called as it is."""
    return walk.called(operation)


@inside("cond")
def branch(walk: "Walk", operation: BatchOperation) -> list[Kind]:
    """The branch must be the same for all examples."""
    index, *kinds = operation.kinds
    if isinstance(index, NotProved):
        return operation.all_results(index)
    if not is_same(index):
        return operation.all_results(operation.mixes_examples)
    whole, sliced = (jaxprs.branches_of(step.equation) for step in operation.steps)
    if whole is None or sliced is None:
        return operation.all_results(operation.unknown_primitive)
    if len(whole) != len(sliced):
        return operation.all_results(operation.different_program)
    pairs = zip(whole, sliced, strict=True)
    found = [walk.inner([one, two]).kinds(kinds) for one, two in pairs]
    join = functools.partial(_join, sizes=walk.sizes)
    return [functools.reduce(join, each) for each in zip(*found, strict=True)]


@inside("scan", "while")
def loop(walk: "Walk", operation: BatchOperation) -> list[Kind]:
    """What is carried must be of one kind each time, and the number of times the same for all."""
    loops = [jaxprs.loop_of(step.equation) for step in operation.steps]
    one, two = loops
    if one.condition is None and one.options["length"] != two.options["length"]:
        return _scan_of_examples(walk, operation, loops)
    if (one.options, one.carry, one.body_consts) != (two.options, two.carry, two.body_consts):
        return operation.all_results(operation.depends_on_batch_size)
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
        return operation.all_results(operation.not_linear)
    if one.condition is None or two.condition is None:
        return [*carry, *map(_stacked, found[count:])]
    condition = walk.inner([one.condition, two.condition])
    (goes_on,) = condition.kinds([*operation.kinds[one.condition_consts], *carry])
    if is_same(goes_on):
        return list(carry)
    return operation.all_results(
        goes_on if isinstance(goes_on, NotProved) else operation.mixes_examples
    )


def _scan_of_examples(walk: "Walk", operation: BatchOperation, loops: list[Any]) -> list[Kind]:
    """Of a scan along the examples: each is on its own if nothing is carried."""
    one, two = loops
    kinds, consts = operation.kinds, operation.kinds[one.body_consts]
    for kind in kinds:
        if isinstance(kind, NotProved):
            return operation.all_results(kind)
    own = [kind for kind in kinds[one.carry.stop :] if isinstance(kind, PerExample)]
    common = common_batch_axis(own) if own else None
    rest = [*consts, *(kind for kind in kinds[one.carry.stop :] if kind not in own)]
    alone = one.carry.start == one.carry.stop
    alone = alone and {**one.options, "length": 0} == {**two.options, "length": 0}
    if common is None or common.axis or not same_growth(common.growth, 1):
        return operation.all_results(operation.mixes_examples)
    if not alone or not all(map(is_same, rest)):
        return operation.all_results(operation.mixes_examples)
    body = walk.inner([loop.body for loop in loops])
    # To the body the part of one example is a value like any other.
    found = body.kinds(
        [BatchInvariant() if isinstance(kind, PerExample) else kind for kind in kinds]
    )
    return [
        common
        if is_same(kind)
        else kind
        if isinstance(kind, NotProved)
        else operation.depends_on_batch_size
        for kind in found
    ]


def _join(before: Kind, after: Kind, sizes: Sizes) -> Kind:
    """The kind of what may be of either."""
    if before == after:
        return before
    for kind in (before, after):
        if isinstance(kind, NotProved):
            return kind
    if isinstance(before, BatchInvariant) and isinstance(after, BatchInvariant):
        if not (same_growth(before.growth, 1) and same_growth(after.growth, 1)):
            return NotProved("it depends on the size of the batch in a loop or a branch")
        return BatchInvariant(
            uses_rng=before.uses_rng and after.uses_rng,
            uses_model_state=before.uses_model_state or after.uses_model_state,
        )
    if isinstance(after, BatchInvariant):
        before, after = after, before
    if isinstance(before, BatchInvariant) and isinstance(after, PerExample | BatchReduction):
        mean = isinstance(after, BatchReduction) and same_growth(after.growth, mean_growth(sizes))
        fits = mean or (isinstance(after, PerExample) and same_growth(after.growth, 1))
        if before.is_zero or (
            fits and same_growth(before.growth, 1) and not before.uses_model_state
        ):
            return after
    if isinstance(before, PerExample) and isinstance(after, PerExample):
        common = common_batch_axis([before, after])
        if common is not None and same_growth(before.growth, after.growth):
            return common
    if (
        isinstance(before, BatchReduction)
        and isinstance(after, BatchReduction)
        and same_growth(before.growth, after.growth)
    ):
        return before
    return NotProved("a loop or a branch makes other things of its examples each time")


def _of_slice(kind: Kind) -> Kind:
    """Of one slice along the first axis, which is not that of the examples."""
    return _moved(kind, -1)


def _stacked(kind: Kind) -> Kind:
    return _moved(kind, 1)


def _moved(kind: Kind, by: int) -> Kind:
    """With the axis of the examples elsewhere."""
    if isinstance(kind, PerExample):
        return PerExample(kind.axis + by, kind.outer, kind.inner, kind.growth)
    if isinstance(kind, ExampleIndex):
        return ExampleIndex(kind.axis + by)
    return DIFFERENT_PROGRAM if isinstance(kind, FlatPerExample) else kind
