"""Operations none of whose operands has anything of the batch."""

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.growth import result_growth
from jaxmem.levers.batch.independence.kinds import (
    BatchInvariant,
    ExampleIndex,
    Kind,
    NotProved,
    PerExample,
    same_growth,
)
from jaxmem.levers.batch.independence.layout import resized_axes
from jaxmem.levers.batch.independence.operation import BatchOperation

RANDOM = frozenset("random_bits random_fold_in random_seed random_split random_wrap".split())
# Operations whose results are their operands.
PASSED = jaxprs.BARRIERS | {"device_put"}


def infer_batch_invariant(op: BatchOperation) -> list[Kind]:
    """The kinds of the results."""
    kinds = op.kinds
    random = op.name in RANDOM
    changed = any(kind.uses_model_state for kind in kinds)
    uses_rng = any(kind.uses_rng for kind in kinds) or (random and changed)
    if any(one != two for one, two in op.results):
        return [_infer_batch_shaped(op, at, uses_rng) for at in range(len(op.results))]
    growth = result_growth(op)
    # A parameter that is a program is the same if all else is.
    if growth is None or not op.same_params("update_jaxpr"):
        return op.all_results(op.depends_on_batch_size)
    if op.name in PASSED:
        return list(kinds)
    return op.all_results(
        BatchInvariant(growth, uses_rng=uses_rng, uses_model_state=changed and not random)
    )


def _infer_batch_shaped(op: BatchOperation, at: int, uses_rng: bool) -> Kind:
    """Of a result whose shape has the batch in it, though no operand has."""
    one, two = op.results[at]
    axes = resized_axes(op.results[at])
    if len(axes) != 1:
        return op.mixes_examples
    (axis,) = axes
    if any(not same_growth(kind.growth, 1) for kind in op.kinds):
        return op.depends_on_batch_size
    if op.name in ("random_bits", "random_split", "rng_bit_generator"):
        if not uses_rng:
            return NotProved(
                f"it draws random numbers for the batch from a key that all slices would have in "
                f"common; take it from key= ({op.where})"
            )
        inner, rest = divmod(one[axis], op.sizes[0])
        return op.each(axis, PerExample(axis, 1, inner), at) if not rest else op.mixes_examples
    if op.name == "iota" and op.params["dimension"] == axis:
        alone = one[axis] == op.sizes[0] and two[axis] == op.sizes[1]
        return ExampleIndex(axis) if alone else op.uses_example_index
    if op.name == "iota" or (op.name == "broadcast_in_dim" and op.same_params("shape", "sharding")):
        return op.each(axis, PerExample(axis, 1, None), at)
    return op.depends_on_batch_size


def as_per_example(op: BatchOperation, at: int) -> BatchInvariant | PerExample:
    """The kind of an operand; of one number in the shape of the batch, as examples."""
    kind, shapes = op.kinds[at], op.shapes[at]
    if isinstance(kind, PerExample) or shapes[0] == shapes[1]:
        return kind
    return PerExample(resized_axes(shapes)[0], 1, None, kind.growth)
