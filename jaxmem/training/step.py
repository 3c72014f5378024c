"""One training step with every lever on, as one XLA program."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.frameworks import flax as _flax
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import (
    check_alike,
    check_arrays,
    check_batch,
    check_optimizer,
    is_deleted,
    shown,
)
from jaxmem.ground.errors import JaxmemError, JaxmemWarning
from jaxmem.levers.batch.accumulation import (
    accumulates,
    cycle_ends,
    skipped,
    skips_nonfinite,
    update_params,
)
from jaxmem.levers.batch.loss import Results, call_loss, check_signature
from jaxmem.levers.batch.microbatching import microbatch
from jaxmem.levers.batch.skipping import update_if
from jaxmem.levers.host.offloading import eval_shape
from jaxmem.levers.precision.autocasting import autocast, autocast_inside_regions
from jaxmem.levers.precision.loss_scale import LossScale, LossScaleState, nonfinite
from jaxmem.levers.precision.policy import Precision, precision as parse_precision
from jaxmem.levers.sharding import Sharding
from jaxmem.optim.parameters import HalfState
from jaxmem.program import size_of
from jaxmem.rematerialization.transform import remat as plan_regions
from jaxmem.reports import MemoryReport, donated_arguments, memory
from jaxmem.targets import HOST_KIND
from jaxmem.training.exhausted import out_of_memory


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


class TrainStep:
    """A jitted training step; `train_step` makes it.

    Call it as ``state, metrics = step(state, batch)``. The state is donated: use the returned one.
    """

    def __init__(
        self,
        loss_fn: Callable,
        optimizer: optax.GradientTransformation,
        precision: Precision | None,
        remat: Callable[[Callable], Callable] | None,
        microbatches: int | Callable[[Callable], Callable],
        loss_scale: LossScale | None,
        has_state: bool | None,
        donate: bool,
        compiler_options: dict[str, Any] | None = None,
        sharding: Sharding | None = None,
        reduction: str | None = None,
    ):
        self.loss_fn = loss_fn
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.precision = precision
        self.loss_scale = loss_scale
        self.sharding = sharding
        self._remat = remat
        self._microbatches = microbatches
        self._reduction = reduction
        self._has_state = has_state
        self._donate = donate
        self._donation_checked = not donate
        self._ran: set[Any] = set()  # the shapes of batches that it ran with
        self._module: _flax.Structure | None = None
        self.fitting: Any = None  # how `jaxmem.fit` chose it
        self._jitted = jax.jit(
            self._step,
            donate_argnums=0 if donate else (),
            static_argnames=("sharding", "places"),
            compiler_options=compiler_options,
        )

    def __repr__(self):
        loss = getattr(self.loss_fn, "__qualname__", repr(self.loss_fn))
        return (
            f"TrainStep({loss})"
            if self.precision is None
            else f"TrainStep({loss}, {self.precision})"
        )

    def init(
        self, params: Any, *, model_state: Any = None, key: jax.Array | None = None
    ) -> TrainState:
        """The state before the first step, with parameters in their dtype.

        The first step takes over the memory of ``params`` and ``model_state``, unless the step was
        made with ``donate=False``: copy what is needed afterwards
        (``jax.tree.map(jnp.copy, params)``).

        ``params`` may be a Flax nnx module: its `nnx.Param` are the parameters and all else that
        it holds (batch statistics, dropout counts) the model state, both as plain dicts;
        ``flax.nnx.update(module, state.params)`` puts them back. Parameters on a mesh stay where
        they are, and what is on no mesh yet is copied to all of its devices.

        Abstract parameters (`jax.ShapeDtypeStruct`) give an abstract state, as `abstract` does:
        what `memory` needs, without an allocation.

        Raises:
            JaxmemError: ``params`` is not a pytree of floating-point arrays, an array was deleted,
                ``key`` is no PRNG key, or ``loss_fn`` does not take what the state has.

        Warns:
            JaxmemWarning: parameters in bfloat16 that nobody asked for.
        """
        params, model_state = self._arguments(params, model_state, key)
        leaves = jax.tree.leaves((params, model_state, key))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return self._abstract(params, model_state, key)
        if self.sharding is not None:
            params, model_state = _own_arrays((params, model_state))
            params = self.sharding.place_params(params)
            model_state, key = self.sharding.replicate((model_state, key))
        state = _unshared(self._init(params, model_state, key))
        return _commit(self._placed(state) if self.sharding else state)

    def _arguments(self, params: Any, model_state: Any, key: Any) -> tuple[Any, Any]:
        """Parameters and model state as plain trees, after a look at them."""
        is_module = _flax.is_nnx(params)
        if is_module:
            params, model_state = self._split_module(params, model_state)
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
        _check_differentiable(params)
        _check_key(key)
        self._check_has_state(model_state)
        given = {"model_state": not is_module and model_state is not None, "key": key is not None}
        check_signature(self.loss_fn, *[name for name, there in given.items() if there])
        return params, model_state

    def _init(self, params: Any, model_state: Any, key: jax.Array | None) -> TrainState:
        params, model_state = _own_arrays((params, model_state))
        if self.precision is not None:
            params = self.precision.cast_to_params(params)
        _check_master_copy(params)
        step = jnp.zeros((), jnp.int32)
        scale = None if self.loss_scale is None else self.loss_scale.init()
        opt_state = self.optimizer.init(params)
        if self.precision is None:
            _warn_of_bfloat16(params, opt_state)
        leaves_out = scale is not None or skipped(opt_state) is not None
        last_loss = jnp.full((), jnp.nan, jnp.float32) if leaves_out else None
        return TrainState(step, params, opt_state, model_state, key, scale, last_loss)

    def _placed(self, state: TrainState) -> TrainState:
        """The state where the sharding has it, real or abstract."""
        assert self.sharding is not None
        others = state._replace(params=None, opt_state=None)
        return self.sharding.replicate(others)._replace(
            params=self.sharding.place_params(state.params),
            opt_state=self.sharding.place_state(state.opt_state),
        )

    def _on_mesh(self, batch: Any) -> Any:
        """The batch, spread over the mesh if it is not yet."""
        if self.sharding is None or any(map(_first_axes, jax.tree.leaves(batch))):
            return batch
        return self.sharding.place_batch(batch)

    def abstract(
        self, params: Any, *, model_state: Any = None, key: jax.Array | None = None
    ) -> TrainState:
        """What `init` returns, with `jax.ShapeDtypeStruct` for arrays: nothing is allocated.

        Takes what `init` takes, real or abstract; `memory` and `jaxmem.max_batch_size` take it.
        """
        return self._abstract(*self._arguments(params, model_state, key), key)

    def _abstract(self, params: Any, model_state: Any, key: jax.Array | None) -> TrainState:
        if self.sharding is not None:
            params = self.sharding.place_params(jax.tree.map(jaxprs.abstract, params))
        state = eval_shape(self._init, params, model_state, key)
        return self._placed(state) if self.sharding else _placed_like(params, state)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after one step on the batch, and the metrics (``"loss"`` among them).

        The first call with a batch of some shape waits for its results, so that memory that runs
        out is told of here.

        Raises:
            JaxmemError: the device's memory ran out: says what was compiled and measured, what
                holds the most, and what `jaxmem.fit` would do. Or the state is not this step's, was
                given to a step before or is abstract; or the batch is empty, has something in it
                that is no array, shares an array with the state, or is on another device.
        """
        _check_state(state)
        _check_alive(state)
        batch, options = self._call_options(state, batch)
        shapes = _shapes(batch)
        try:
            results = self._jitted(state, batch, **options)
            if shapes not in self._ran and not isinstance(state.step, jax.core.Tracer):
                jax.block_until_ready(results)
        except (RuntimeError, ValueError) as error:  # JaxRuntimeError among them
            if "deleted" in str(error):
                _check_kept(state)
            if "donate" in str(error):
                _check_unshared(state, batch)
            if "incompatible devices" in str(error):
                jaxprs.check_devices(state=state, batch=batch)
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise out_of_memory(self, state, batch, error) from error
        self._ran.add(shapes)
        if not self._donation_checked:
            self._donation_checked = True
            leaves = jax.tree_util.tree_leaves_with_path(state)
            # Arrays of NumPy (of a state restored from a checkpoint) are copied, not donated.
            arrays = [x for x in leaves if isinstance(x[1], jax.Array)]
            arrays = [x for x in arrays if not isinstance(x[1], jax.core.Tracer)]
            _report_kept([x for x in arrays if not x[1].is_deleted()])
        return results

    def trace(self, state: TrainState, batch: Any):
        """`jax.stages.Traced` of the step."""
        _check_state(state)
        batch, options = self._call_options(state, batch)
        jaxprs.check_devices(state=state, batch=batch)
        return self._jitted.trace(state, batch, **options)

    def lower(self, state: TrainState, batch: Any):
        """`jax.stages.Lowered` of the step."""
        return self.trace(state, batch).lower()

    def memory(self, state: TrainState, batch: Any, *, target=None, **options) -> MemoryReport:
        """The bytes of the whole step on a target; see `jaxmem.memory`.

        Warns:
            JaxmemWarning: XLA did not take the donation of some arrays of the state, which then
                are in memory twice.
        """
        report = memory(self, state, batch, target=target, **options)
        if self._donate:
            reused = donated_arguments(report.hlo)
            leaves = jax.tree_util.tree_leaves_with_path(state)
            _report_kept([leaf for index, leaf in enumerate(leaves) if index not in reused])
        return report

    def _call_options(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The batch in its place, and what the program depends on besides shapes."""
        check_batch(batch)
        batch = self._on_mesh(batch)
        return batch, {
            "sharding": self.slices_sharding(state, batch),
            "places": _places_on_mesh(state),
        }

    def functional(self) -> Callable:
        """``loss_fn`` as a function of a state's parameters, whatever module they came from."""
        return self._module.functional(self.loss_fn) if self._module else self.loss_fn

    def plain_loss(self, params: Any, batch: Any, model_state: Any = None, key: Any = None) -> Any:
        """The loss and the new model state, of ``loss_fn`` as it is: no precision, no regions."""
        results = self._call_loss(params, batch, model_state, key)
        return results.loss, results.model_state

    # ---- what runs inside jit

    def _step(
        self,
        state: TrainState,
        batch: Any,
        sharding: NamedSharding | None,
        places: tuple[NamedSharding | None, ...],
    ):
        self._check_structure(state)
        extras = {}
        if state.model_state is not None:
            extras["model_state"] = state.model_state
        if state.key is not None:
            extras["key"] = jax.random.fold_in(state.key, state.step)

        def loss_of(params, batch, *, model_state=None, key=None):
            transform = self._remat or (lambda fun: fun)
            loss, *others = transform(self.loss)(params, batch, model_state, key)
            metrics = {"loss": loss, **others.pop()}
            if state.loss_scale is not None:
                assert self.loss_scale is not None
                loss = self.loss_scale.scale(loss, state.loss_scale)
            return (loss, *others, metrics)

        loss_of.unplanned = self.functional()  # type: ignore[attr-defined]
        if callable(self._microbatches):
            value_and_grad = self._microbatches(loss_of)
        else:
            value_and_grad = microbatch(
                loss_of, self._microbatches, reduction=self._reduction, sharding=sharding
            )
        (_, *others), gradients = value_and_grad(state.params, batch, **extras)
        metrics = others.pop()
        model_state = others[0] if others else None

        def loss_again(params):
            (loss, *_), gradients = value_and_grad(params, batch, **extras)
            if self.loss_scale is not None and state.loss_scale is not None:
                loss = loss / state.loss_scale.scale.astype(loss.dtype)
                gradients = self.loss_scale.unscale(gradients, state.loss_scale)
                gradients = _cast_like(gradients, params)
            return loss.astype(metrics["loss"].dtype), gradients

        known = {"value": metrics["loss"], "value_fn": _of_value_and_grad(loss_again)}
        new, counts = _with_extras(
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
        return _kept_in_place(new._replace(step=state.step + 1), places), metrics

    def loss(self, params: Any, batch: Any, model_state: Any = None, key: Any = None) -> tuple:
        """What ``remat=`` is given: loss, model state if there is one, and metrics, in the
        precision asked for. A plan of it, at the shapes of one microbatch, is one for the step."""
        chosen = self.precision

        def plain(params, batch, model_state, key):
            results = self._call_loss(params, batch, model_state, key)
            return results._asdict()

        fun = plain
        if chosen is not None and chosen.compute.itemsize == 2:
            fun = autocast_inside_regions(fun, chosen) if self._remat else autocast(fun, chosen)
        elif chosen is not None:
            params, batch = chosen.cast_to_compute((params, batch))
        results = Results(**fun(params, batch, model_state, key))
        loss, metrics = results.loss, results.metrics
        if chosen is not None:
            loss, metrics = chosen.cast_to_output((loss, metrics))
        return (loss, metrics) if model_state is None else (loss, results.model_state, metrics)

    def _call_loss(self, params, batch, model_state, key) -> Results:
        results = call_loss(self.functional(), params, batch, model_state, key)
        for name in ("loss", "loss_scale", "skipped"):
            if name in results.metrics:
                raise JaxmemError(
                    f'The metrics that loss_fn returned have a "{name}" of their own, which is a '
                    "name in the metrics of the step. Give it another name."
                )
        return results

    def _update(
        self, state: TrainState, gradients: Any, model_state: Any, extra: dict[str, Any]
    ) -> tuple[TrainState, jax.Array | None]:
        """The state after the optimizer, and whether the gradients counted: those that are not
        finite do not where there is a loss scale, nor where `accumulate` leaves them out. None:
        all do. ``extra`` are further arguments of the optimizer; for ``grad`` it has the
        gradients."""
        scaling, scale = self.loss_scale, state.loss_scale
        before = state.params, state.opt_state

        def update(gradients, params, opt_state):
            own = extra | ({"grad": gradients} if "grad" in extra else {})
            return update_params(self.optimizer, gradients, opt_state, params, **own)

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

    # ---- checks

    def _split_module(self, module: Any, model_state: Any) -> tuple[Any, Any]:
        if model_state is not None:
            raise JaxmemError("A Flax nnx module has its own state: pass no model_state with it.")
        structure, params, model_state = _flax.split(module)
        if self._module is not None and self._module != structure:
            raise JaxmemError(
                "This TrainStep was initialised with an nnx module of another structure. Make one "
                "train_step for each model."
            )
        self._module = structure
        return params, model_state

    def _check_has_state(self, model_state: Any) -> None:
        if self._has_state is not None and self._has_state != (model_state is not None):
            raise JaxmemError(
                f"train_step(has_state={self._has_state}) was initialised with "
                f"{'a' if model_state is not None else 'no'} model state. "
                + ("Pass init(params, model_state=...)." if self._has_state else "Leave it out.")
            )

    def _check_structure(self, state: TrainState) -> None:
        kept = None if self.precision is None else self.precision.params
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
            if kept is not None and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != kept:
                raise JaxmemError(
                    f"params{jax.tree_util.keystr(path)} is {leaf.dtype} in the state, and the "
                    f"step keeps parameters in {kept} ({self.precision}). Cast them: "
                    "state._replace(params=step.precision.cast_to_params(state.params)), or make "
                    "the state with this step's init."
                )
        expected = jax.eval_shape(self.optimizer.init, state.params)

        def after():
            def update(**extra):
                fun = functools.partial(self.optimizer.update, **extra)
                return jax.eval_shape(fun, state.params, expected, state.params)[1]

            known = {"value": jnp.zeros(()), "value_fn": lambda _: jnp.zeros(())}
            return _with_extras(update, known | {"grad": state.params}, state.opt_state)

        name = ("opt_state", "by this optimizer's init of these params")
        check_alike(name, expected, "in the state", state.opt_state, after)
        if (state.loss_scale is None) != (self.loss_scale is None):
            raise JaxmemError(
                f"The state has {'no' if state.loss_scale is None else 'a'} loss scale and the "
                f"step has {'none' if self.loss_scale is None else 'one'}. Make the state with "
                "this step's init, or add it: state._replace(loss_scale=step.loss_scale.init())."
            )

    def slices_sharding(self, state: TrainState, batch: Any) -> NamedSharding | None:
        """Where a batch lies, if its slices' gradients can be summed across devices once at the
        end: the loss has no state of the whole batch, and parameters are whole on each device."""
        if callable(self._microbatches) or self._microbatches == 1 or state.model_state is not None:
            return None
        places = {_first_axes(leaf) for leaf in jax.tree.leaves(batch)}
        place = places.pop() if len(places) == 1 else None
        if place is None:
            return None
        mesh, axes = place
        if any(not _named_axes(leaf).isdisjoint(axes) for leaf in jax.tree.leaves(state)):
            return None
        return NamedSharding(mesh, PartitionSpec(axes))


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
            batch norm pass ``"mean"``: each slice is then normalised by its own statistics. See
            `jaxmem.microbatch`.
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
            proved.

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
    check_optimizer(optimizer, "jaxmem.train_step")
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise JaxmemError(f"jaxmem.train_step takes a loss function; got {shown(loss_fn)}.")
    transform: Callable[[Callable], Callable] | None
    if isinstance(remat, str):
        transform = plan_regions(planner=remat)
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
        raise JaxmemError(_NO_MASTER_COPY.format("precision=" + repr(str(chosen)), "params"))
    if chosen is not None and chosen.compute == np.float16 and loss_scale is None:
        warnings.warn(
            "Computing in float16 without a loss scale: gradients below 6e-8 become 0, and those "
            "below 6e-5 lose digits. Pass loss_scale=jaxmem.LossScale(), or compute in bfloat16, "
            "which has float32's range and needs none.",
            JaxmemWarning,
            stacklevel=2,
        )
    return TrainStep(
        loss_fn,
        optimizer,
        chosen,
        transform,
        microbatches,
        loss_scale,
        has_state,
        donate,
        compiler_options,
        sharding,
        reduction,
    )


_NO_MASTER_COPY = (
    "{} keeps {} in float16 with no copy of higher precision: updates below a thousandth of a "
    "parameter are lost, and so is every one below 6e-8. Keep them in float32 and compute in "
    "float16 (precision='fp16')."
)


def _with_extras(update: Callable, known: dict[str, Any], opt_state: Any) -> Any:
    """``update`` with those further arguments that its optimizer asks for: most take none, and some
    refuse what they do not take.

    Raises:
        JaxmemError: it asks for something else, or for the loss of a cycle that has several.
    """
    extra: dict[str, Any] = {}
    while True:
        try:
            return update(**extra)
        except TypeError as error:
            missing = re.search(r"missing \d+ required .*arguments?: (.*)", str(error))
            names = set(re.findall(r"'(\w+)'", missing[1] if missing else "")) - extra.keys()
            if not names:
                raise
            unknown = sorted(names - known.keys() - {"grad"})
            if unknown:
                raise JaxmemError(
                    f"The optimizer's update needs {unknown[0]}=, and train_step has only value= "
                    "(the loss), grad= and value_fn= for it. Write the step in a loop of your own, "
                    "with jaxmem.microbatch for the gradients."
                ) from error
            if accumulates(opt_state) and names - {"value"}:
                asked = " and ".join(f"{name}=" for name in sorted(names - {"value"}))
                raise JaxmemError(
                    f"The optimizer's update needs {asked}, for a line search on one loss, and "
                    "under jaxmem.accumulate each call of a cycle has another. Use "
                    "train_step(..., microbatches=) instead of accumulate."
                ) from error
            extra |= {name: known.get(name) for name in names}


def _of_value_and_grad(value_and_grad: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """A function of which value and gradient come together."""

    @jax.custom_vjp
    def value(params):
        return value_and_grad(params)[0]

    def backward(gradients, cotangent):
        return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), gradients),)

    value.defvjp(value_and_grad, backward)
    return value


