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


def projections(plan, loss, args, target, digits=1):
    """What is projected and compiled of a loss's value and gradient, as columns: of the step as it
    is, and of a plan of the loss. Beside them the report of the step as it is."""

    def compiled(fun, options=None):
        step = jax.value_and_grad(fun)
        return jaxmem.memory(step, *args, target=target, timeline=False, compiler_options=options)

    def relative_error(bytes_compiled, projected):
        beyond = round(bytes_compiled / projected - 1, digits + 2) + 0.0  # (never -0 %)
        return f"{beyond:+.{digits}%}"

    plain, planned = compiled(loss), compiled(plan.apply(loss), plan.compiler_options)
    columns = {
        "projected": jaxmem.format_bytes(plan.plain_bytes),
        "compiled": jaxmem.format_bytes(plain.device),
        "off": relative_error(plain.device, plan.plain_bytes),
        "plan, projected": jaxmem.format_bytes(plan.projected_bytes),
        "plan, compiled": jaxmem.format_bytes(planned.device),
        "plan, off": relative_error(planned.device, plan.projected_bytes),
    }
    return columns, plain
