"""The kinds of the results of an equation without programs inside."""

import dataclasses

from jaxmem.levers.batch.independence.batch_invariant import (
    PASSED,
    RANDOM,
    as_per_example,
    infer_batch_invariant,
)
from jaxmem.levers.batch.independence.example_numbers import by_number
from jaxmem.levers.batch.independence.growth import HOMOGENEOUS, of_sum
from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    BatchReduction,
    ExampleIndex,
    FlatPerExample,
    GatherIndices,
    Kind,
    NotProved,
    same_growth,
)
from jaxmem.levers.batch.independence.layout import have_the_same_ranks
from jaxmem.levers.batch.independence.numbers import calculated
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.rules import RULES


def results(operation: BatchOperation) -> list[Kind]:
    """By what its operands are: numbers of examples, nothing of the batch, sums, or examples."""
    made = by_number(operation)
    if made is not None:
        return operation.all_results(made)
    for kind in operation.kinds:
        if isinstance(kind, NotProved):
            return operation.all_results(kind)
        if isinstance(kind, ExampleIndex | GatherIndices):
            return operation.all_results(operation.uses_example_index)
    if all(isinstance(kind, BatchInvariant) for kind in operation.kinds):
        number = calculated(operation)
        if number is not None:
            return [number]
        if not have_the_same_ranks([*operation.shapes, *operation.results]):
            return operation.all_results(operation.different_program)
        if all(one == two for one, two in operation.shapes):
            return infer_batch_invariant(operation)
        kinds = [as_per_example(operation, at) for at in range(len(operation.kinds))]
        operation = dataclasses.replace(operation, kinds=kinds)
    in_order = any(isinstance(kind, FlatPerExample) for kind in operation.kinds)
    if not in_order and not have_the_same_ranks(operation.shapes):
        return operation.all_results(operation.different_program)
    uses_model_state = any(
        isinstance(kind, BatchInvariant) and kind.uses_model_state for kind in operation.kinds
    )
    if uses_model_state and operation.name not in RANDOM:
        why = "it uses a model state that each slice changes"
        return operation.all_results(NotProved(f"{why} ({operation.where})"))
    if operation.name in PASSED:
        return list(operation.kinds)
    if any(isinstance(kind, BatchReduction) for kind in operation.kinds):
        return operation.all_results(of_sum(operation))
    return _of_examples(operation)


def _of_examples(operation: BatchOperation) -> list[Kind]:
    rule = RULES.get(operation.name)
    if rule is None:
        return operation.all_results(operation.unknown_primitive)
    growing = any(not same_growth(kind.growth, 1) for kind in operation.kinds)
    if growing and not (rule.growing and operation.name in HOMOGENEOUS):
        return operation.all_results(operation.depends_on_batch_size)
    if rule.sizes is not None and not operation.same_params(*rule.sizes):
        return operation.all_results(operation.depends_on_batch_size)
    if any(isinstance(kind, FlatPerExample) for kind in operation.kinds) and not rule.takes_flat:
        return operation.all_results(operation.unknown_primitive)
    found = rule.function(operation)
    return list(found) if isinstance(found, list) else operation.all_results(found)
