"""Max and min poolings with the derivative that JAX gives them: XLA scatters the cotangent.

Where a compiler fuses slices a plan has a derivative of its own in their place
(`jaxmem.program.derivatives.pooling`). (tests/test_pooling.py)
"""

import math
from typing import Any

from jaxmem.program.derivatives.pooling import POOLINGS
from jaxmem.program.readers import SMALL, shape_of


def _is_scattered(program: Any, operation: Any) -> bool:
    is_pooling = operation.name in POOLINGS
    return is_pooling and program.as_jax_derives and program.rules.picks_poolings


def scattered_places(program: Any, operation: Any) -> int:
    """Bytes of what the cotangent is scattered by: what each window has picked, and where, a number
    for each axis of the array."""
    if not _is_scattered(program, operation):
        return 0
    (result,) = operation.outputs
    shape, size = shape_of(program, result), program.sizes[result]
    share = size / max((program.whole_sizes or program.sizes)[result], 1)
    return size + round(share * 4 * len(shape) * math.prod(shape))


def pooled_as_computed(program: Any) -> frozenset[int]:
    """The results of poolings that compute what they read: not what takes long and each of several
    windows would compute. Of a `relu` whose windows do not overlap there are the zeros instead that
    it compares with: they are as long as those that the cotangent is scattered into, which XLA
    makes at the same time."""
    if not any(_is_scattered(program, operation) for operation in program.operations):
        return frozenset()
    cycles, sizes = program.rules.cycles, program.sizes
    dear = {name for name, _ in cycles.dear} if cycles else set()
    made_by: dict[int, frozenset[str]] = {}  # what fused operations compute, and from what
    found = set()
    for operation in program.operations:
        if operation.fused:
            own = frozenset([operation.name, *operation.source.calls])
            for value in operation.outputs:
                wide = (one for one in operation.inputs if sizes[one] * SMALL >= sizes[value])
                made_by[value] = own.union(*(made_by.get(one, ()) for one in wide))
        elif _is_scattered(program, operation) and (names := made_by.get(operation.inputs[0])):
            apart = not operation.contraction.overlaps
            if "max" not in names if apart else names.isdisjoint(dear):
                found.update(operation.outputs)
    return frozenset(found)