def _cast_like(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, other)


def _check_master_copy(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype == np.float16:
            raise JaxmemError(
                _NO_MASTER_COPY.format("The state", "params" + jax.tree_util.keystr(path))
            )


def _report_kept(leaves: list[tuple[Any, Any]]) -> None:
    """Warns of arrays of a donated state whose memory was not reused."""
    kept = [(path, leaf) for path, leaf in leaves if size_of(leaf)]
    if kept:
        total = sum(size_of(leaf) for _, leaf in kept)
        named = ", ".join(f"state{jax.tree_util.keystr(path)}" for path, _ in kept[:3])
        warnings.warn(
            f"XLA did not reuse the memory of {len(kept)} donated arrays of the state, "
            f"{format_bytes(total)} in all ({named}{' ...' if len(kept) > 3 else ''}): they are in "
            "memory twice during the step. Results must have the shape, dtype and memory kind of "
            "what they replace.",
            JaxmemWarning,
            stacklevel=3,
        )


def _first_axes(leaf: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The mesh of an array and the axes over which its first axis is sharded, in their order; None:
    it is not."""
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, jax.core.Tracer) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return None
    axes = sharding.spec[0]
    axes = axes if isinstance(axes, tuple) else (axes,)
    wide = tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1)
    return (sharding.mesh, wide) if wide else None


def _named_axes(leaf: Any) -> set[str]:
    """The mesh axes over which any axis of an array is sharded."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    return {
        axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))
    }


