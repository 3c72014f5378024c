"""Value and gradient of a large batch, slice by slice inside one step."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.ground.checks import is_count, is_numeric, shown
from jaxmem.ground.errors import JaxmemError, JaxmemWarning
from jaxmem.levers.batch.independence import Metric, Proof, reduction_of
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
            each draws its own dropout masks.
        count: number of slices, 1 or more. 1 is the plain value and gradient.
        reduction: ``"mean"`` or ``"sum"``, whichever the loss is over its examples; None: the one
            that is proved. Given, it is taken at your word, unless the other one is proved, and
            for metrics too of which nothing is proved.
        weight: for a mean over something else than examples, what a slice has of it, a number:
            ``lambda batch: batch["mask"].sum()`` where the loss is a mean over tokens. A slice of
            weight 0 contributes nothing, whatever its loss; where all weigh 0, loss and gradients
            are 0. That the loss is such a mean is not checked.
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
            batch, arrays of several first dimensions in the batch, or a batch that does not divide;
            a weight that is no number; a metric whose shape depends on the batch otherwise than by
            a row for each example.

    Warns:
        JaxmemWarning: the loss is not proved to be a mean or a sum over examples, and neither
            ``reduction`` nor ``weight`` says what it is. Slices are averaged. Or nothing is proved
            of a metric, and ``reduction`` is not given.

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
    axes = _batch_axes(sharding)
    proofs: dict[Any, Proof] = {}  # by the shapes of the arguments

    def rules(size, shards, arguments):
        """What becomes of the slices' losses, and of each of their metrics by its path."""
        shapes = jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), arguments)
        seen = str(shapes) in proofs
        if not seen:
            plain = getattr(loss_fn, "unplanned", loss_fn)
            proofs[str(shapes)] = _proof(plain, _sizes(size // (shards or 1), count), arguments)
        proof = proofs[str(shapes)]
        loss = "weighted"
        if weight is None:
            loss = _checked(proof, reduction, count, silent=seen)
        silent = seen or reduction is not None
        return loss, _of_metrics(proof.metrics, loss, count, silent)

    def value_and_grad(params, batch, *, model_state=None, key=None):
        jaxprs.check_devices(params=params, batch=batch)
        mesh = sharding.mesh if sharding is not None else None
        shards = mesh and _product(mesh.shape[axis] for axis in axes)
        cuts = count > 1 or shards
        size = _batch_size(batch) if cuts else 1
        of_loss, of_metrics = "sum" if weight is None else "weighted", {}
        if cuts:
            _check_sizes(size, count, uneven, shards)
            arguments = params, batch, model_state, key
            of_loss, of_metrics = rules(size, shards, arguments)

        def shares(part):
            """What the terms of a slice are multiplied with, by rule."""
            return {
                "mean": jnp.asarray(_batch_size(part) / size if cuts else 1.0),
                "sum": jnp.asarray(1.0),
                "weighted": jnp.asarray(1.0) if weight is None else _weight(weight, part),
            }

        sums = _Sums(loss_fn, count, shares, of_loss, of_metrics)
        whole = sums.over_slices
        if shards:
            replicated, split = PartitionSpec(), PartitionSpec(axes)

            def on_each(params, batch, model_state, key):
                if key is not None:
                    key = jax.random.fold_in(key, jax.lax.axis_index(axes))
                terms, carried, rows = sums.over_slices(params, batch, model_state, key)
                carried = jax.tree.map(lambda leaf: _mean_over(leaf, axes), carried)
                return jax.lax.psum(terms, axes), carried, rows

            whole = jax.shard_map(
                on_each,
                mesh=mesh,
                in_specs=(replicated, split, replicated, replicated),
                out_specs=(replicated, replicated, split),
                axis_names=set(axes),
                check_vma=False,
            )
        terms, carried, rows = whole(params, batch, model_state, key)
        if weight is not None:
            terms = sums.divided(terms)
        gradients = jax.tree.map(lambda g, like: g.astype(like.dtype), terms.gradients, params)
        metrics = _merged(terms.metrics, carried.metrics, rows)
        return _as_returned(terms.loss, carried.model_state, metrics), gradients

    return value_and_grad


def _proof(loss_fn: Callable, sizes: set[int], arguments: tuple) -> Proof:
    def loss(params, batch, model_state, key):
        results = call_loss(loss_fn, params, batch, model_state, key)
        return results.loss, results.model_state, results.metrics

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
            stacklevel=5,
        )
    return given or "mean"


_DONE = {"mean": "averaged", "sum": "added", "rows": "joined", "weighted": "averaged by weight"}


def _of_metrics(
    metrics: Mapping[str, Metric], loss: str, count: int, silent: bool
) -> dict[str, str]:
    """What becomes of each metric of the slices: what is proved, or what its form tells."""
    found, unproved = {}, []
    for path, metric in metrics.items():
        found[path] = metric.reduction or _by_form(path, metric, loss)
        if metric.reduction is None:
            form = f"metrics{path}, {metric.dtype}{list(metric.shape)}, is {_DONE[found[path]]}"
            unproved.append(f"{form} ({metric.why})")
    if unproved and not silent:
        word = "sum" if loss == "sum" else "mean"
        warnings.warn(
            f"Metrics of {count} microbatches may not be those of the whole batch. Nothing is "
            f"proved of these: {'; '.join(unproved)}. If that is what you want, pass "
            f"reduction={word!r}. If not, let loss_fn return a mean, a sum, or an array with a row "
            "for each example, which is joined in the order of the batch, and take its maximum, "
            "say, after the step.",
            JaxmemWarning,
            stacklevel=5,
        )
    return found


def _by_form(path: str, metric: Metric, loss: str) -> str:
    if metric.form == "rows":
        return "rows"
    if metric.form == "mixed":
        raise JaxmemError(
            f"metrics{path} is {metric.dtype}{list(metric.shape)} for the whole batch, a shape "
            "that depends on the batch and does not have a row for each example along its first "
            "axis, so that those of slices cannot be put together. Put the examples first, or "
            "reduce it in loss_fn."
        )
    return loss if jnp.issubdtype(metric.dtype, jnp.inexact) else "sum"


class _Terms(NamedTuple):
    """What is added up over slices; ``weight`` is of a slice, or of all."""

    gradients: Any
    loss: Any
    metrics: Any
    weight: Any


class _Carried(NamedTuple):
    """What goes from slice to slice, or is the same in each: the last one's counts."""

    model_state: Any
    metrics: Any


@dataclasses.dataclass(frozen=True)
class _Sums:
    """How the results of slices become those of the batch.

    Attributes:
        shares: by rule, what the terms of a slice are multiplied with.
        of_loss, of_metrics: the rule of the loss, and of each metric by its path.
    """

    loss_fn: Callable
    count: int
    shares: Callable[[Any], dict[str, jax.Array]]
    of_loss: str
    of_metrics: dict[str, str]

    def rule(self, path: Any) -> str:
        """Of a metric. `train_step` adds the loss to them, whose rule it has."""
        return self.of_metrics.get(jax.tree_util.keystr(path), self.of_loss)

    def only(self, metrics: Any, *rules: str) -> Any:
        """The metrics of some rules, with None for the others."""

        def one(path, leaf):
            return leaf if self.rule(path) in rules else None

        return jax.tree_util.tree_map_with_path(one, metrics)

    def over_slices(self, params, batch, model_state, key) -> tuple[_Terms, _Carried, Any]:
        """Sums of the terms, what the last slice hands on, and the rows of metrics that have
        some."""

        @jax.jit  # traced (and planned) once for its shapes and for its loop
        def one(params, part, model_state, key):
            def loss_of(params):
                results = call_loss(self.loss_fn, params, part, model_state, key)
                return results.loss, results

            gradients, results = jax.grad(loss_of, has_aux=True)(params)
            shares = self.shares(part)
            share = shares[self.of_loss]

            def term(path, leaf):
                return _weighted(leaf, shares[self.rule(path)])

            added = self.only(results.metrics, *shares)
            terms = _Terms(
                jax.tree.map(lambda leaf: _weighted(leaf, share), gradients),
                _weighted(results.loss, share),
                jax.tree_util.tree_map_with_path(term, added),
                share,
            )
            carried = _Carried(results.model_state, self.only(results.metrics, "same"))
            return terms, carried, self.only(results.metrics, "rows")

        if self.count == 1:
            return one(params, batch, model_state, key)

        size = _batch_size(batch)
        each = -(-size // self.count)
        full, rest = divmod(size, each)  # rest: examples of a smaller last slice
        cut = jax.tree.map(lambda leaf: _cut(leaf, full, each), batch)
        first = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((each, *leaf.shape[1:]), leaf.dtype), batch
        )
        terms, carried, _ = jax.eval_shape(one, params, first, model_state, key)
        zeros = jax.tree.map(
            lambda like: jnp.zeros(like.shape, like.dtype), (terms, carried.metrics)
        )

        def add(before, part, index):
            total, carried = before
            own_key = None if key is None else jax.random.fold_in(key, index)
            terms, carried, rows = one(params, part, carried.model_state, own_key)
            return (jax.tree.map(jnp.add, total, terms), carried), rows

        def body(carry, index):
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False), cut
            )
            return add(carry, part, index)

        start = zeros[0], _Carried(model_state, zeros[1])
        done, rows = jax.lax.scan(body, start, jnp.arange(full))
        rows = jax.tree.map(_in_order, rows)
        if rest:
            last = jax.tree.map(lambda leaf: leaf[full * each :], batch)
            done, more = add(done, last, full)
            rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), rows, more)
        return done[0], done[1], rows

    def divided(self, terms: _Terms) -> _Terms:
        """The sums of what is weighted as means; 0 where all slices weigh nothing."""
        total = jnp.where(terms.weight == 0, 1, terms.weight)

        def mean(leaf):
            return leaf / total.astype(leaf.dtype) if _inexact(leaf) else leaf

        def mean_metric(path, leaf):
            return mean(leaf) if self.rule(path) == "weighted" else leaf

        return _Terms(
            jax.tree.map(mean, terms.gradients),
            mean(terms.loss),
            jax.tree_util.tree_map_with_path(mean_metric, terms.metrics),
            terms.weight,
        )


