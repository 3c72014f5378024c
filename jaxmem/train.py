"""One training step with every lever on, as one XLA program."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _flax, _jax
from jaxmem._bytes import format_bytes
from jaxmem._checks import check_optimizer, check_same
from jaxmem._errors import JaxmemError, JaxmemWarning
from jaxmem._exhausted import out_of_memory
from jaxmem._loss import Results, call_loss
from jaxmem._update_if import update_if
from jaxmem.accumulation import cycle_ends, skips_nonfinite, update_params
from jaxmem.autocast import autocast, autocast_inside_regions
from jaxmem.loss_scale import LossScale, LossScaleState, nonfinite
from jaxmem.memory import MemoryReport, donated_arguments, memory
from jaxmem.microbatching import microbatch
from jaxmem.offloading import eval_shape
from jaxmem.precision import Precision, precision as parse_precision
from jaxmem.program import size_of
from jaxmem.remat import remat as plan_regions
from jaxmem.sharding import Sharding


class TrainState(NamedTuple):
    """Everything a step carries on: a plain pytree, which orbax saves and restores.

    ``model_state`` (batch statistics, say), ``key`` (a PRNG key for dropout) and ``loss_scale`` are
    None where the step has none.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any = None
    key: jax.Array | None = None
    loss_scale: LossScaleState | None = None


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
        self._module: _flax.Structure | None = None
        self.fitting: Any = None  # how `jaxmem.fit` chose it
        self._jitted = jax.jit(
            self._step,
            donate_argnums=0 if donate else (),
            static_argnames="sharding",
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

        The first step takes over the memory of ``params`` and ``model_state``: copy what is
        needed afterwards.

        ``params`` may be a Flax nnx module: its `nnx.Param` are the parameters and all else that
        it holds (batch statistics, dropout counts) the model state, both as plain dicts;
        ``flax.nnx.update(module, state.params)`` puts them back.

        `jaxmem.eval_shape` of it is what `memory` needs, without an allocation.
        """
        if _flax.is_nnx(params):
            params, model_state = self._split_module(params, model_state)
        if self.sharding is not None:
            params, model_state = _own_arrays((params, model_state))
            params = self.sharding.place_params(params)
            model_state, key = self.sharding.replicate((model_state, key))
        state = self._init(params, model_state, key)
        return _commit(self._placed(state) if self.sharding else state)

    def _init(self, params: Any, model_state: Any, key: jax.Array | None) -> TrainState:
        self._check_has_state(model_state)
        params, model_state = _own_arrays((params, model_state))
        if self.precision is not None:
            params = self.precision.cast_to_params(params)
        _check_master_copy(params)
        step = jnp.zeros((), jnp.int32)
        scale = None if self.loss_scale is None else self.loss_scale.init()
        opt_state = self.optimizer.init(params)
        return TrainState(step, params, opt_state, model_state, key, scale)

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
        if _flax.is_nnx(params):
            params, model_state = self._split_module(params, model_state)

        if self.sharding is not None:
            params = self.sharding.place_params(jax.tree.map(_jax.abstract, params))
        state = eval_shape(self._init, params, model_state, key)
        return self._placed(state) if self.sharding else state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after one step on the batch, and the metrics (``"loss"`` among them).

        Raises:
            JaxmemError: the device's memory ran out: says what was compiled and measured, what
                holds the most, and what `jaxmem.fit` would do.
        """
        _check_state(state)
        batch = self._on_mesh(batch)
        try:
            results = self._jitted(state, batch, sharding=self.slices_sharding(state, batch))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise out_of_memory(self, state, batch, error) from error
        if not self._donation_checked:
            self._donation_checked = True
            leaves = jax.tree_util.tree_leaves_with_path(state)
            arrays = [x for x in leaves if not isinstance(x[1], jax.core.Tracer)]
            _report_kept([x for x in arrays if not x[1].is_deleted()])
        return results

    def trace(self, state: TrainState, batch: Any):
        """`jax.stages.Traced` of the step."""
        _check_state(state)
        batch = self._on_mesh(batch)
        return self._jitted.trace(state, batch, sharding=self.slices_sharding(state, batch))

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

    def functional(self) -> Callable:
        """``loss_fn`` as a function of a state's parameters, whatever module they came from."""
        return self._module.functional(self.loss_fn) if self._module else self.loss_fn

    def plain_loss(self, params: Any, batch: Any, model_state: Any = None, key: Any = None) -> Any:
        """The loss and the new model state, of ``loss_fn`` as it is: no precision, no regions."""
        results = self._call_loss(params, batch, model_state, key)
        return results.loss, results.model_state

    # ---- what runs inside jit

    def _step(self, state: TrainState, batch: Any, sharding: NamedSharding | None):
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
        new = self._update(state, gradients, others[0] if others else None)
        if state.loss_scale is not None and new.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.scale
            metrics["skipped"] = new.loss_scale.skipped
        return new._replace(step=state.step + 1), metrics

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
        if "loss" in results.metrics:
            raise JaxmemError(
                'The metrics that loss_fn returned have a "loss" of their own, which is the name '
                "of the loss itself in the metrics of the step. Give it another name."
            )
        return results

    def _update(self, state: TrainState, gradients: Any, model_state: Any) -> TrainState:
        """The state after the optimizer; after an overflow the one before it."""

        def apply(carried):
            params, opt_state = carried
            return update_params(self.optimizer, gradients, opt_state, params)

        scaling, scale = self.loss_scale, state.loss_scale
        if scaling is None or scale is None:
            params, opt_state = apply((state.params, state.opt_state))
            return state._replace(params=params, opt_state=opt_state, model_state=model_state)
        gradients = scaling.unscale(gradients, scale)
        finite = ~jnp.any(nonfinite(gradients))
        if skips_nonfinite(state.opt_state):  # and counts it as a part of its cycle
            params, opt_state = apply((state.params, state.opt_state))
        else:
            params, opt_state = update_if(finite, apply, (state.params, state.opt_state))
        scale = scaling.update(gradients, scale, cycle_ends=cycle_ends(opt_state))
        model_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), model_state, state.model_state
        )
        return state._replace(
            params=params, opt_state=opt_state, model_state=model_state, loss_scale=scale
        )

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
        expected = jax.eval_shape(self.optimizer.init, state.params)
        check_same(
            ("opt_state", "by this optimizer's init"), expected, "in the state", state.opt_state
        )
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
        if any(not axes.isdisjoint(_named_axes(leaf)) for leaf in jax.tree.leaves(state)):
            return None
        return NamedSharding(mesh, PartitionSpec(tuple(sorted(axes))))


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
            `jaxmem.offload` as wanted.
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
            ``"loss_scale"`` and ``"skipped"`` to the metrics.
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
            is not proved to be a mean or a sum over its examples.

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
    if not callable(loss_fn):
        raise JaxmemError(f"jaxmem.train_step takes a loss function; got {loss_fn!r}.")
    transform: Callable[[Callable], Callable] | None
    if isinstance(remat, str):
        transform = plan_regions(planner=remat)
    elif remat is None or callable(remat):
        transform = remat
    else:
        raise JaxmemError(
            "remat= takes the name of a planner, a transformation of the loss, or None; got "
            f"{remat!r}."
        )
    if not callable(microbatches):
        microbatch(loss_fn, microbatches, reduction=reduction)  # checks them
    elif reduction is not None:
        raise JaxmemError(
            "microbatches= is a transformation of the loss, which has a reduction= of its own: "
            "pass it there, as in functools.partial(jaxmem.microbatch, count=4, reduction='mean')."
        )
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise JaxmemError(f"loss_scale= takes a jaxmem.LossScale; got {loss_scale!r}.")
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


