"""The state before the first step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.frameworks import flax
from jaxmem.ground.checks import check_arrays, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.accumulation import skipped
from jaxmem.levers.batch.loss import check_signature
from jaxmem.levers.host.offloading import eval_shape
from jaxmem.training.checks import (
    check_differentiable,
    check_key,
    check_master_copy,
    check_no_lookahead,
    warn_of_bfloat16,
)
from jaxmem.training.loss import Loss
from jaxmem.training.placement import (
    commit,
    made_anew,
    own_arrays,
    placed_like,
    without_sharing,
)
from jaxmem.training.settings import Settings
from jaxmem.training.state import TrainState


class StateMaker:
    """Makes the states of a step."""

    def __init__(self, settings: Settings, loss: Loss):
        self.settings, self.loss = settings, loss

    def make(self, params: Any, model_state: Any, key: jax.Array | None) -> TrainState:
        """The state of real parameters; an abstract one of abstract parameters."""
        params, model_state = self.arguments(params, model_state, key)
        leaves = jax.tree.leaves((params, model_state, key))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return self.abstract(params, model_state, key)
        if self.settings.sharding is not None:
            params, model_state = own_arrays((params, model_state))
            params = self.settings.sharding.place_params(params)
            model_state, key = self.settings.sharding.replicate((model_state, key))
        state = without_sharing(self._init(params, model_state, key))
        return commit(self._placed(state) if self.settings.sharding else state)

    def arguments(self, params: Any, model_state: Any, key: Any) -> tuple[Any, Any]:
        """Parameters and model state as plain trees, after a look at them."""
        is_module = flax.is_nnx(params)
        if is_module:
            params, model_state = self.loss.split_module(params, model_state)
        if hasattr(params, "opt_state"):
            raise JaxmemError(
                f"init takes parameters; got a {type(params).__module__}.{type(params).__name__}, "
                "which has an optimizer's state too. Pass its params, or the nnx module that it is "
                "for."
            )
        advice = "Pass a pytree of arrays, and keep modules, functions and settings in loss_fn."
        check_arrays("params", params, advice)
        if not jax.tree.leaves(params):
            raise JaxmemError(f"init takes parameters to train; got {shown(params)}. {advice}")
        check_arrays("model_state", model_state, advice)
        check_no_lookahead(params)
        check_differentiable(params)
        check_key(key)
        self._check_has_state(model_state)
        given = {"model_state": not is_module and model_state is not None, "key": key is not None}
        check_signature(
            self.settings.loss_fn, *[name for name, is_given in given.items() if is_given]
        )
        return params, model_state

    def _init(self, params: Any, model_state: Any, key: jax.Array | None) -> TrainState:
        params, model_state = own_arrays((params, model_state))
        # The caller's own goes on to other uses: steps take over what a state holds.
        key = None if key is None else jnp.copy(key)
        if self.settings.precision is not None:
            params = self.settings.precision.cast_to_params(params)
        check_master_copy(params)
        step = jnp.zeros((), jnp.int32)
        scale = None if self.settings.loss_scale is None else self.settings.loss_scale.init()
        opt_state = made_anew(self.settings.optimizer.init, params)
        if self.settings.precision is None:
            warn_of_bfloat16(params, opt_state)
        leaves_out = scale is not None or skipped(opt_state) is not None
        last_loss = jnp.full((), jnp.nan, jnp.float32) if leaves_out else None
        return TrainState(step, params, opt_state, model_state, key, scale, last_loss)

    def _placed(self, state: TrainState) -> TrainState:
        """The state where the sharding has it, real or abstract."""
        assert self.settings.sharding is not None
        others = state._replace(params=None, opt_state=None)
        return self.settings.sharding.replicate(others)._replace(
            params=self.settings.sharding.place_params(state.params),
            opt_state=self.settings.sharding.place_state(state.opt_state),
        )

    def abstract(self, params: Any, model_state: Any, key: jax.Array | None) -> TrainState:
        if self.settings.sharding is not None:
            params = self.settings.sharding.place_params(jax.tree.map(jaxprs.abstract, params))
        state = eval_shape(self._init, params, model_state, key)
        return self._placed(state) if self.settings.sharding else placed_like(params, state)

    def _check_has_state(self, model_state: Any) -> None:
        asked, given = self.settings.has_state, model_state is not None
        if asked is not None and asked != given:
            raise JaxmemError(
                f"train_step(has_state={asked}) was initialised with "
                f"{'a' if given else 'no'} model state. "
                + ("Pass init(params, model_state=...)." if asked else "Leave it out.")
            )
