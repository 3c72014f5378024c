"""Attention by a kernel of the device's own (`jax.nn.dot_product_attention`)."""

import dataclasses

from jaxmem.levers.batch.independence.kinds import BatchReduction, PerExample, same_growth
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import Found, rule
from jaxmem.program.attention import ATTENTION, ATTENTION_DERIVATIVES


@rule(*(ATTENTION - ATTENTION_DERIVATIVES), growing=False)
def attention(op: BatchOperation) -> Found:
    """The first axis of queries, keys, values and of what else there is one of for each example is
    that of the examples; dropout depends on the place of one in the batch."""
    return _of_examples(op, op.common_batch_axis)


@rule(*ATTENTION_DERIVATIVES)
def derivative(op: BatchOperation) -> Found:
    """Linear in its last operand, the cotangent. Of a bias that all examples share the gradient is
    a sum over them."""
    *others, growth = (kind.growth for kind in op.kinds)
    if not all(same_growth(other, 1) for other in others):
        return op.depends_on_batch_size
    kinds = [dataclasses.replace(kind, growth=1.0) for kind in op.kinds]
    common = dataclasses.replace(op, kinds=kinds).common_batch_axis
    found = _of_examples(op, common and dataclasses.replace(common, growth=growth))
    if not isinstance(found, list):
        return found
    sums = [one == two and one[0] == 1 for one, two in op.results]
    return [
        BatchReduction(growth) if sum_ else kind for sum_, kind in zip(sums, found, strict=True)
    ]


def _of_examples(op: BatchOperation, common: PerExample | None) -> Found:
    if op.params.get("dropout_rate", 0):
        return op.uses_example_index
    if common is None or common.axis != 0:
        return op.mixes_examples
    return [op.each(0, common, at) for at in range(len(op.results))]
