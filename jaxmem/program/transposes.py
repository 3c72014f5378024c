"""Transposed matrices that nothing but matmuls reads, as `x @ w.T` does: XLA folds them into these.

(Its TransposeFolding; tests/test_updates.py.)
"""

import collections

from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.program.costs import is_batched


def folded_transposes(flat: FlatJaxpr) -> set[int]:
    """The numbers of the values that are no more than another way to read their operands; cast
    before the matmul too."""
    if all(step.primitive != "transpose" for step in flat.steps):
        return set()
    readers: dict[int, list[FlatStep]] = collections.defaultdict(list)
    for step in flat.steps:
        for value in set(step.uses):
            readers[value].append(step)
    outputs = set(flat.observed)
    folds: set[int] = set()  # whoever reads them: matmuls, which take them as they are
    for step in reversed(flat.steps):
        reads = readers[step.outputs[0]] if _is_of_matrix(step) else []
        alone = reads and outputs.isdisjoint(step.outputs)
        if alone and all(_multiplies(one) or not folds.isdisjoint(one.outputs) for one in reads):
            folds.add(step.outputs[0])
    return {
        step.outputs[0]
        for step in flat.steps
        if step.primitive == "transpose" and step.outputs[0] in folds
    }


def _is_of_matrix(step: FlatStep) -> bool:
    if step.primitive not in ("transpose", "convert_element_type"):
        return False
    return sum(length != 1 for length in step.equation.outvars[0].aval.shape) <= 2


def _multiplies(step: FlatStep) -> bool:
    return step.primitive == "dot_general" and not is_batched(step.equation)
