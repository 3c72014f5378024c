"""The kinds of the results of an equation without programs inside."""

import dataclasses

from jaxmem.levers.batch.independence.batch_free import PASSED, RANDOM, of_free, spread
from jaxmem.levers.batch.independence.example_numbers import by_number
from jaxmem.levers.batch.independence.growth import HOMOGENEOUS, of_sum
from jaxmem.levers.batch.independence.kinds import (
    Columns,
    Flat,
    Free,
    Index,
    Kind,
    Total,
    Unproved,
    close,
)
from jaxmem.levers.batch.independence.layout import have_the_same_ranks
from jaxmem.levers.batch.independence.numbers import calculated
from jaxmem.levers.batch.independence.operation import Operation
from jaxmem.levers.batch.independence.rules import RULES


def results(operation: Operation) -> list[Kind]:
    """By what its operands are: numbers of examples, nothing of the batch, sums, or examples."""
    made = by_number(operation)
    if made is not None:
        return operation.every(made)
    for kind in operation.kinds:
        if isinstance(kind, Unproved):
            return operation.every(kind)
        if isinstance(kind, Index | Columns):
            return operation.every(operation.numbered)
    if all(isinstance(kind, Free) for kind in operation.kinds):
        number = calculated(operation)
        if number is not None:
            return [number]
        if not have_the_same_ranks([*operation.shapes, *operation.results]):
            return operation.every(operation.another)
        if all(one == two for one, two in operation.shapes):
            return of_free(operation)
        kinds = [spread(operation, at) for at in range(len(operation.kinds))]
        operation = dataclasses.replace(operation, kinds=kinds)
    in_order = any(isinstance(kind, Flat) for kind in operation.kinds)
    if not in_order and not have_the_same_ranks(operation.shapes):
        return operation.every(operation.another)
    moved = any(isinstance(kind, Free) and kind.moved for kind in operation.kinds)
    if moved and operation.name not in RANDOM:
        why = "it uses a model state that each slice changes"
        return operation.every(Unproved(f"{why} ({operation.where})"))
    if operation.name in PASSED:
        return list(operation.kinds)
    if any(isinstance(kind, Total) for kind in operation.kinds):
        return operation.every(of_sum(operation))
    return _of_examples(operation)


def _of_examples(operation: Operation) -> list[Kind]:
    rule = RULES.get(operation.name)
    if rule is None:
        return operation.every(operation.unknown)
    growing = any(not close(kind.growth, 1) for kind in operation.kinds)
    if growing and not (rule.growing and operation.name in HOMOGENEOUS):
        return operation.every(operation.sized)
    if rule.sizes is not None and not operation.alike(*rule.sizes):
        return operation.every(operation.sized)
    if any(isinstance(kind, Flat) for kind in operation.kinds) and not rule.takes_flat:
        return operation.every(operation.unknown)
    found = rule.function(operation)
    return list(found) if isinstance(found, list) else operation.every(found)
