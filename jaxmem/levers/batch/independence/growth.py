"""What is linear: how results grow with their operands, and how sums over examples go on."""

import math

import jax.numpy as jnp

from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    BatchReduction,
    Kind,
    PerExample,
    mean_growth,
    same_growth,
)
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.program.attention import ATTENTION_DERIVATIVES

# Operations that a sum over examples may pass through: linear in the operand that has it.
LINEAR = frozenset(
    """
    add_any broadcast_in_dim concatenate convert_element_type copy cumsum dynamic_slice gather
    imag mul name neg optimization_barrier pad real reduce_precision reduce_sum reshape rev
    select_n sharding_constraint slice split squeeze sub add stop_gradient transpose div
    dot_general
    """.split()
)
# Of operands that grow with the batch their results grow by a known factor.
HOMOGENEOUS = (
    LINEAR | ATTENTION_DERIVATIVES | {"integer_pow", "square", "scatter-add", "scatter_add"}
)
_SUMS = frozenset({"add", "sub", "add_any", "concatenate", "pad", "stack"})


def result_growth(op: BatchOperation) -> float | None:
    """The growth of a result that is linear in what grows; None: it is not."""
    name, kinds = op.name, op.kinds
    growths = [kind.growth for kind in kinds]
    if all(same_growth(growth, 1) for growth in growths):
        return 1.0
    if any(map(math.isnan, growths)) or name not in HOMOGENEOUS:
        return None
    if name in ("mul", "dot_general"):
        return math.prod(growths)
    if name == "div":
        return growths[0] / growths[1] if op.inexact() else None
    if name in ("square", "integer_pow"):
        return growths[0] ** op.params.get("y", 2)
    if name == "convert_element_type" and not op.inexact():
        return None
    if name in _SUMS or name == "select_n":
        if name == "select_n":
            if not same_growth(growths[0], 1):
                return None
            kinds = kinds[1:]
        found = [k.growth for k in kinds if not (isinstance(k, BatchInvariant) and k.is_zero)]
        return found[0] if found and all(same_growth(found[0], other) for other in found) else None
    return growths[0] if all(same_growth(growth, 1) for growth in growths[1:]) else None


def of_sum(op: BatchOperation) -> Kind:
    """Of an operation on a sum over examples: it may go on in a straight line."""
    kinds, name = op.kinds, op.name
    if any(isinstance(kind, PerExample) for kind in kinds):
        return op.mixes_examples
    if any(one != two for one, two in op.results):
        return op.mixes_examples
    if name not in LINEAR or not op.same_params():
        return op.not_linear
    if name == "convert_element_type":
        made = op.steps[0].equation.invars[0].aval.dtype
        if jnp.issubdtype(made, jnp.inexact) and not op.inexact():
            return op.not_linear
    if name in _SUMS or name == "select_n":
        return _of_terms(op)
    sums = sum(isinstance(kind, BatchReduction) for kind in kinds)
    if sums != 1 or (
        not isinstance(kinds[0], BatchReduction) and name not in ("mul", "dot_general")
    ):
        return op.not_linear
    growths = [kind.growth for kind in kinds]
    if any(map(math.isnan, growths)) or (name == "div" and not op.inexact()):
        return op.not_linear
    if name in ("mul", "dot_general"):
        return BatchReduction(math.prod(growths))
    if name == "div":
        return BatchReduction(growths[0] / growths[1])
    return (
        BatchReduction(growths[0])
        if all(same_growth(growth, 1) for growth in growths[1:])
        else op.not_linear
    )


def _of_terms(op: BatchOperation) -> Kind:
    """Of terms that are added, or one of which is selected: what is beside sums must be zero,
    or the sums be means, for ``c + mean`` is the mean of ``c + each``."""
    kinds = op.kinds
    if op.name == "select_n":
        if not isinstance(kinds[0], BatchInvariant) or not same_growth(kinds[0].growth, 1):
            return op.not_linear
        kinds = kinds[1:]
    totals = [kind for kind in kinds if isinstance(kind, BatchReduction)]
    growth = totals[0].growth
    if not all(same_growth(growth, total.growth) for total in totals):
        return op.not_linear
    free = [kind for kind in kinds if isinstance(kind, BatchInvariant) and not kind.is_zero]
    mean = same_growth(growth, mean_growth(op.sizes))
    if free and not (mean and all(same_growth(kind.growth, 1) for kind in free)):
        return op.not_linear
    return BatchReduction(growth)
