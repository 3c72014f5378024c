"""Operations on each element, which leave examples where they are."""

import dataclasses

from jaxmem.levers.batch.independence.growth import result_growth
from jaxmem.levers.batch.independence.kinds import BatchInvariant, Kind
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import rule
from jaxmem.program.slicing import ELEMENTWISE


@rule(
    *ELEMENTWISE,
    *("acosh", "bessel_i0e", "bessel_i1e", "complex", "conj", "digamma", "igamma", "igamma_grad_a"),
    *("igammac", "imag", "log2", "mulhi", "name", "polygamma", "polynomial", "random_fold_in"),
    *("regularized_incomplete_beta", "zeta"),
)
def elementwise(op: BatchOperation) -> Kind:
    """Examples stay in their places, if they have the same ones in all operands."""
    growth, common = result_growth(op), op.common_batch_axis
    if growth is None:
        return op.depends_on_batch_size
    if common is None:
        return op.mixes_examples
    for kind, (one, _) in zip(op.kinds, op.shapes, strict=True):
        is_free = one and isinstance(kind, BatchInvariant) and kind.value is None
        if is_free and (len(one) <= common.axis or one[common.axis] != 1):
            return op.mixes_examples
    return op.each(common.axis, dataclasses.replace(common, growth=growth))
