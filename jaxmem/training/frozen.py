"""Parameters whose gradients the update does not read."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.accumulation import update_params
from jaxmem.levers.host.offloading import eval_shape
from jaxmem.training.extras import with_extras
from jaxmem.training.settings import Settings


class FrozenParameters:
    """Those that an optimizer leaves as they are, such as `optax.set_to_zero` under
    `optax.multi_transform` does.

    XLA computes no gradients that nobody reads, nor keeps anything for them. Where the loss itself
    says so, plans know it too.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._read: dict[Any, list[bool]] = {}  # by the structure, shapes and dtypes

    def stopped(self, params: Any) -> Any:
        """Parameters of the same values, of which those have no gradients."""
        leaves, tree = jax.tree.flatten(params)
        key = tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if key not in self._read:
            self._read[key] = self._gradients_read(params)
        read = zip(leaves, self._read[key], strict=True)
        return tree.unflatten(
            leaf if is_read else jax.lax.stop_gradient(leaf) for leaf, is_read in read
        )

    def _gradients_read(self, params: Any) -> list[bool]:
        """Of each parameter, whether the update reads its gradient."""
        every = [True] * len(jax.tree.leaves(params))
        if self._settings.loss_scale is not None:  # asks of all whether they are finite
            return every
        optimizer = self._settings.optimizer

        def update(gradients, state, params, value):
            fun = functools.partial(update_params, optimizer, gradients, state, params)
            return with_extras(fun, {"value": value, "grad": gradients}, state)

        read = [False] * len(every)
        try:
            params = jax.tree.map(_abstract, params)
            state = eval_shape(optimizer.init, params)
            for dtype in (jnp.float32, jnp.float64):  # of the loss: an update may ask for it
                loss = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(dtype))
                found = jaxprs.inputs_read(update, params, state, params, loss)
                read = [one or other for one, other in zip(read, found, strict=False)]
        except Exception:  # it asks for more, or fails in words of its own where it is called
            return every
        return read


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
