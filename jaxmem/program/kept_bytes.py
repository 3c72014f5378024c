"""Bytes that one device has of what a scan or a region keeps, of which JAX says the shapes."""

import math
import statistics
from collections.abc import Iterator

from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.jaxprs.residuals import SavedResidual
from jaxmem.program.abstract_values import named_type, size_of
from jaxmem.program.operations import Program


def bytes_alike(values: list[SavedResidual], body: Program) -> int:
    """Bytes that one device has of values of a scan's body, which are known by the `jax.shard_map`
    that makes them, by the sharding that is asked for, or by their shapes: of each, what it has of
    most values of the body that have the same; of what a scan inside stacks, of those that it
    stacks; of others, what it has of all values together."""
    if not body.whole_sizes:
        return sum(size_of(one.aval) for one in values)
    shares: dict[str, list[float]] = {}
    for kind, share in _shares(body):
        shares.setdefault(kind, []).append(share)
    middle = {kind: statistics.median_low(found) for kind, found in shares.items()}
    every = sum(body.sizes) / max(sum(body.whole_sizes), 1)

    def share_of(one: SavedResidual) -> float:
        aval = one.aval
        if one.piece is not None:
            return one.piece / max(size_of(aval), 1)
        asked = one.sharding if isinstance(one.sharding, NamedSharding) else None
        if asked and aval.size and PartitionSpec.UNCONSTRAINED not in asked.spec:
            return math.prod(asked.shard_shape(aval.shape)) / aval.size
        dtype, shape = getattr(aval, "dtype", ""), tuple(getattr(aval, "shape", ()))
        kinds = (named_type(dtype, shape[first:]) for first in range(len(shape)))
        return next((middle[kind] for kind in kinds if kind in middle), every)

    return round(sum(size_of(one.aval) * share_of(one) for one in values))


def _shares(program: Program) -> Iterator[tuple[str, float]]:
    """Of each value of a program and of what it repeats: its type, and which part of it one device
    has."""
    values = zip(program.whole_types, program.sizes, program.whole_sizes, strict=False)
    yield from ((kind, size / max(whole, 1)) for kind, size, whole in values)
    for operation in program.operations:
        if operation.body:
            yield from _shares(operation.body)
