"""Value and gradient of a large batch, slice by slice inside one step."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.ground.checks import is_count, shown
from jaxmem.ground.errors import JaxmemError, JaxmemWarning
from jaxmem.levers.batch.independence import Proof, reduction_of
from jaxmem.levers.batch.loss import Results, call_loss


def microbatch(
    loss_fn: Callable,
    count: int,
    *,
    reduction: str | None = None,
    weight: Callable[[Any], jax.Array] | None = None,
    uneven: bool = False,
    sharding: NamedSharding | None = None,
) -> Callable:
    """Value and gradient of ``loss_fn`` over ``count`` slices of a batch, one after the other.

    The memory is that of one slice and one sum of gradients, whatever the count. The result is that
    of the whole batch, up to rounding, if the loss is a mean (or a sum) over examples that do not
    see each other. That is proved from the loss, traced for the whole batch and for a slice, and a
    `JaxmemWarning` names the operation that stands in the way. Batch norm does see the batch: each
    slice is normalised by its own statistics, and the running ones are carried from slice to slice,
    as in ``count`` small steps. If that is what you want, pass ``reduction="mean"``.

    Slice ``i`` is examples ``i``, ``i + count``, ``i + 2 count`` ...: strided, so that a batch
    sharded over devices stays where it is (`optax.microbatching` cuts in the same order).

    Args:
        loss_fn: as for `jaxmem.train_step`: ``loss_fn(params, batch)`` and its forms with
            ``model_state=`` and ``key=``. A key is folded with the number of the slice, so that
            each draws its own dropout masks.
        count: number of slices, 1 or more. 1 is the plain value and gradient.
        reduction: ``"mean"`` or ``"sum"``, whichever the loss is over its examples; None: the one
            that is proved. Given, it is taken at your word, unless the other one is proved.
            Floating-point metrics are treated as the loss is, integer ones are counts and are
            summed.
        weight: for a mean over something else than examples, what a slice has of it:
            ``lambda batch: batch["mask"].sum()`` where the loss is a mean over tokens. A slice of
            weight 0 contributes nothing, whatever its loss. That the loss is such a mean is not
            checked.
        uneven: let the last slice be smaller where the batch does not divide; its gradient is
            compiled apart.
        sharding: the batch's, with its first axis over devices. Each device then takes slices of
            its own part, and gradients cross devices once, after the last slice, not in each (XLA
            on its own reduces them in each). ``loss_fn`` sees its device's part alone: batch norm
            has per-device statistics, their running averages are averaged. Parameters must be
            whole on each device.

    Returns:
        ``(params, batch, *, model_state=None, key=None) -> (results, gradients)``: results as
        ``loss_fn`` returns them. Gradients are summed in float32 or wider and have the
        parameters' dtypes.

    Raises:
        JaxmemError: no such reduction, or the other one is proved; a count below 1 or above the
            batch, arrays of several first dimensions in the batch, or a batch that does not divide.

    Warns:
        JaxmemWarning: the loss is not proved to be a mean or a sum over examples, and neither
            ``reduction`` nor ``weight`` says what it is. Slices are averaged.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss_fn(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> w, x = jnp.ones(3), jnp.arange(24.0).reshape(8, 3)
    >>> loss, gradient = jaxmem.microbatch(loss_fn, 4)(w, x)
    >>> print(loss == loss_fn(w, x), jnp.allclose(gradient, jax.grad(loss_fn)(w, x)))
    True True
    """
    if not callable(loss_fn):
        raise JaxmemError(f"jaxmem.microbatch takes a loss function; got {shown(loss_fn)}.")
    if not is_count(count):
        raise JaxmemError(
            f"jaxmem.microbatch takes count=, the number of slices, as an int of 1 or more; got "
            f"{shown(count)}."
        )
    if reduction not in (None, "mean", "sum"):
        raise JaxmemError(f"reduction= is 'mean' or 'sum', as the loss is; got {shown(reduction)}.")
    if weight is not None and reduction == "sum":
        raise JaxmemError(
            "A loss that is a sum needs no weight=: its slices are added as they are."
        )
    axes = _batch_axes(sharding)
    proofs: dict[Any, Proof] = {}  # by the shapes of the arguments

    def reduced(size, shards, arguments):
        """What the loss is over its examples."""
        shapes = jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), arguments)
        seen = str(shapes) in proofs
        if not seen:
            plain = getattr(loss_fn, "unplanned", loss_fn)
            proofs[str(shapes)] = _proof(plain, _sizes(size // (shards or 1), count), arguments)
        return _checked(proofs[str(shapes)], reduction, count, silent=seen)

    def value_and_grad(params, batch, *, model_state=None, key=None):
        mesh = sharding.mesh if sharding is not None else None
        shards = mesh and _product(mesh.shape[axis] for axis in axes)
        cuts = count > 1 or shards
        size = _batch_size(batch) if cuts else 1
        if cuts:
            _check_sizes(size, count, uneven, shards)
        mean = cuts and weight is None
        if mean:
            mean = reduced(size, shards, (params, batch, model_state, key)) == "mean"

        def share(part):
            return _batch_size(part) / size if mean else 1.0

        def gradient(params, batch, model_state, key):
            return _sum_over_slices(
                loss_fn, count, weight or share, params, batch, model_state, key
            )

        whole = gradient
        if shards:
            replicated, split = PartitionSpec(), PartitionSpec(axes)

            def on_each(params, batch, model_state, key):
                if key is not None:
                    key = jax.random.fold_in(key, jax.lax.axis_index(axes))
                sums, total, state = gradient(params, batch, model_state, key)
                state = jax.tree.map(lambda leaf: _mean_over(leaf, axes), state)
                return *jax.lax.psum((sums, total), axes), state

            whole = jax.shard_map(
                on_each,
                mesh=mesh,
                in_specs=(replicated, split, replicated, replicated),
                out_specs=replicated,
                axis_names=set(axes),
                check_vma=False,
            )
        (gradients, loss, metrics), total, model_state = whole(params, batch, model_state, key)
        if weight is not None:
            gradients, loss, metrics = jax.tree.map(
                lambda leaf: leaf / total.astype(leaf.dtype) if _floating(leaf) else leaf,
                (gradients, loss, metrics),
            )
        gradients = jax.tree.map(lambda g, like: g.astype(like.dtype), gradients, params)
        return _as_returned(loss, model_state, metrics), gradients

    return value_and_grad


def _proof(loss_fn: Callable, sizes: set[int], arguments: tuple) -> Proof:
    def loss(params, batch, model_state, key):
        results = call_loss(loss_fn, params, batch, model_state, key)
        return results.loss, results.model_state

    params, batch, model_state, key = arguments
    return reduction_of(loss, batch, sizes, params, model_state, key)


def _sizes(size: int, count: int) -> set[int]:
    """Of the slices of a batch."""
    each = -(-size // count)
    return {each, size % each} - {0}


def _checked(proof: Proof, given: str | None, count: int, silent: bool) -> str:
    """The reduction to use, if the one that is given is not proved wrong."""
    if proof.reduction is not None:
        if given not in (None, proof.reduction):
            raise JaxmemError(
                f"The loss is a {proof.reduction} over its examples, and reduction={given!r} was "
                f"given. Leave it out, or make the loss a {given}."
            )
        return proof.reduction
    if given is None and not silent:
        warnings.warn(
            f"The gradients of {count} microbatches are averaged, and that may not be the gradient "
            f"of the whole batch: the loss is not proved to be a mean or a sum over its examples; "
            f"{proof.why}. If slices are to be averaged all the same (under batch norm, each has "
            "statistics of its own), pass reduction='mean'. For a mean over what a mask leaves, "
            "pass jaxmem.microbatch(..., weight=...).",
            JaxmemWarning,
            stacklevel=4,
        )
    return given or "mean"


def _sum_over_slices(loss_fn, count, weigh, params, batch, model_state, key):
    """Weighted sums of gradients, loss and metrics; the total weight; the last model state."""

    @jax.jit  # traced (and planned) once for its shapes and for its loop
    def one(params, part, model_state, key):
        def loss_of(params):
            results = call_loss(loss_fn, params, part, model_state, key)
            return results.loss, results

        gradients, results = jax.grad(loss_of, has_aux=True)(params)
        share = jnp.asarray(weigh(part))
        terms = (gradients, results.loss, results.metrics)
        return jax.tree.map(lambda leaf: _weighted(leaf, share), terms), share, results.model_state

    def add(total, part, model_state, index):
        own_key = None if key is None else jax.random.fold_in(key, index)
        terms, share, model_state = one(params, part, model_state, own_key)
        return jax.tree.map(jnp.add, total, (terms, share)), model_state

    if count == 1:
        terms, share, model_state = one(params, batch, model_state, key)
        return terms, share, model_state

    size = _batch_size(batch)
    each = -(-size // count)
    full, rest = divmod(size, each)  # rest: examples of a smaller last slice
    cut = jax.tree.map(lambda leaf: _cut(leaf, full, each), batch)
    first = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((each, *leaf.shape[1:]), leaf.dtype), batch
    )
    shapes = jax.eval_shape(one, params, first, model_state, key)
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes[:2])

    def body(carry, index):
        total, model_state = carry
        part = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False), cut
        )
        return add(total, part, model_state, index), None

    (total, model_state), _ = jax.lax.scan(body, (zeros, model_state), jnp.arange(full))
    if rest:
        last = jax.tree.map(lambda leaf: leaf[full * each :], batch)
        total, model_state = add(total, last, model_state, full)
    return *total, model_state


def _cut(leaf: jax.Array, count: int, each: int) -> jax.Array:
    """``[each, count, ...]``: slice ``i`` is ``[:, i]``. No element moves, and a sharded first axis
    stays sharded."""
    leaf = jnp.asarray(leaf)[: count * each]
    return leaf.reshape(each, count, *leaf.shape[1:])


def _weighted(leaf: jax.Array, share: jax.Array) -> jax.Array:
    """A term of a sum, in float32 or wider; 0 where the share is, whatever the term."""
    leaf = jnp.asarray(leaf)
    if not _floating(leaf):
        return leaf
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    share = share.astype(leaf.dtype)
    return jnp.where(share == 0, jnp.zeros_like(leaf), leaf * share)


def _mean_over(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The average of a model state over devices; what is not floating-point is the same on all."""
    if _floating(leaf):
        return jax.lax.pmean(leaf, axes)
    return leaf


def _as_returned(loss, model_state, metrics) -> Any:
    results = Results(loss, model_state, metrics)
    parts = [part for part in results[1:] if part is not None and part != {}]
    return (loss, *parts) if parts else loss


def _batch_size(batch: Any) -> int:
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.shape(leaf):
            raise JaxmemError(
                f"batch{jax.tree_util.keystr(path)} is a scalar: every array of a batch that is "
                "cut into slices needs a first axis of examples."
            )
        sizes[jax.tree_util.keystr(path)] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"batch{path} has {size}" for path, size in sizes.items())
        raise JaxmemError(
            f"The arrays of a batch must have as many examples as each other in their first axis; "
            f"{listed or 'there is no array in it'}."
        )
    return next(iter(sizes.values()))


def _check_sizes(size: int, count: int, uneven: bool, shards: int | None) -> None:
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


def _batch_axes(sharding: NamedSharding | None) -> tuple[str, ...]:
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


def _product(numbers) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
