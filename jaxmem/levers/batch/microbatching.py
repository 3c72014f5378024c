"""Value and gradient of a large batch, slice by slice inside one step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.ground.checks import is_count, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.reductions import checked, of_metrics, proof_of, sizes_of
from jaxmem.levers.batch.slices import as_returned, batch_axes, batch_size, check_sizes, product
from jaxmem.levers.batch.sums import Sums, mean_over, merged, weight_of


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
    of the whole batch, up to rounding, if the loss is a mean (or a sum, or a masked mean) over
    examples that do not see each other. That is proved from the loss, traced for the whole batch
    and for a slice, and a `JaxmemWarning` names the operation that stands in the way. Slices of a
    masked mean weigh what each is divided by: ``mask.sum()``, or ``max(mask.sum(), 1)``; a
    regulariser of the parameters may be added to it. (The result is NaN if the weights of a slice
    cancel to 0, though it counts something: what it would add is not known.) Batch norm does see
    the batch: each slice is normalised by its own statistics, and the running ones are carried from
    slice to slice, as in ``count`` small steps. If that is what you want, pass
    ``reduction="mean"``.

    Each metric becomes what it is for the whole batch, as far as that is proved from its program:
    means are averaged, sums and counts added, arrays with a row for each example joined in the
    order of the batch, and what does not depend on the batch stays. A metric of which nothing is
    proved (a maximum, a class number) is treated by its form: with the batch's examples along its
    first axis it is joined, of integers (or booleans) it is added, and else it is treated as the
    loss is.

    Slice ``i`` is examples ``i``, ``i + count``, ``i + 2 count`` ...: strided, so that a batch
    sharded over devices stays where it is (`optax.microbatching` cuts in the same order).

    Args:
        loss_fn: as for `jaxmem.train_step`: ``loss_fn(params, batch)`` and its forms with
            ``model_state=`` and ``key=``. A key is folded with the number of the slice, so that
            each draws its own dropout masks, and its own of what is drawn once for a batch (a noise
            level).
        count: number of slices, 1 or more. 1 is the plain value and gradient.
        reduction: ``"mean"`` or ``"sum"``, whichever the loss is over its examples; None: the one
            that is proved. Given, it is taken at your word, unless the other one is proved, and
            for metrics too of which nothing is proved.
        weight: for a mean over something else than examples that is not proved, what a slice has of
            it, a number: ``lambda batch: batch["mask"].sum()`` where the loss is a mean over
            tokens. A slice of weight 0 contributes nothing, whatever its loss; where all weigh 0,
            loss and gradients are 0. That the loss is such a mean is not checked.
        uneven: let the last slice be smaller where the batch does not divide; its gradient is
            compiled apart.
        sharding: the batch's, with its first axis over devices. Each device then takes slices of
            its own part, and gradients cross devices once, after the last slice, not in each (XLA
            on its own reduces them in each). ``loss_fn`` sees its device's part alone: batch norm
            has per-device statistics, their running averages are averaged. Parameters must be
            whole on each device.

    Returns:
        ``(params, batch, *, model_state=None, key=None) -> (results, gradients)``: results as
        ``loss_fn`` returns them, means and sums of numbers in float32 or wider. Gradients are
        summed in float32 or wider and have the parameters' dtypes.

    Raises:
        JaxmemError: no such reduction, or the other one is proved; a count below 1 or above the
            batch, arrays of several first dimensions in the batch, or a batch that does not divide;
            a loss that takes no slice of the batch;
            a weight that is no number; a metric whose shape depends on the batch otherwise than by
            a row for each example.

    Warns:
        JaxmemWarning: the loss is not proved to be a mean or a sum over examples, and neither
            ``reduction`` nor ``weight`` says what it is. Slices are averaged. Or nothing is proved
            of a metric, or the model state may be another one than after the whole batch, and
            ``reduction`` is not given.

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
    if weight is not None and not callable(weight):
        raise JaxmemError(
            "weight= takes a function of a slice of the batch, such as lambda batch: "
            f"batch['mask'].sum(); got {shown(weight)}."
        )
    axes = batch_axes(sharding)
    told: dict[str, Any] = {}  # what was said of the loss, by the shapes of the arguments

    def rules(size, shards, arguments):
        """What becomes of the slices' losses, of each of their metrics by its path, and what the
        slices are weighted by, if that is proved."""
        shapes = jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), arguments)
        plain = getattr(loss_fn, "unplanned", loss_fn)
        # At each call: what the loss closes over may have changed, and what it is with that.
        proof = proof_of(plain, sizes_of(size // (shards or 1), count), arguments)
        said = proof.why, proof.state, [(path, one.why) for path, one in proof.metrics.items()]
        seen = told.get(str(shapes)) == said
        told[str(shapes)] = said
        if proof.refused:
            raise JaxmemError(
                f"loss_fn takes no slice of the batch: {proof.refused}. Where it has a size of the "
                "batch written out, let it take that from the batch."
            )
        loss = "weighted"
        if weight is None:
            loss = checked(proof, reduction, count, silent=seen)
        silent = seen or reduction is not None
        divisor = None
        if proof.divisor is not None and weight is None and loss == "weighted":
            divisor = proof.divisor
        metrics = proof.metrics
        if divisor is None:  # then no metric is weighted by what the loss is divided by
            metrics = {path: metric.unweighted for path, metric in metrics.items()}
        return loss, of_metrics(metrics, loss, count, silent), divisor

    def value_and_grad(params, batch, *, model_state=None, key=None):
        jaxprs.check_devices(params=params, batch=batch)
        mesh = sharding.mesh if sharding is not None else None
        shards = mesh and product(mesh.shape[axis] for axis in axes)
        cuts = count > 1 or shards
        size = batch_size(batch) if cuts else 1
        of_loss, of_metrics, divisor = "sum" if weight is None else "weighted", {}, None
        if cuts:
            check_sizes(size, count, uneven, shards)
            arguments = params, batch, model_state, key
            of_loss, of_metrics, divisor = rules(size, shards, arguments)

        def shares(part):
            """What the terms of a slice are multiplied with, by rule; and its count."""
            share, one = jnp.asarray(batch_size(part) / size if cuts else 1.0), jnp.asarray(1.0)
            by_weight = count_of = one
            if weight is not None:
                by_weight = count_of = weight_of(weight, part)
            elif divisor is not None:
                by_weight, count_of = divisor.slice_weight(part, share)
            return {"mean": share, "sum": one, "weighted": by_weight}, count_of

        sums = Sums(loss_fn, count, shares, of_loss, of_metrics, proved=divisor is not None)

        each = max(sizes_of(size // (shards or 1), count))

        def over_slices(params, batch, model_state, key):
            rest = divisor.rest(params, each) if divisor is not None else None
            return *sums.over_slices(params, batch, model_state, key), rest

        whole = over_slices
        if shards:
            replicated, split = PartitionSpec(), PartitionSpec(axes)

            def on_each(params, batch, model_state, key):
                if key is not None:
                    key = jax.random.fold_in(key, jax.lax.axis_index(axes))
                terms, carried, rows, rest = over_slices(params, batch, model_state, key)
                carried = jax.tree.map(lambda leaf: mean_over(leaf, axes), carried)
                return jax.lax.psum(terms, axes), carried, rows, rest

            whole = jax.shard_map(
                on_each,
                mesh=mesh,
                in_specs=(replicated, split, replicated, replicated),
                out_specs=(replicated, replicated, split, replicated),
                axis_names=set(axes),
                check_vma=False,
            )
        terms, carried, rows, rest = whole(params, batch, model_state, key)
        if weight is not None:  # 0 where all slices weigh nothing
            terms = sums.divided(terms, jnp.where(terms.count == 0, 1, terms.count))
        elif divisor is not None:
            terms = sums.divided(terms, divisor.total_weight(terms.count, each), rest)
        gradients = jax.tree.map(lambda g, like: g.astype(like.dtype), terms.gradients, params)
        metrics = merged(terms.metrics, carried.metrics, rows)
        return as_returned(terms.loss, carried.model_state, metrics), gradients

    return value_and_grad
