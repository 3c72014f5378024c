"""Gradient accumulation across steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import jaxprs
from jaxmem.ground.checks import check_optimizer, check_same, is_count, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.skipping import update_if


def accumulate(
    optimizer: optax.GradientTransformation,
    every: int | Callable[[jax.Array], jax.Array],
    *,
    dtype: Any = None,
    skip_nonfinite: bool = True,
    count_skipped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` applied once to the mean of ``every`` gradients.

    Large batches in the memory of small ones: each call adds a micro-gradient to a running mean
    and returns zero updates; every ``every``-th call runs the optimizer on the mean. State and
    cycle are those of `optax.MultiSteps` (its `optax.MultiStepsState`, whose ``inner_opt_state``
    keeps the dtypes that it has at init). Unlike it, the optimizer
    runs only when a cycle ends, also inside `jax.jit`, so its schedules count real steps, and state
    that `jaxmem.offload` keeps on the host stays there in between; and a micro-gradient that is
    not finite does no harm, as with ``should_skip_update_fn=optax.skip_not_finite``.
    `jaxmem.train_step` leaves parameters alone too until a cycle ends. No
    reverse-mode derivative goes through it.

    Args:
        optimizer: any optax transformation.
        every: number of micro-gradients in a cycle, at least 1; or a function of the number of
            updates done so far.
        dtype: of the running mean of floating-point gradients; None: float32, or float64 where
            the parameters are of that.
        skip_nonfinite: leave micro-gradients with an infinity or a NaN out of the mean, as if they
            had not been: the cycle takes another. ``state.skip_state["skipped"]`` counts them. It
            takes all gradients to know, so they are in memory together; without it each is added
            as the backward pass makes it.
        count_skipped: let those that are left out count in their cycle, which then ends after
            ``every`` calls whatever was in them, with the mean of the others. A cycle of nothing
            else ends without an update.

    Returns:
        An optax transformation. ``update(..., flush=True)`` ends the cycle at this call, for a
        last one that is not full; the mean is over what it has.

    Raises:
        JaxmemError: not an optax transformation, ``every`` below 1, or (at update) gradients
            of another structure than the parameters.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.accumulate(optax.sgd(1.0), every=2)
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> for gradient in (jnp.ones(2), 3 * jnp.ones(2)):
    ...     updates, state = optimizer.update(gradient, state, params)
    ...     print(updates)
    [0. 0.]
    [-2. -2.]
    """
    optimizer = check_optimizer(optimizer, "jaxmem.accumulate")
    if not callable(every) and not is_count(every):
        raise JaxmemError(
            f"jaxmem.accumulate takes every=, the number of micro-gradients in a cycle, as an int "
            f"of 1 or more; got {shown(every)}."
        )
    counters = ("averaged", "skipped") if skip_nonfinite else ("averaged",)

    def init(params):
        def zeros(leaf):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.zeros_like(leaf)
            own = leaf.dtype if jnp.finfo(leaf.dtype).bits > 32 else jnp.float32
            return jnp.zeros_like(leaf, dtype=own if dtype is None else dtype)

        return optax.MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            inner_opt_state=optimizer.init(params),
            acc_grads=jax.tree.map(zeros, params),
            skip_state={name: jnp.zeros((), jnp.int32) for name in counters},
        )

    def turn(gradients, state: optax.MultiStepsState, params, flush, extra, finish, result):
        """One call: ``finish`` of the updates where the cycle ends, ``result`` where it does not;
        and the next state."""
        good = _all_finite(gradients) if skip_nonfinite else jnp.asarray(True)
        # Micro-gradients in the mean.
        averaged = state.skip_state["averaged"] + good.astype(jnp.int32)

        def add(total, new):
            share = jnp.maximum(averaged, 1).astype(total.dtype)
            return jnp.where(good, total + (new.astype(total.dtype) - total) / share, total)

        mean = jax.tree.map(add, state.acc_grads, gradients)
        count = state.mini_step + (1 if count_skipped else good.astype(jnp.int32))
        length = every(state.gradient_step) if callable(every) else every
        ends = (count >= length) | flush
        applies = ends & (averaged > 0)

        def apply(carried):
            result, inner, mean = carried
            zeros = jax.tree.map(jnp.zeros_like, mean)
            mean = jax.tree.map(lambda new, like: new.astype(like.dtype), mean, gradients)
            updates, new = optimizer.update(mean, inner, params, **extra)
            # Gradients wider than the parameters would widen the state, in mid-training.
            inner = jax.tree.map(_as_before, new, inner)
            return finish(updates, result), inner, zeros

        result, inner, mean = update_if(applies, apply, (result, state.inner_opt_state, mean))
        counts = {"averaged": jnp.where(ends, 0, averaged)}
        if skip_nonfinite:
            counts["skipped"] = state.skip_state["skipped"] + (~good).astype(jnp.int32)
        return result, optax.MultiStepsState(
            mini_step=jnp.where(ends, 0, count),
            gradient_step=state.gradient_step + applies.astype(jnp.int32),
            inner_opt_state=inner,
            acc_grads=mean,
            skip_state=counts,
        )

    def update(updates, state, params=None, *, flush=False, **extra: Any):
        _check_call(updates, state, flush)

        def first(gradients, inner):
            return optimizer.update(gradients, inner, params, **extra)[0]

        like = jax.eval_shape(first, updates, state.inner_opt_state)
        zeros = jax.tree.map(jaxprs.filled, like)
        return turn(updates, state, params, flush, extra, lambda updates, _: updates, zeros)

    def update_params(gradients, state, params, **extra: Any):
        _check_call(gradients, state)

        def finish(updates, params):
            return optax.apply_updates(params, updates)

        return turn(gradients, state, params, False, extra, finish, params)

    return _Accumulation(init, update, update_params)