def _first_axes(leaf: Any) -> tuple[Any, frozenset[str]] | None:
    """The mesh of an array and the axes over which its first axis is sharded; None: it is not."""
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, jax.core.Tracer) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return None
    axes = sharding.spec[0]
    axes = axes if isinstance(axes, tuple) else (axes,)
    wide = frozenset(axis for axis in axes if sharding.mesh.shape[axis] > 1)
    return (sharding.mesh, wide) if wide else None


def _named_axes(leaf: Any) -> set[str]:
    """The mesh axes over which any axis of an array is sharded."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    return {
        axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))
    }


def _own_arrays(tree: Any) -> Any:
    """JAX arrays in place of numpy's, and a copy of one that stands twice: no buffer can be
    donated twice."""
    seen: set[int] = set()

    def own(leaf):
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return jnp.asarray(leaf)

    return jax.tree.map(own, tree)


def _commit(state: TrainState) -> TrainState:
    """The state with every array bound to its place, if one is.

    Arrays in host memory are; results of a step over them then are too, and a first step with
    other bindings than the second would be compiled twice.
    """
    if any(map(_jax.is_committed, jax.tree.leaves(state))):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), state)
    return state


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise JaxmemError(
            "A TrainStep is called with (state, batch), the state made by its init; got a state "
            f"of type {type(state).__name__}."
        )