def _own_arrays(tree: Any) -> Any:
    """JAX arrays in place of numpy's and of numbers, each with a buffer of its own."""
    tree = _unshared(tree)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), tree)


def _unshared(tree: Any) -> Any:
    """A copy in place of an array that stands twice (as in the state of `optax.lbfgs`): no buffer
    can be donated twice."""
    seen: set[int] = set()

    def own(leaf):
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)


def _commit(state: TrainState) -> TrainState:
    """The state with every array bound to its place, if one is: in the place where it is, or on
    the devices that parameters are on.

    Results of a step over bound arrays are bound too, and a first step with other bindings than the
    second would be compiled twice.
    """
    bound = [leaf.sharding for leaf in jax.tree.leaves(state) if jaxprs.is_committed(leaf)]
    if not bound:
        return state
    widest = max(bound, key=lambda sharding: len(sharding.device_set))
    everywhere = jaxprs.copied_on(widest)

    def put(leaf):
        if not jaxprs.is_committed(leaf) and leaf.sharding.device_set != widest.device_set:
            return jax.device_put(leaf, everywhere)
        return jax.device_put(leaf, jaxprs.shortest(leaf.sharding))

    return jax.tree.map(put, state)


def _placed_like(params: Any, state: TrainState) -> TrainState:
    """An abstract state on the mesh of its parameters, as JAX and `_commit` place a real one: what
    has the path and the shape of a parameter lies as it does, all else on every device."""
    there = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            there[jax.tree_util.keystr(path)] = leaf.shape, sharding
    if not there:
        return state
    longest_first = sorted(there, key=len, reverse=True)

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        like = (there[end] for end in longest_first if name.endswith(end))
        found = next((sharding for shape, sharding in like if shape == leaf.shape), None)
        sharding = found or jaxprs.copied_on(there[longest_first[0]][1])
        if jaxprs.memory_space(leaf) is jaxprs.HOST:
            sharding = sharding.with_memory_kind(HOST_KIND)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jaxprs.shortest(sharding))

    return jax.tree_util.tree_map_with_path(place, state)


