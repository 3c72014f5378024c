"""A step of the levers that are asked for."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxmem.ground.checks import check_optimizer, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.warn import warn
from jaxmem.levers.batch.microbatching import microbatch
from jaxmem.levers.mixed_precision.loss_scale import LossScale
from jaxmem.levers.mixed_precision.policy import Precision, precision as parse_precision
from jaxmem.levers.sharding import Sharding
from jaxmem.rematerialization import remat as plan_regions
from jaxmem.training.checks import NO_MASTER_COPY
from jaxmem.training.settings import Settings
from jaxmem.training.step import TrainStep


def train_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    precision: str | Precision | None = None,
    remat: str | Callable[[Callable], Callable] | None = None,
    microbatches: int | Callable[[Callable], Callable] = 1,
    reduction: str | None = None,
    loss_scale: LossScale | None = None,
    has_state: bool | None = None,
    donate: bool = True,
    compiler_options: dict[str, Any] | None = None,
    sharding: Sharding | None = None,
) -> TrainStep:
    """A training step that composes precision, rematerialization, microbatches, loss scaling and
    the wrapped optimizer into one XLA program.

    Args:
        loss_fn: ``loss_fn(params, batch)`` returning the loss, a float32 scalar. With a
            ``model_state`` in the state it is called with ``model_state=`` and returns
            ``(loss, model_state)``; with a ``key`` it is called with ``key=``, a new one at each
            step. In every case a dict of metrics may come last: ``(loss, metrics)``,
            ``(loss, model_state, metrics)``. For a Flax nnx model ``loss_fn(model, batch)``, which
            may change the model's batch statistics and dropout counts.
        optimizer: any optax transformation, wrapped by `jaxmem.accumulate` and
            `jaxmem.offload` as wanted. If its update needs ``value=`` (the loss, as
            `optax.contrib.reduce_on_plateau` does), ``grad=`` or ``value_fn=`` (`optax.lbfgs`), it
            is given them: ``value_fn`` is the loss on the whole batch, in slices with
            ``microbatches``. Under `jaxmem.accumulate` there is ``value=`` alone, of the last call
            of the cycle, as in `optax.MultiSteps`.
        precision: a `Precision` or its text. Parameters are kept in its ``params`` dtype; bfloat16
            and float16 are computed by `jaxmem.autocast`, wider ones by casting parameters and
            batch; the model state keeps its dtypes; loss and metrics come out in its ``output``
            dtype. None: everything as it is.
        remat: the name of a planner (``"dp"``, ``"sqrt"``), or a transformation of the loss such as
            ``functools.partial(jaxmem.remat, budget="8GiB")``. None: no planned regions (the
            model may have its own, by `jaxmem.remat_policy`).
        microbatches: number of slices that the batch is cut into, one after the other, for the
            memory of one; or a transformation of the loss such as ``lambda loss_fn:
            jaxmem.microbatch(loss_fn, 4, weight=count_tokens)``. A batch whose first axis is
            sharded over devices stays sharded, and where the loss has no model state and
            parameters are whole on each device, gradients cross devices once, after the last
            slice.
        reduction: with ``microbatches``, what the loss is over its examples, ``"mean"`` or
            ``"sum"``; None: it is proved from the loss, with a warning where it cannot be. Under
            batch norm pass ``"mean"``: each slice is then normalised by its own statistics. (What
            counts calls in the model state counts slices.) See `jaxmem.microbatch`.
        loss_scale: a `LossScale`, for float16. The update is skipped where gradients are not
            finite, and gradients are divided by the scale before the optimizer sees them. Adds
            ``"loss_scale"`` and ``"skipped"`` to the metrics. Where the update is skipped, here or
            by `jaxmem.accumulate` (which adds ``"skipped"`` too), so is the model state, and a loss
            that is not finite gives way in the metrics to the one of the step before.
        has_state: whether ``loss_fn`` takes and returns a model state; None: if `TrainStep.init`
            is given one.
        donate: whether the step reuses the memory of the state it is given. Arrays that XLA did
            not take are reported by a `JaxmemWarning`, in the first call and in `TrainStep.memory`.
        compiler_options: XLA flags that the step is compiled with, such as
            ``Plan.compiler_options``.
        sharding: a `Sharding` of `jaxmem.shard`, whose optimizer is the step's: ``init`` puts the
            state where it belongs, and a batch that is on one device is spread over the mesh.

    Returns:
        A `TrainStep`: ``init``, ``(state, batch) -> (state, metrics)``, ``memory``, ``lower``.

    Raises:
        JaxmemError: the optimizer is not an optax transformation, the precision does not parse,
            or keeps parameters in float16; at the first call, before anything is allocated: the
            loss is not a scalar or is of low precision, the batch does not divide, or the
            state is not this step's.

    Warns:
        JaxmemWarning: float16 without a loss scale; at the first call, microbatches of a loss that
            is not proved to be a mean or a sum over its examples, or of metrics of which nothing is
            proved, or after which the model state may be another one.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> def loss_fn(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> optimizer = jaxmem.offload(optax.adam(0.1))
    >>> step = jaxmem.train_step(loss_fn, optimizer, remat="sqrt", microbatches=2)
    >>> state = step.init({"w": jnp.zeros((3, 1))})
    >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 1))}
    >>> state, metrics = step(state, batch)
    >>> float(metrics["loss"])
    1.0
    """
    optimizer = check_optimizer(optimizer, "jaxmem.train_step")
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise JaxmemError(f"jaxmem.train_step takes a loss function; got {shown(loss_fn)}.")
    transform: Callable[[Callable], Callable] | None
    if isinstance(remat, str):
        transform = plan_regions(planner=remat)
    elif _is_policy(remat):
        raise JaxmemError(
            "remat= takes a transformation of the loss, and a policy of jax.checkpoint is none: "
            "pass functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable), "
            "say."
        )
    elif remat is None or callable(remat):
        transform = remat
    else:
        raise JaxmemError(
            "remat= takes the name of a planner, a transformation of the loss, or None; got "
            f"{shown(remat)}."
        )
    if not callable(microbatches):
        microbatch(loss_fn, microbatches, reduction=reduction)  # checks them
    elif reduction is not None:
        raise JaxmemError(
            "microbatches= is a transformation of the loss, which has a reduction= of its own: "
            "pass it there, as in functools.partial(jaxmem.microbatch, count=4, reduction='mean')."
        )
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise JaxmemError(f"loss_scale= takes a jaxmem.LossScale; got {shown(loss_scale)}.")
    if sharding is not None and not isinstance(sharding, Sharding):
        raise JaxmemError(
            "sharding= takes what jaxmem.shard(mesh) returns, of a mesh such as "
            f'jax.make_mesh((8,), ("data",)); got {shown(sharding)}.'
        )
    chosen = None if precision is None else parse_precision(precision)
    if chosen is not None and chosen.params == np.float16:
        raise JaxmemError(NO_MASTER_COPY.format("precision=" + repr(str(chosen)), "params"))
    if chosen is not None and chosen.compute == np.float16 and loss_scale is None:
        warn(
            "Computing in float16 without a loss scale: gradients below 6e-8 become 0, and those "
            "below 6e-5 lose digits. Pass loss_scale=jaxmem.LossScale(), or compute in bfloat16, "
            "which has float32's range and needs none.",
        )
    settings = Settings(
        loss_fn,
        optimizer,
        chosen,
        transform,
        microbatches,
        reduction,
        loss_scale,
        has_state,
        donate,
        sharding,
    )
    return TrainStep(settings, compiler_options)


def _is_policy(remat: Any) -> bool:
    """Whether it is one of `jax.checkpoint_policies`, or made by one of them."""
    own = jax.checkpoint_policies.everything_saveable.__module__
    return getattr(remat, "__module__", None) == own and remat not in (jax.checkpoint, jax.remat)
