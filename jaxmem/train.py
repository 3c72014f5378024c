"""One training step with every lever on, as one XLA program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem import _jax
from jaxmem._checks import check_optimizer, check_same
from jaxmem._errors import JaxmemError
from jaxmem.memory import MemoryReport, memory
from jaxmem.precision import Precision, precision as parse_precision
from jaxmem.remat import remat as plan_regions


class TrainState(NamedTuple):
    """Everything a step carries on: a plain pytree, which orbax saves and restores.

    ``model_state`` (batch statistics, say) and ``key`` (a PRNG key for dropout) are None where
    the loss takes none.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any = None
    key: jax.Array | None = None


class TrainStep:
    """A jitted training step; `train_step` makes it.

    Call it as ``state, metrics = step(state, batch)``. The state is donated: use the returned one.
    """

    def __init__(
        self,
        loss_fn: Callable,
        optimizer: optax.GradientTransformation,
        precision: Precision,
        remat: Callable[[Callable], Callable],
        donate: bool,
    ):
        self.loss_fn = loss_fn
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.precision = precision
        self._remat = remat
        self._jitted = jax.jit(self._step, donate_argnums=0 if donate else ())

    def __repr__(self):
        loss = getattr(self.loss_fn, "__qualname__", repr(self.loss_fn))
        return f"TrainStep({loss}, {self.precision})"

    def init(
        self, params: Any, *, model_state: Any = None, key: jax.Array | None = None
    ) -> TrainState:
        """The state before the first step, with parameters in their dtype.

        The first step takes over the memory of ``params`` and ``model_state``: copy what is
        needed afterwards.

        `jaxmem.eval_shape` of it is what `memory` needs, without an allocation.
        """
        params, model_state = _own_arrays((params, model_state))
        params = self.precision.cast_to_params(params)
        step = jnp.zeros((), jnp.int32)
        return _commit(TrainState(step, params, self.optimizer.init(params), model_state, key))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after one step on the batch, and the metrics (``"loss"`` among them)."""
        _check_state(state)
        return self._jitted(state, batch)

    def trace(self, state: TrainState, batch: Any):
        """`jax.stages.Traced` of the step."""
        _check_state(state)
        return self._jitted.trace(state, batch)

    def lower(self, state: TrainState, batch: Any):
        """`jax.stages.Lowered` of the step."""
        return self.trace(state, batch).lower()

    def memory(self, state: TrainState, batch: Any, *, target=None, **options) -> MemoryReport:
        """The bytes of the whole step on a target; see `jaxmem.memory`."""
        return memory(self, state, batch, target=target, **options)

    def _step(self, state: TrainState, batch: Any):
        self._check_structure(state)
        extras = {}
        if state.model_state is not None:
            extras["model_state"] = state.model_state
        if state.key is not None:
            extras["key"] = jax.random.fold_in(state.key, state.step)

        def loss_of(params, batch, extras):
            params, batch = self.precision.cast_to_compute((params, batch))
            loss, model_state, metrics = self._results(self.loss_fn(params, batch, **extras), state)
            loss, metrics = self.precision.cast_to_output((loss, metrics))
            return loss, (model_state, {"loss": loss, **metrics})

        gradient = jax.grad(self._remat(loss_of), has_aux=True)
        updates, (model_state, metrics) = gradient(state.params, batch, extras)
        updates, opt_state = self.optimizer.update(updates, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, model_state, state.key), metrics

    def _results(self, results: Any, state: TrainState) -> tuple[jax.Array, Any, dict]:
        """Loss, model state and metrics from what the loss function returned."""
        parts = results if isinstance(results, tuple) else (results,)
        expected = "loss" if state.model_state is None else "(loss, model_state)"
        held = 1 if state.model_state is None else 2
        metrics = parts[held] if len(parts) > held else {}
        if len(parts) not in (held, held + 1) or not isinstance(metrics, dict):
            raise JaxmemError(
                f"loss_fn must return {expected}, with a dict of metrics after it if it likes; it "
                f"returned {jax.tree.map(jnp.shape, results)} (shapes)."
            )
        if "loss" in metrics:
            raise JaxmemError(
                'The metrics that loss_fn returned have a "loss" of their own, which is the name '
                "of the loss itself in the metrics of the step. Give it another name."
            )
        loss = parts[0]
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise JaxmemError(
                f"The loss must be a floating-point scalar to differentiate; loss_fn returned "
                f"{jnp.result_type(loss)}{list(jnp.shape(loss))}. Return its mean or its sum."
            )
        model_state = None
        if held == 2:
            check_same(
                ("model_state", "in the state"), state.model_state, "returned by loss_fn", parts[1]
            )
            model_state = jax.tree.map(
                lambda new, old: jnp.asarray(new, old.dtype), parts[1], state.model_state
            )
        return loss, model_state, metrics

    def _check_structure(self, state: TrainState) -> None:
        expected = jax.eval_shape(self.optimizer.init, state.params)
        check_same(
            ("opt_state", "by this optimizer's init"), expected, "in the state", state.opt_state
        )


def train_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    precision: str | Precision | None = None,
    remat: str | Callable[[Callable], Callable] | None = None,
    donate: bool = True,
) -> TrainStep:
    """A training step that composes precision, rematerialization and the wrapped optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch)`` returning the loss, a scalar. With a ``model_state``
            in the state it is called with ``model_state=`` and returns ``(loss, model_state)``;
            with a ``key`` it is called with ``key=``, a new one at each step. In every case a
            dict of metrics may come last: ``(loss, metrics)``, ``(loss, model_state, metrics)``.
        optimizer: any optax transformation, wrapped by `jaxmem.accumulate` and
            `jaxmem.offload` as wanted.
        precision: a `Precision` or its text. Parameters are kept in its ``params`` dtype and cast,
            as the batch is, to its ``compute`` dtype inside the differentiated function; the model
            state keeps its dtypes; loss and metrics come out in its ``output`` dtype.
        remat: the name of a planner (``"sqrt"``), or a transformation of the loss such as
            ``functools.partial(jaxmem.remat, budget="8GiB")``. None: no planned regions (the
            model may have its own, by `jaxmem.remat_policy`).
        donate: whether the step reuses the memory of the state it is given.

    Returns:
        A `TrainStep`: ``init``, ``(state, batch) -> (state, metrics)``, ``memory``, ``lower``.

    Raises:
        JaxmemError: the optimizer is not an optax transformation, the precision does not parse;
            at the first call, before anything is allocated: the loss is not a scalar, or the
            state is not this step's.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> def loss_fn(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> step = jaxmem.train_step(loss_fn, jaxmem.offload(optax.adam(0.1)), remat="sqrt")
    >>> state = step.init({"w": jnp.zeros((3, 1))})
    >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 1))}
    >>> state, metrics = step(state, batch)
    >>> float(metrics["loss"])
    1.0
    """
    check_optimizer(optimizer, "jaxmem.train_step")
    if not callable(loss_fn):
        raise JaxmemError(f"jaxmem.train_step takes a loss function; got {loss_fn!r}.")
    transform: Callable[[Callable], Callable]
    if remat is None:
        transform = _unchanged
    elif isinstance(remat, str):
        transform = plan_regions(planner=remat)
    elif callable(remat):
        transform = remat
    else:
        raise JaxmemError(
            "remat= takes the name of a planner, a transformation of the loss, or None; got "
            f"{remat!r}."
        )
    chosen = Precision() if precision is None else parse_precision(precision)
    return TrainStep(loss_fn, optimizer, chosen, transform, donate)


def _unchanged(fun: Callable) -> Callable:
    return fun


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
