"""What a step carries on."""

from typing import Any, NamedTuple

import jax

from jaxmem.levers.mixed_precision.loss_scale import LossScaleState


class TrainState(NamedTuple):
    """Everything a step carries on: a plain pytree, which orbax saves and restores.

    ``model_state`` (batch statistics, say), ``key`` (a PRNG key for dropout) and ``loss_scale`` are
    None where the step has none. ``last_loss``, of the last step that counted, is None where the
    step leaves out no gradients that are not finite.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any = None
    key: jax.Array | None = None
    loss_scale: LossScaleState | None = None
    last_loss: jax.Array | None = None
