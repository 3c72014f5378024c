"""Training steps in plain optax, beside which others are compiled."""

import jax
import optax

import jaxmem


def plain_step(loss_fn, optimizer):
    """`unjitted`, jitted, with parameters and state donated."""
    return jax.jit(unjitted(loss_fn, optimizer), donate_argnums=(0, 1))


def unjitted(loss_fn, optimizer):
    """``step(params, state, batch)``; returns parameters and state anew, and the loss."""

    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def compile_plain(loss_fn, optimizer, params, batch, target, **options):
    """`jaxmem.memory` of it."""
    state = jaxmem.eval_shape(optimizer.init, params)
    return jaxmem.memory(
        plain_step(loss_fn, optimizer), params, state, batch, target=target, **options
    )
