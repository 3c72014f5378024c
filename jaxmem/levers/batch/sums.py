"""Sums over slices: losses, gradients and metrics, with the state that is carried along."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.checks import is_numeric, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.widths import promote_at_least
from jaxmem.levers.batch.independence import ParameterOnlyTerms
from jaxmem.levers.batch.loss import call_loss, own
from jaxmem.levers.batch.slices import batch_size, cut_leaf, part_of


class Terms(NamedTuple):
    """What is added up over slices; ``count`` is what a slice, or all, have of what the loss is a
    mean over, ``weight`` what its terms are multiplied with for that."""

    gradients: Any
    loss: Any
    metrics: Any
    weight: Any
    count: Any


class Carried(NamedTuple):
    """What goes from slice to slice, or is the same in each: the last one's counts."""

    model_state: Any
    metrics: Any


@dataclasses.dataclass(frozen=True)
class Sums:
    """How the results of slices become those of the batch.

    Attributes:
        shares: by rule, what the terms of a slice are multiplied with; and the slice's count.
        of_loss, of_metrics: the rule of the loss, and of each metric by its path.
        proved: nobody says that a slice of weight 0 contributes nothing: if it has something that
            was divided by 0, the sum is NaN.
    """

    loss_fn: Callable
    count: int
    shares: Callable[[Any], tuple[dict[str, jax.Array], jax.Array]]
    of_loss: str
    of_metrics: dict[str, str]
    proved: bool = False

    def rule(self, path: Any) -> str:
        """Of a metric. `train_step` adds the loss to them, whose rule it has."""
        return self.of_metrics.get(jax.tree_util.keystr(path), self.of_loss)

    def only(self, metrics: Any, *rules: str) -> Any:
        """The metrics of some rules, with None for the others."""

        def one(path, leaf):
            return leaf if self.rule(path) in rules else None

        return jax.tree_util.tree_map_with_path(one, metrics)

    def over_slices(self, params, batch, model_state, key) -> tuple[Terms, Carried, Any]:
        """Sums of the terms, what the last slice hands on, and the rows of metrics that have
        some."""

        @jax.jit  # traced (and planned) once for its shapes and for its loop
        def one(params, part, model_state, key):
            def loss_of(params):
                results = call_loss(self.loss_fn, params, part, model_state, key)
                return results.loss, results

            gradients, results = jax.grad(loss_of, has_aux=True)(params)
            shares, count = self.shares(part)
            share = shares[self.of_loss]

            def term(path, leaf):
                return self.weighted(leaf, shares[self.rule(path)])

            added = self.only(results.metrics, *shares)
            terms = Terms(
                jax.tree.map(lambda leaf: self.weighted(leaf, share), gradients),
                self.weighted(results.loss, share),
                jax.tree_util.tree_map_with_path(term, added),
                shares["weighted"],
                count,
            )
            carried = Carried(results.model_state, self.only(results.metrics, "same"))
            return terms, carried, self.only(results.metrics, "rows")

        if self.count == 1:
            return one(params, batch, model_state, key)

        size = batch_size(batch)
        each = -(-size // self.count)
        full, rest = divmod(size, each)  # rest: examples of a smaller last slice
        cut = jax.tree.map(lambda leaf: cut_leaf(leaf, full, each), batch)
        first = jax.eval_shape(part_of, cut, 0)
        terms, carried, _ = jax.eval_shape(one, params, first, model_state, key)
        zeros = jax.tree.map(jaxprs.filled, (terms, carried.metrics))

        def add(before, part, index):
            total, carried = before
            own_key = None if key is None else jax.random.fold_in(key, index)
            terms, carried, rows = one(params, part, carried.model_state, own_key)
            return (jax.tree.map(jnp.add, total, terms), carried), rows

        def body(carry, index):
            return add(carry, part_of(cut, index), index)

        start = zeros[0], Carried(model_state, zeros[1])
        done, rows = jax.lax.scan(body, start, jnp.arange(full))
        rows = jax.tree.map(in_order, rows)
        if rest:
            last = jax.tree.map(lambda leaf: leaf[full * each :], batch)
            done, more = add(done, last, full)
            rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), rows, more)
        return done[0], done[1], rows

    def weighted(self, leaf: jax.Array, share: jax.Array) -> jax.Array:
        """A term of a sum, in float32 or wider; 0 where the share is, whatever the term."""
        leaf = jnp.asarray(leaf)
        if not is_inexact(leaf):
            return leaf
        leaf = leaf.astype(promote_at_least(jnp.float32, leaf.dtype))
        share = share.astype(leaf.dtype)
        nothing = jnp.zeros_like(leaf)
        if self.proved:
            nothing = jnp.where(jnp.isinf(leaf), jnp.nan, nothing)
        return jnp.where(share == 0, nothing, leaf * share)

    def divided(
        self, terms: Terms, divisor: jax.Array, rest: ParameterOnlyTerms | None = None
    ) -> Terms:
        """The sums of what is weighted as means. The weights of slices need not add up to the
        divisor, if that is bounded: of a ``rest`` that each slice has alike, what they lack is
        added."""

        def mean(leaf, alike=None):
            if not is_inexact(leaf):
                return leaf
            found = leaf / divisor.astype(leaf.dtype)
            if alike is None:
                return found
            lack = 1 - (terms.weight / divisor).astype(leaf.dtype)
            return found + lack * alike.astype(leaf.dtype)

        def mean_metric(path, leaf):
            if self.rule(path) != "weighted":
                return leaf
            name = jax.tree_util.keystr(path)
            return mean(leaf, rest and rest.metrics.get(name, rest.loss))

        if rest is None:
            gradients = jax.tree.map(mean, terms.gradients)
        else:
            gradients = jax.tree.map(mean, terms.gradients, rest.gradients)
        return Terms(
            gradients,
            mean(terms.loss, rest and rest.loss),
            jax.tree_util.tree_map_with_path(mean_metric, terms.metrics),
            terms.weight,
            terms.count,
        )


def weight_of(weight: Callable[[Any], Any], part: Any) -> jax.Array:
    """What a slice has of what the loss is a mean over."""
    found = weight(own(part))
    if not is_numeric(found) or jnp.shape(found) or jnp.iscomplexobj(found):
        raise JaxmemError(
            "weight= returns one real number for a slice of the batch, such as "
            f"batch['mask'].sum(); it returned {shown(found)}."
        )
    # Whatever it counts in: sums of booleans are booleans, and short integers wrap around.
    kind = jnp.result_type(found)
    wide = promote_at_least(jnp.float32, kind) if jnp.issubdtype(kind, jnp.inexact) else float
    return jnp.asarray(found).astype(wide)


def merged(*trees: Any) -> Any:
    """Trees of one structure, in which each leaf is there in one of them."""

    def one(*leaves):
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(one, *trees, is_leaf=lambda leaf: leaf is None)


def in_order(rows: jax.Array) -> jax.Array:
    """Rows of slices, ``[slices, each, ...]``, in the order of the batch that `cut_leaf` cut."""
    return rows.swapaxes(0, 1).reshape(-1, *rows.shape[2:])


def mean_over(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The average over devices; what is not floating-point is the same on all."""
    if is_inexact(leaf):
        return jax.lax.pmean(leaf, axes)
    return leaf


def is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
