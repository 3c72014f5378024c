"""How a batch is cut into slices, on one device and on several."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem.ground.checks import shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.loss import Results


def cut_leaf(leaf: jax.Array, count: int, each: int) -> jax.Array:
    """``[each, count, ...]``: slice ``i`` is ``[:, i]``. No element moves, and a sharded first axis
    stays sharded."""
    leaf = jnp.asarray(leaf)[: count * each]
    return leaf.reshape(each, count, *leaf.shape[1:])


def part_of(cut: Any, index: Any) -> Any:
    """A slice of a batch that is cut."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False), cut
    )


def as_returned(loss, model_state, metrics) -> Any:
    results = Results(loss, model_state, metrics)
    parts = [
        part for part in results[1:] if not (part is None or (isinstance(part, dict) and not part))
    ]
    return (loss, *parts) if parts else loss


def batch_size(batch: Any) -> int:
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.shape(leaf):
            raise JaxmemError(
                f"batch{jax.tree_util.keystr(path)} is a scalar: every array of a batch that is "
                "cut into slices needs a first axis of examples. Pass what is the same for all of "
                "them beside the batch: close over it, or have it in the model state; a random key "
                "as the step's key=."
            )
        sizes[jax.tree_util.keystr(path)] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"batch{path} has {size}" for path, size in sizes.items())
        raise JaxmemError(
            f"The arrays of a batch must have as many examples as each other in their first axis; "
            f"{listed or 'there is no array in it'}."
        )
    return next(iter(sizes.values()))


def check_sizes(size: int, count: int, uneven: bool, shards: int | None) -> None:
    if count > size:
        raise JaxmemError(f"A batch of {size} cannot be cut into {count} slices.")
    if shards and size % (shards * count):
        raise JaxmemError(
            f"A batch of {size} over {shards} devices does not divide into {count} slices: it must "
            f"be a multiple of {shards * count}."
        )
    if size % count == 0:
        return
    if not uneven:
        divisors = [str(d) for d in range(1, size + 1) if size % d == 0]
        raise JaxmemError(
            f"A batch of {size} does not divide into {count} equal slices. It divides by "
            f"{', '.join(divisors)}; or pass jaxmem.microbatch(..., uneven=True) for a smaller "
            "last slice."
        )
    each = -(-size // count)
    if -(-size // each) != count:
        raise JaxmemError(
            f"A batch of {size} does not divide into {count} slices of which only the last is "
            f"smaller: slices of {each} are {-(-size // each)}. Pass count={-(-size // each)}."
        )


def batch_axes(sharding: NamedSharding | None) -> tuple[str, ...]:
    """The mesh axes over which the first axis of a batch is sharded."""
    if sharding is None:
        return ()
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        raise JaxmemError(
            "sharding= takes the batch's NamedSharding, with its first axis over devices, such as "
            f"NamedSharding(mesh, PartitionSpec('data')); got {shown(sharding)}."
        )
    axes = sharding.spec[0]
    return axes if isinstance(axes, tuple) else (axes,)


def product(numbers) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
