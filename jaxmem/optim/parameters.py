"""Parameters in bfloat16 without a float32 master copy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.ground.checks import check_optimizer, check_state
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.host.streaming import stream
from jaxmem.optim.codecs.rounding import round_stochastically, round_to_nearest


class HalfState(NamedTuple):
    """The state of `half_params`: what rounding left over (None if that is not kept)."""

    step: jax.Array
    rest: Any
    inner: Any


def half_params(
    optimizer: optax.GradientTransformation, rounding: str = "stochastic", *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` for parameters that are kept in bfloat16 and nowhere in float32.

    The optimizer sees float32 and its state is float32 (or what `small_moments` makes of it). Its
    updates are float32, such that `optax.apply_updates` gives the rounded parameter exactly. So
    what chooses between updates goes inside, ``half_params(optax.apply_if_finite(...))``: outside,
    optax's other branch is bfloat16. Parameters of other dtypes are left to the optimizer.

    Args:
        optimizer: any optax transformation.
        rounding: ``"stochastic"``: 2 bytes a parameter (Zamirai et al., "Revisiting BFloat16
            Training", 2020). ``"compensated"``: what rounding leaves over is kept in another
            bfloat16 and added the next time, Kahan's sum, 4 bytes a parameter and the precision of
            about 16 bits.
        seed: of the stochastic rounding.

    Raises:
        JaxmemError: not an optax transformation, no such rounding; at update, no parameters
            given, or a state that is not of this optimizer.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.optim.half_params(optax.sgd(1e-3), "compensated")
    >>> params = jnp.ones(2, jnp.bfloat16)
    >>> state = optimizer.init(params)
    >>> for _ in range(10):
    ...     updates, state = optimizer.update(jnp.ones(2), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(params)  # ten steps of 0.001, each below a step of bfloat16
    [0.988281 0.988281]
    """
    optimizer = check_optimizer(optimizer, "jaxmem.optim.half_params")
    if rounding not in ("stochastic", "compensated"):
        raise JaxmemError(
            'jaxmem.optim.half_params takes rounding= "stochastic" or "compensated"; got '
            f"{rounding!r}."
        )
    compensated = rounding == "compensated"

    def init(params):
        rest = None
        if compensated:
            rest = jax.tree.map(lambda p: jnp.zeros_like(p) if _is_half(p) else None, params)
        return HalfState(jnp.zeros((), jnp.int32), rest, optimizer.init(_wide(params)))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise JaxmemError(
                "jaxmem.optim.half_params rounds parameters and was given none. Call "
                "update(gradients, state, params)."
            )
        check_state(init, update, updates, state, params, extra)

        def step(updates, state, params, **extra):
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            gradients = jax.tree.map(
                lambda g, p: g.astype(jnp.float32) if _is_half(p) else g, updates, params
            )
            updates, inner = optimizer.update(gradients, state.inner, _wide(params), **extra)
            leaves, tree = jax.tree.flatten(params)
            moves = tree.flatten_up_to(updates)
            rests = tree.flatten_up_to(state.rest) if compensated else [None] * len(leaves)
            for at, (old, move, rest) in enumerate(zip(leaves, moves, rests, strict=True)):
                if not _is_half(old) or move is None:
                    continue
                wide = old.astype(jnp.float32)
                if compensated:
                    exact = wide + (rest.astype(jnp.float32) + move)
                    new = round_to_nearest(exact)
                    rests[at] = round_to_nearest(exact - new).astype(jnp.bfloat16)
                else:
                    new = round_stochastically(wide + move, jax.random.fold_in(key, at))
                moves[at] = new.astype(jnp.float32) - wide
            rest = jax.tree.unflatten(tree, rests) if compensated else None
            return jax.tree.unflatten(tree, moves), HalfState(state.step + 1, rest, inner)

        return stream(step, updates, state, params, extra, state_on_host=False)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_half(leaf: Any) -> bool:
    return leaf.dtype == jnp.bfloat16


def _wide(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.float32) if _is_half(p) else p, params)
