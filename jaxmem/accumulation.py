"""Gradient accumulation across steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._checks import check_optimizer, check_same
from jaxmem._errors import JaxmemError


def accumulate(
    optimizer: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` applied once to the mean of ``every`` gradients.

    Large batches in the memory of small ones: each call adds a micro-gradient to a running mean
    and returns zero updates; every ``every``-th call runs the optimizer on the mean. State and
    cycle are those of `optax.MultiSteps` (its `optax.MultiStepsState`). Unlike it, the optimizer
    runs only when a cycle ends (in a `jax.lax.cond`), so its schedules count real steps, and state
    that `jaxmem.offload` keeps on the host stays there in between.

    Args:
        optimizer: any optax transformation.
        every: number of micro-gradients in a cycle, at least 1.

    Raises:
        JaxmemError: not an optax transformation, or ``every`` below 1.

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
    check_optimizer(optimizer, "jaxmem.accumulate")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise JaxmemError(
            f"jaxmem.accumulate takes every=, the number of micro-gradients in a cycle, as an int "
            f"of 1 or more; got {every!r}."
        )
    optimizer = optax.with_extra_args_support(optimizer)
    init = optax.MultiSteps(optimizer, every).init

    def update(updates, state: optax.MultiStepsState, params=None, **extra_args: Any):
        check_same(("gradients", "in the state"), state.acc_grads, "in this call", updates)
        count = state.mini_step + 1
        mean = jax.tree.map(
            lambda total, new: (
                total + (new - total).astype(total.dtype) / count.astype(total.dtype)
            ),
            state.acc_grads,
            updates,
        )

        def apply(mean, inner):
            mean = jax.tree.map(lambda new, like: new.astype(like.dtype), mean, updates)
            new_updates, inner = optimizer.update(mean, inner, params, **extra_args)
            return new_updates, inner, jax.tree.map(jnp.zeros_like, state.acc_grads)

        shapes = jax.eval_shape(lambda: apply(mean, state.inner_opt_state)[0])

        def wait(mean, inner):
            zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
            return zeros, inner, mean

        ends = count == every
        new_updates, inner, mean = jax.lax.cond(ends, apply, wait, mean, state.inner_opt_state)
        return new_updates, optax.MultiStepsState(
            mini_step=jnp.where(ends, 0, count),
            gradient_step=state.gradient_step + ends,
            inner_opt_state=inner,
            acc_grads=mean,
            skip_state=state.skip_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
