"""The one signature of loss functions, for `train_step` and `microbatch`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.checks import check_arrays, check_same, is_numeric, note_call, shapes_of
from jaxmem.ground.errors import JaxmemError


class Results(NamedTuple):
    """What a loss function returned, with None and an empty dict for what it has not."""

    loss: jax.Array
    model_state: Any
    metrics: dict[str, Any]


def call_loss(loss_fn: Callable, params: Any, batch: Any, model_state: Any, key: Any) -> Results:
    """``loss_fn(params, batch)``, with ``model_state=`` and ``key=`` where there is one.

    Raises:
        JaxmemError: it does not take these arguments; it returns something else than ``loss`` or,
            with a model state, ``(loss, model_state)``, each with a dict of metrics after it if it
            likes; the loss is not a scalar of float32 or float64; or the model state changes its
            structure or shapes.
    """
    given = {"model_state": model_state, "key": key}
    given = {name: value for name, value in given.items() if value is not None}
    check_signature(loss_fn, *given)
    params, batch, given = own((params, batch, given))
    with note_call("loss_fn", _form, (params, batch), {}):
        results = loss_fn(params, batch, **given)
    parts = results if isinstance(results, tuple) else (results,)
    expected = "loss" if model_state is None else "(loss, model_state)"
    before_metrics = 1 if model_state is None else 2
    metrics = parts[before_metrics] if len(parts) > before_metrics else {}
    loss: Any = parts[0] if parts else None
    if (
        len(parts) not in (before_metrics, before_metrics + 1)
        or not isinstance(metrics, dict)
        or not is_numeric(loss)
    ):
        raise JaxmemError(
            f"loss_fn must return {expected}, with a dict of metrics after it if it likes; it "
            + ("returned None: is a return missing?" if results is None else _told(results))
        )
    check_arrays("metrics", metrics, "The dict of metrics that loss_fn returns holds arrays.")
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
    if before_metrics == 1:
        return Results(loss, None, metrics)
    check_same(("model_state", "in the state"), model_state, "returned by loss_fn", parts[1])
    state = jax.tree.map(_like, parts[1], model_state)
    return Results(loss, state, metrics)


def own(tree: Any) -> Any:
    """The same leaves in containers of their own, as `jax.jit` hands on arguments: what a function
    changes in them (``batch.pop("labels")``), nobody else reads."""
    return jax.tree.map(lambda leaf: leaf, tree)


def check_signature(loss_fn: Callable, *given: str) -> None:
    """Raises `JaxmemError` if a loss function does not take what it is going to be called with:
    parameters, batch and, by keyword, those of ``model_state`` and ``key`` that are given."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # built in: what it takes is not known
    written = f"loss_fn{signature}"
    parameters = signature.parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name, example in _EXTRAS.items():
        parameter = parameters.get(name)
        if name in given and not parameter and not takes_all:
            raise JaxmemError(
                f"The state has a {name}, and {written} takes none. Let it take {name}=, or make "
                f"the state without: leave {name}= out of init."
            )
        if parameter and parameter.default is parameter.empty and name not in given:
            raise JaxmemError(
                f"{written} takes {name}, and the state has none. Make the state with "
                f"init(params, {example})."
            )
    try:
        signature.bind(None, None, **dict.fromkeys(given))
    except TypeError as error:
        extras = "".join(f", {name}={name}" for name in given)
        raise JaxmemError(
            f"{written} cannot be called as loss_fn(params, batch{extras}): {error}."
        ) from error


def _form(params: Any, batch: Any) -> None:
    """The names that a loss function's arguments have in messages."""


_EXTRAS = {"model_state": "model_state=...", "key": "key=jax.random.key(0)"}


def _told(results: Any) -> str:
    count = f"{len(results)} values, " if isinstance(results, tuple) else ""
    return f"returned {count}{type(results).__name__} of {shapes_of(results)}."


def _like(new: Any, old: Any) -> Any:
    return new if jaxprs.is_extended(old) else jnp.asarray(new, old.dtype)
