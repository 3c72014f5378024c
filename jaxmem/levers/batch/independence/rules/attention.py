"""Attention by a kernel of the device's own (`jax.nn.dot_product_attention`)."""

import dataclasses

from jaxmem.levers.batch.independence.kinds import Each, Total, close
from jaxmem.levers.batch.independence.operation import Operation
from jaxmem.levers.batch.independence.registry import Found, rule
from jaxmem.program.attention import ATTENTION, ATTENTION_DERIVATIVES


@rule(*(ATTENTION - ATTENTION_DERIVATIVES), growing=False)
def attention(op: Operation) -> Found:
    """The first axis of queries, keys, values and of what else there is one of for each example is
    that of the examples; dropout depends on the place of one in the batch."""
    return _of_examples(op, op.common)


@rule(*ATTENTION_DERIVATIVES)
def derivative(op: Operation) -> Found:
    """Linear in its last operand, the cotangent. Of a bias that all examples share the gradient is
    a sum over them."""
    *others, growth = (kind.growth for kind in op.kinds)
    if not all(close(other, 1) for other in others):
        return op.sized
    kinds = [dataclasses.replace(kind, growth=1.0) for kind in op.kinds]
    common = dataclasses.replace(op, kinds=kinds).common
    found = _of_examples(op, common and dataclasses.replace(common, growth=growth))
    if not isinstance(found, list):
        return found
    shared = [one == two and one[0] == 1 for one, two in op.results]
    return [Total(growth) if is_sum else kind for is_sum, kind in zip(shared, found, strict=True)]


def _of_examples(op: Operation, common: Each | None) -> Found:
    if op.params.get("dropout_rate", 0):
        return op.numbered
    if common is None or common.axis != 0:
        return op.mixes
    return [op.each(0, common, at) for at in range(len(op.results))]
