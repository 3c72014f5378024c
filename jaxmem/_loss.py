"""The one signature of loss functions, for `train_step` and `microbatch`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem._checks import check_same
from jaxmem._errors import JaxmemError


class Results(NamedTuple):
    """What a loss function returned, with None and an empty dict for what it has not."""

    loss: jax.Array
    model_state: Any
    metrics: dict[str, Any]


def call_loss(loss_fn: Callable, params: Any, batch: Any, model_state: Any, key: Any) -> Results:
    """``loss_fn(params, batch)``, with ``model_state=`` and ``key=`` where there is one.

    Raises:
        JaxmemError: it returns something else than ``loss`` or, with a model state,
            ``(loss, model_state)``, each with a dict of metrics after it if it likes; the loss is
            not a scalar of float32 or float64; or the model state changes its structure or shapes.
    """
    given = {"model_state": model_state, "key": key}
    results = loss_fn(params, batch, **{k: v for k, v in given.items() if v is not None})
    parts = results if isinstance(results, tuple) else (results,)
    expected = "loss" if model_state is None else "(loss, model_state)"
    held = 1 if model_state is None else 2
    metrics = parts[held] if len(parts) > held else {}
    if len(parts) not in (held, held + 1) or not isinstance(metrics, dict):
        raise JaxmemError(
            f"loss_fn must return {expected}, with a dict of metrics after it if it likes; it "
            f"returned {jax.tree.map(jnp.shape, results)} (shapes)."
        )
    loss = parts[0]
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise JaxmemError(
            f"The loss must be a floating-point scalar to differentiate; loss_fn returned "
            f"{jnp.result_type(loss)}{list(jnp.shape(loss))}. Return its mean or its sum."
        )
    if jnp.result_type(loss).itemsize < 4:
        raise JaxmemError(
            f"The loss is computed in {jnp.result_type(loss)}, which has 3 or 4 digits: a mean of "
            "many terms is wrong in it. Cast the model's outputs to float32 before the loss."
        )
    if held == 1:
        return Results(loss, None, metrics)
    check_same(("model_state", "in the state"), model_state, "returned by loss_fn", parts[1])
    state = jax.tree.map(_like, parts[1], model_state)
    return Results(loss, state, metrics)


def _like(new: Any, old: Any) -> Any:
    return new if jnp.issubdtype(old.dtype, jax.dtypes.extended) else jnp.asarray(new, old.dtype)