def _check_call(gradients: Any, state: Any, flush: Any = False) -> None:
    """Raises `JaxmemError` for a state of another optimizer, gradients of other parameters, or a
    ``flush`` that is no bool."""
    if not isinstance(state, optax.MultiStepsState):
        raise JaxmemError(
            "The update of jaxmem.accumulate takes the state that its init made; got a "
            f"{type(state).__name__}."
        )
    check_same(("gradients", "in the state"), state.acc_grads, "in this call", gradients)
    if isinstance(flush, str) or jnp.shape(flush) or jnp.result_type(flush) != jnp.bool_:
        raise JaxmemError(f"flush= is True or False, for the last cycle; got {shown(flush)}.")


class _Accumulation(optax.GradientTransformationExtraArgs):
    """What `accumulate` returns: an optax transformation that can also apply its updates,
    ``params, state = update_params(gradients, state, params)``, for which it need not write zero
    updates while it waits, nor add them."""

    def __new__(cls, init, update, update_params):
        self = super().__new__(cls, init, update)
        self.update_params = update_params
        return self


def update_params(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> tuple[Any, Any]:
    """Parameters and optimizer state after one call of an optimizer."""
    if isinstance(optimizer, _Accumulation):
        return optimizer.update_params(gradients, state, params, **extra)
    updates, state = optimizer.update(gradients, state, params, **extra)
    return optax.apply_updates(params, updates), state


def accumulates(opt_state: Any) -> bool:
    """Whether gradients are accumulated anywhere in an optimizer."""
    return bool(_cycles(opt_state))


def skips_nonfinite(opt_state: Any) -> bool:
    """Whether a state is that of `accumulate`, which leaves out gradients that are not finite."""
    return isinstance(opt_state, optax.MultiStepsState) and "skipped" in opt_state.skip_state


def skipped(opt_state: Any) -> jax.Array | None:
    """How many gradients `accumulate` left out so far, wherever it stands in an optimizer; None:
    it does not, or leaves none out."""
    counts = [cycle.skip_state["skipped"] for cycle in _cycles(opt_state) if skips_nonfinite(cycle)]
    return sum(counts[1:], start=counts[0]) if counts else None


def cycle_ends(opt_state: Any) -> jax.Array:
    """Whether no accumulation cycle is under way in an optimizer's state."""
    ends = [cycle.mini_step == 0 for cycle in _cycles(opt_state)]
    return jnp.all(jnp.array(ends or [True]))


def _cycles(opt_state: Any) -> list[optax.MultiStepsState]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    return [leaf for leaf in leaves if isinstance(leaf, optax.MultiStepsState)]


def _as_before(new: Any, old: Any) -> Any:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
