"""What becomes of the losses and metrics of slices, by what is proved of them."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.warn import warn
from jaxmem.levers.batch.independence import Metric, Proof, reduction_of
from jaxmem.levers.batch.loss import call_loss


def proof_of(loss_fn: Callable, sizes: set[int], arguments: tuple) -> Proof:
    def loss(params, batch, model_state, key):
        results = call_loss(loss_fn, params, batch, model_state, key)
        return results.loss, results.model_state, results.metrics

    params, batch, model_state, key = arguments
    return reduction_of(loss, batch, sizes, params, model_state, key)


def sizes_of(size: int, count: int) -> set[int]:
    """Of the slices of a batch."""
    each = -(-size // count)
    return {each, size % each} - {0}


def checked(proof: Proof, given: str | None, count: int, silent: bool) -> str:
    """The reduction to use, if the one that is given is not proved wrong."""
    if proof.reduction == "weighted" and given is not None:
        return given
    if proof.reduction is not None:
        if given not in (None, proof.reduction):
            raise JaxmemError(
                f"The loss is a {proof.reduction} over its examples, and reduction={given!r} was "
                f"given. Leave it out, or make the loss a {given}."
            )
        if proof.state and given is None and not silent:
            warn(
                f"The model state after {count} microbatches may not be that of the whole batch: "
                f"{proof.state}. (Loss and gradients are those of the whole batch.) If that is as "
                f"it should be, pass reduction={proof.reduction!r}.",
            )
        return proof.reduction
    if given is None and not silent:
        warn(
            f"The gradients of {count} microbatches are averaged, and that may not be the gradient "
            f"of the whole batch: the loss is not proved to be a mean or a sum over its examples; "
            f"{proof.why}. If slices are to be averaged all the same (under batch norm, each has "
            "statistics of its own), pass reduction='mean'. For a mean over what a mask leaves, "
            "pass jaxmem.microbatch(..., weight=...).",
        )
    return given or "mean"


DONE = {
    "mean": "averaged",
    "sum": "added",
    "rows": "joined",
    "weighted": "averaged by weight",
    "same": "the last one's",
}


def of_metrics(
    metrics: Mapping[str, Metric], loss: str, count: int, silent: bool
) -> dict[str, str]:
    """What becomes of each metric of the slices: what is proved, or what its form tells."""
    found, unproved = {}, []
    for path, metric in metrics.items():
        found[path] = metric.reduction or _by_form(path, metric, loss)
        if metric.reduction is None:
            form = f"metrics{path}, {metric.dtype}{list(metric.shape)}, is {DONE[found[path]]}"
            unproved.append(f"{form} ({metric.why})")
    if unproved and not silent:
        word = "sum" if loss == "sum" else "mean"
        warn(
            f"Metrics of {count} microbatches may not be those of the whole batch. Nothing is "
            f"proved of these: {'; '.join(unproved)}. If that is what you want, pass "
            f"reduction={word!r}. If not, let loss_fn return a mean, a sum, or an array with a row "
            "for each example, which is joined in the order of the batch, and take its maximum, "
            "say, after the step.",
        )
    return found


def _by_form(path: str, metric: Metric, loss: str) -> str:
    if metric.form == "rows":
        return "rows"
    if metric.form == "mixed":
        raise JaxmemError(
            f"metrics{path} is {metric.dtype}{list(metric.shape)} for the whole batch, a shape "
            "that depends on the batch and does not have a row for each example along its first "
            "axis, so that those of slices cannot be put together. Put the examples first, or "
            "reduce it in loss_fn."
        )
    if jnp.issubdtype(metric.dtype, jax.dtypes.extended):  # a key: nothing can be added to it
        return "same"
    return loss if jnp.issubdtype(metric.dtype, jnp.inexact) else "sum"
