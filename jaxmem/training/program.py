"""What runs inside jit: loss, gradients, update and metrics of one step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem.ground.checks import check_alike
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.accumulation import cycle_ends, skipped, skips_nonfinite, update_params
from jaxmem.levers.batch.microbatching import microbatch
from jaxmem.levers.batch.skipping import update_if
from jaxmem.levers.mixed_precision.loss_scale import nonfinite
from jaxmem.training.extras import of_value_and_grad, with_extras
from jaxmem.training.loss import Loss
from jaxmem.training.placement import kept_in_place
from jaxmem.training.settings import Settings
from jaxmem.training.state import TrainState


class StepProgram:
    """One step as a function of its state and batch."""

    def __init__(self, settings: Settings, loss: Loss):
        self.settings, self.loss = settings, loss

    def step(
        self,
        state: TrainState,
        batch: Any,
        sharding: NamedSharding | None,
        places: tuple[NamedSharding | None, ...],
    ):
        """The state after the step, and its metrics. The state stays in its ``places``, and
        gradients of slices are summed across the devices of ``sharding`` once, at the end."""
        self._check_structure(state)
        extras = {}
        if state.model_state is not None:
            extras["model_state"] = state.model_state
        if state.key is not None:
            extras["key"] = jax.random.fold_in(state.key, state.step)

        def loss_of(params, batch, *, model_state=None, key=None):
            transform = self.settings.remat or (lambda fun: fun)
            loss, *others = transform(self.loss.in_precision)(params, batch, model_state, key)
            metrics = {"loss": loss, **others.pop()}
            if state.loss_scale is not None:
                assert self.settings.loss_scale is not None
                loss = self.settings.loss_scale.scale(loss, state.loss_scale)
            return (loss, *others, metrics)

        loss_of.unplanned = self.loss.unplanned()  # type: ignore[attr-defined]
        if callable(self.settings.microbatches):
            value_and_grad = self.settings.microbatches(loss_of)
        else:
            value_and_grad = microbatch(
                loss_of,
                self.settings.microbatches,
                reduction=self.settings.reduction,
                sharding=sharding,
            )
        (_, *others), gradients = value_and_grad(state.params, batch, **extras)
        metrics = others.pop()
        model_state = others[0] if others else None

        def loss_again(params):
            (loss, *_), gradients = value_and_grad(params, batch, **extras)
            if self.settings.loss_scale is not None and state.loss_scale is not None:
                loss = loss / state.loss_scale.scale.astype(loss.dtype)
                gradients = self.settings.loss_scale.unscale(gradients, state.loss_scale)
                gradients = _cast_like(gradients, params)
            return loss.astype(metrics["loss"].dtype), gradients

        known = {"value": metrics["loss"], "value_fn": of_value_and_grad(loss_again)}
        new, counts = with_extras(
            lambda **extra: self._update(state, gradients, model_state, extra),
            known,
            state.opt_state,
        )
        if state.last_loss is not None and counts is not None:
            tells = counts | jnp.isfinite(metrics["loss"])
            last = state.last_loss.astype(metrics["loss"].dtype)
            metrics["loss"] = jnp.where(tells, metrics["loss"], last)
            new = new._replace(last_loss=metrics["loss"].astype(state.last_loss.dtype))
        if state.loss_scale is not None and new.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.scale
            metrics["skipped"] = new.loss_scale.skipped
        elif (left_out := skipped(new.opt_state)) is not None:
            metrics["skipped"] = left_out
        return kept_in_place(new._replace(step=state.step + 1), places), metrics

    def _update(
        self, state: TrainState, gradients: Any, model_state: Any, extra: dict[str, Any]
    ) -> tuple[TrainState, jax.Array | None]:
        """The state after the optimizer, and whether the gradients counted: those that are not
        finite do not where there is a loss scale, nor where `accumulate` leaves them out. None:
        all do. ``extra`` are further arguments of the optimizer; for ``grad`` it has the
        gradients."""
        scaling, scale = self.settings.loss_scale, state.loss_scale
        before = state.params, state.opt_state

        def update(gradients, params, opt_state):
            own = extra | ({"grad": gradients} if "grad" in extra else {})
            return update_params(self.settings.optimizer, gradients, opt_state, params, **own)

        if scaling is None or scale is None:
            params, opt_state = update(gradients, *before)
            left_out, earlier = skipped(opt_state), skipped(state.opt_state)
            counts = None if left_out is None else jnp.equal(left_out, earlier)
        else:
            unscaled = scaling.unscale(gradients, scale)
            counts = ~jnp.any(nonfinite(unscaled))

            def apply(carried):
                params, opt_state = carried
                # Unscaled in float32; the state would take over another dtype than it has.
                return update(_cast_like(unscaled, params), params, opt_state)

            if skips_nonfinite(state.opt_state):
                params, opt_state = apply(before)
            else:
                params, opt_state = update_if(counts, apply, before)
            # Gradients are unscaled before they are added up, so the scale may change within a
            # cycle. It has to: a cycle that overflows make longer would not end otherwise.
            ends = cycle_ends(opt_state) | ~counts
            scale = scaling.update(unscaled, scale, cycle_ends=ends)
        if counts is not None:
            model_state = jax.tree.map(
                lambda new, old: jnp.where(counts, new, old), model_state, state.model_state
            )
        new = state._replace(
            params=params, opt_state=opt_state, model_state=model_state, loss_scale=scale
        )
        return new, counts

    def _check_structure(self, state: TrainState) -> None:
        kept = None if self.settings.precision is None else self.settings.precision.params
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
            if kept is not None and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != kept:
                raise JaxmemError(
                    f"params{jax.tree_util.keystr(path)} is {leaf.dtype} in the state, and the "
                    f"step keeps parameters in {kept} ({self.settings.precision}). Cast them: "
                    "state._replace(params=step.precision.cast_to_params(state.params)), or make "
                    "the state with this step's init."
                )
        expected = jax.eval_shape(self.settings.optimizer.init, state.params)

        def after():
            def update(**extra):
                fun = functools.partial(self.settings.optimizer.update, **extra)
                return jax.eval_shape(fun, state.params, expected, state.params)[1]

            known = {"value": jnp.zeros(()), "value_fn": lambda _: jnp.zeros(())}
            return with_extras(update, known | {"grad": state.params}, state.opt_state)

        name = ("opt_state", "by this optimizer's init of these params")
        check_alike(name, expected, "in the state", state.opt_state, after)
        if (state.loss_scale is None) != (self.settings.loss_scale is None):
            raise JaxmemError(
                f"The state has {'no' if state.loss_scale is None else 'a'} loss scale and the "
                f"step has {'none' if self.settings.loss_scale is None else 'one'}. Make the state "
                "with this step's init, or add it: "
                "state._replace(loss_scale=step.loss_scale.init())."
            )


def _cast_like(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, other)
