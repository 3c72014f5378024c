"""Loss scaling: gradients that float16 can hold."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.ground.checks import is_count, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.widths import promote_at_least


class LossScaleState(NamedTuple):
    """What a `LossScale` carries from step to step: a pytree of scalars, saved with the rest.

    ``scale`` is what the next loss is multiplied by, ``good_steps`` counts steps since it last
    changed, ``skipped`` all gradients that were not finite, ``nonfinite_leaf`` is the index of the
    first leaf that was not at the last of them (-1: none so far), ``overflowed`` whether one was in
    the accumulation cycle that is going on.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    nonfinite_leaf: jax.Array
    overflowed: jax.Array


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Multiplies the loss, so that gradients computed in float16 do not vanish.

    float16 has nothing below 6e-8 and loses digits below 6e-5; gradients often are smaller. The
    loss times a scale has gradients times that scale, which are divided by it in float32
    (Micikevicius et al. 2018). bfloat16 has float32's exponents and needs none.

    The scale doubles after ``growth_interval`` good steps in a row, for the very next step, and
    halves when a gradient overflows; that step is skipped. It never leaves ``floor`` to
    ``ceiling``. ``growth_interval=None`` keeps it at ``initial`` (a static scale), where steps that
    overflow are skipped all the same.

    `train_step` does what follows with ``loss_scale=``; in a loop of one's own, inside jit:

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> scaling = jaxmem.LossScale(initial=8.0)
    >>> state = scaling.init()
    >>> def loss(w):
    ...     return jnp.sum(w**2)
    >>> gradient = jax.grad(lambda w: scaling.scale(loss(w), state))(jnp.ones(2, "float32"))
    >>> print(gradient)
    [16. 16.]
    >>> gradient = scaling.unscale(gradient, state)  # once, before clipping
    >>> state = scaling.update(gradient, state)
    >>> print(gradient, state.scale, state.good_steps)
    [2. 2.] 8.0 1

    Args:
        initial: the first scale.
        growth_interval: good steps before it doubles; None: static.
        floor, ceiling: bounds of the scale. A scale below 1 is allowed: losses can be large.

    Raises:
        JaxmemError: bounds that are not ``0 < floor <= initial <= ceiling``, or an interval
            below 1.
    """

    # The first scale and the interval are those of PyTorch's GradScaler, the ceiling is that of
    # apex; the floor is the smallest normal number of float16.
    initial: float = 2.0**16
    growth_interval: int | None = 2000
    floor: float = 2.0**-14
    ceiling: float = 2.0**24

    def __post_init__(self):
        bounds = (self.floor, self.initial, self.ceiling)
        numbers = all(isinstance(b, int | float) and math.isfinite(b) for b in bounds)
        if not numbers or not 0 < self.floor <= self.initial <= self.ceiling:
            raise JaxmemError(
                "A LossScale takes 0 < floor <= initial <= ceiling; got "
                f"floor={shown(self.floor)}, initial={shown(self.initial)}, "
                f"ceiling={shown(self.ceiling)}."
            )
        every = self.growth_interval
        if every is not None and not is_count(every):
            raise JaxmemError(
                "growth_interval= takes a number of steps of 1 or more, or None; got "
                f"{shown(every)}."
            )

    def init(self) -> LossScaleState:
        """The state before the first step."""
        good, skipped, leaf = (jnp.asarray(x, jnp.int32) for x in (0, 0, -1))  # to donate: no twins
        scale = jnp.asarray(self.initial, jnp.float32)
        return LossScaleState(scale, good, skipped, leaf, jnp.zeros((), bool))

    def scale(self, loss: jax.Array, state: LossScaleState) -> jax.Array:
        """The loss times the scale, in float32 (float64 for one in float64)."""
        loss = loss.astype(promote_at_least(jnp.float32, loss.dtype))
        return loss * state.scale.astype(loss.dtype)

    def unscale(self, gradients: Any, state: LossScaleState) -> Any:
        """Gradients of a scaled loss divided by the scale, in float32 or wider."""

        def divide(leaf):
            leaf = leaf.astype(promote_at_least(jnp.float32, leaf.dtype))
            return leaf / state.scale.astype(leaf.dtype)

        return jax.tree.map(divide, gradients)

    def update(
        self, gradients: Any, state: LossScaleState, *, cycle_ends: bool | jax.Array = True
    ) -> LossScaleState:
        """The state after a step with these gradients, scaled or not.

        ``cycle_ends=False`` in the midst of an accumulation cycle holds the scale: it changes at
        the cycle's end, by all that was seen in it, and a cycle counts as one good step.
        """
        bad = nonfinite(gradients)
        found = jnp.any(bad)
        overflowed = state.overflowed | found
        good = jnp.where(overflowed, 0, state.good_steps + 1)
        scale = state.scale
        if self.growth_interval is not None:
            grows = good >= self.growth_interval
            factor = jnp.where(overflowed, 0.5, jnp.where(grows, 2.0, 1.0)).astype(scale.dtype)
            scale = jnp.clip(scale * factor, self.floor, self.ceiling).astype(scale.dtype)
            good = jnp.where(grows, 0, good)
        ends = jnp.asarray(cycle_ends)
        return LossScaleState(
            scale=jnp.where(ends, scale, state.scale),
            good_steps=jnp.where(ends, good, state.good_steps),
            skipped=state.skipped + found.astype(jnp.int32),
            nonfinite_leaf=jnp.where(found, jnp.argmax(bad), state.nonfinite_leaf).astype(
                jnp.int32
            ),
            overflowed=overflowed & ~ends,
        )

    def nonfinite_leaf(self, state: LossScaleState, gradients: Any) -> str | None:
        """The path of the first leaf that was not finite at the last overflow; None: there was
        none. ``gradients`` is any tree of their structure, the parameters' for example.

        >>> import jax.numpy as jnp, jaxmem
        >>> scaling = jaxmem.LossScale()
        >>> gradients = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])}
        >>> scaling.nonfinite_leaf(scaling.update(gradients, scaling.init()), gradients)
        "['b']"
        """
        index = int(state.nonfinite_leaf)
        if index < 0:
            return None
        return jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(gradients)[index][0])


def nonfinite(tree: Any) -> jax.Array:
    """For each leaf whether it has an infinity or a NaN."""
    leaves = jax.tree.leaves(tree)
    return jnp.array([~jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [False])