def _places_on_mesh(state: TrainState) -> tuple[NamedSharding | None, ...]:
    """Where the arrays of a state lie on a mesh of several devices; empty where parameters do
    not."""

    def place(leaf: Any) -> NamedSharding | None:
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        named = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
        return jaxprs.shortest(sharding) if named else None

    # A look at two arrays, and not at thousands in every call, where there is no mesh.
    if not any(map(place, [state.step, *jax.tree.leaves(state.params)[:1]])):
        return ()
    return tuple(map(place, jax.tree.leaves(state)))


def _kept_in_place(state: TrainState, places: tuple[NamedSharding | None, ...]) -> TrainState:
    """The state after a step, its arrays where they were before it: XLA, left to itself, puts some
    elsewhere, and the next step is compiled anew."""
    if not places:
        return state
    leaves, tree = jax.tree.flatten(state)
    kept = [
        leaf if place is None else jax.lax.with_sharding_constraint(leaf, place)
        for leaf, place in zip(leaves, places, strict=True)
    ]
    return jax.tree.unflatten(tree, kept)


def _shapes(batch: Any) -> Any:
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _check_differentiable(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise JaxmemError(
                f"params{jax.tree_util.keystr(path)} is {dtype}, which has no gradient. Parameters "
                "are floating-point arrays; put the others into model_state or into the batch."
            )


def _check_key(key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    if key is None or (dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        return
    if dtype is None or dtype != np.uint32:
        raise JaxmemError(f"key= takes a PRNG key, such as jax.random.key(0); got {shown(key)}.")


def _warn_of_bfloat16(params: Any, opt_state: Any) -> None:
    """Warns of parameters in bfloat16 that no precision asks for and no optimizer looks after."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rounded = [path for path, leaf in leaves if leaf.dtype == jnp.bfloat16]
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, HalfState))
    if not rounded or any(isinstance(node, HalfState) for node in nodes):
        return
    warnings.warn(
        f"{len(rounded)} of {len(leaves)} parameters are in bfloat16 (params"
        f"{jax.tree_util.keystr(rounded[0])}), and so are their gradients and, with most "
        "optimizers, their moments: updates below a 512th of a parameter are lost. To keep them in "
        "float32 and compute in bfloat16, pass precision='bf16'; to train them in bfloat16 without "
        "that loss, take jaxmem.optim.half_params(optimizer); if it is what you want, pass "
        "precision='params=bfloat16,compute=bfloat16'.",
        JaxmemWarning,
        stacklevel=4,
    )


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise JaxmemError(
            "A TrainStep is called with (state, batch), the state made by its init; got a state "
            f"of type {type(state).__module__}.{type(state).__name__}."
        )


def _check_alive(state: TrainState) -> None:
    """Raises `JaxmemError` for a state that cannot be run: abstract, or used before."""
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise JaxmemError(
            "This state is abstract: it has shapes and no arrays, for step.memory(state, batch). "
            "Make one with init from real parameters to run the step."
        )
    # Every step donates all of a state, so that one array tells of the others.
    if is_deleted(state.step):
        raise JaxmemError(_TAKEN.format("This state"))


def _check_kept(state: TrainState) -> None:
    """Raises `JaxmemError` at the first array of a state that is gone."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if is_deleted(leaf):
            raise JaxmemError(_TAKEN.format(f"state{jax.tree_util.keystr(path)}"))


def _check_unshared(state: TrainState, batch: Any) -> None:
    """Raises `JaxmemError` for an array of the state that is there a second time."""
    seen: dict[Any, str] = {}
    for name, tree in (("state", state), ("batch", batch)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            at, place = name + jax.tree_util.keystr(path), jaxprs.memory_of(leaf)
            if place is not None and place in seen:
                raise JaxmemError(
                    f"{at} and {seen[place]} are one array, whose memory the step takes over with "
                    f"the state. Pass a copy (jnp.copy({at})), or make the step with "
                    "train_step(..., donate=False)."
                )
            if place is not None and name == "state":
                seen[place] = at


_TAKEN = (
    "{} was given to a step before, which took over its memory. Go on with the state that it "
    "returned (state, metrics = step(state, batch)), or make the step with "
    "train_step(..., donate=False), which needs memory for both."
)