def _weight(weight: Callable[[Any], Any], part: Any) -> jax.Array:
    """What a slice has of what the loss is a mean over."""
    found = weight(part)
    if not is_numeric(found) or jnp.shape(found):
        raise JaxmemError(
            "weight= returns one number for a slice of the batch, such as batch['mask'].sum(); it "
            f"returned {shown(found)}."
        )
    return jnp.asarray(found)


def _merged(*trees: Any) -> Any:
    """Trees of one structure, in which each leaf is there in one of them."""

    def one(*leaves):
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(one, *trees, is_leaf=lambda leaf: leaf is None)


def _in_order(rows: jax.Array) -> jax.Array:
    """Rows of slices, ``[slices, each, ...]``, in the order of the batch that `_cut` cut."""
    return rows.swapaxes(0, 1).reshape(-1, *rows.shape[2:])


def _cut(leaf: jax.Array, count: int, each: int) -> jax.Array:
    """``[each, count, ...]``: slice ``i`` is ``[:, i]``. No element moves, and a sharded first axis
    stays sharded."""
    leaf = jnp.asarray(leaf)[: count * each]
    return leaf.reshape(each, count, *leaf.shape[1:])


def _weighted(leaf: jax.Array, share: jax.Array) -> jax.Array:
    """A term of a sum, in float32 or wider; 0 where the share is, whatever the term."""
    leaf = jnp.asarray(leaf)
    if not _inexact(leaf):
        return leaf
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    share = share.astype(leaf.dtype)
    return jnp.where(share == 0, jnp.zeros_like(leaf), leaf * share)


def _mean_over(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The average over devices; what is not floating-point is the same on all."""
    if _inexact(leaf):
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


def _inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
