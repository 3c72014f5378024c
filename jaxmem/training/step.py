"""One training step with every lever on, as one XLA program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.ground.checks import check_batch
from jaxmem.levers.mixed_precision.loss_scale import LossScale
from jaxmem.levers.mixed_precision.policy import Precision
from jaxmem.levers.placing import on_automatic_axes
from jaxmem.levers.sharding import Sharding
from jaxmem.reports import MemoryReport, donated_arguments, memory
from jaxmem.training.checks import check_alive, check_kept, check_state, check_unshared, report_kept
from jaxmem.training.exhausted import out_of_memory
from jaxmem.training.initial import StateMaker
from jaxmem.training.loss import Loss
from jaxmem.training.placement import first_axes, named_axes, places_on_mesh
from jaxmem.training.program import StepProgram
from jaxmem.training.settings import Settings
from jaxmem.training.state import TrainState


class TrainStep:
    """A jitted training step; `jaxmem.train_step` makes it.

    Call it as ``state, metrics = step(state, batch)``. The state is donated: use the returned one.
    """

    def __init__(self, settings: Settings, compiler_options: dict[str, Any] | None = None):
        self.settings = settings
        self.fitting: Any = None  # how `jaxmem.fit` chose it
        self._loss = Loss(settings)
        self._states = StateMaker(settings, self._loss)
        self._donation_checked = not settings.donate
        self._ran: set[Any] = set()  # the shapes of batches that it ran with
        self._jitted = jax.jit(
            StepProgram(settings, self._loss).step,
            donate_argnums=0 if settings.donate else (),
            static_argnames=("sharding", "places"),
            compiler_options=compiler_options,
        )

    def __repr__(self):
        loss = getattr(self.settings.loss_fn, "__qualname__", repr(self.settings.loss_fn))
        return (
            f"TrainStep({loss})"
            if self.precision is None
            else f"TrainStep({loss}, {self.precision})"
        )

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer that it was made with."""
        return self.settings.optimizer

    @property
    def precision(self) -> Precision | None:
        """The dtypes of parameters, compute and results."""
        return self.settings.precision

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale that it was made with."""
        return self.settings.loss_scale

    @property
    def sharding(self) -> Sharding | None:
        """Where state and batch lie on a mesh."""
        return self.settings.sharding

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
        with self.settings.context():
            return self._states.make(params, model_state, key)

    def abstract(
        self, params: Any, *, model_state: Any = None, key: jax.Array | None = None
    ) -> TrainState:
        """What `init` returns, with `jax.ShapeDtypeStruct` for arrays: nothing is allocated.

        Takes what `init` takes, real or abstract; `memory` and `jaxmem.max_batch_size` take it.
        """
        with self.settings.context():
            return self._states.abstract(*self._states.arguments(params, model_state, key), key)

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
        check_state(state)
        check_alive(state)
        batch, options = self._call_options(state, batch)
        shapes = _shapes(batch)
        try:
            with self.settings.context():
                results = self._jitted(state, batch, **options)
            if shapes not in self._ran and not isinstance(state.step, jax.core.Tracer):
                jax.block_until_ready(results)
        except (RuntimeError, ValueError) as error:  # JaxRuntimeError among them
            if "deleted" in str(error):
                check_kept(state)
            if "donate" in str(error):
                check_unshared(state, batch)
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
            report_kept([x for x in arrays if not x[1].is_deleted()], state)
        return results

    def trace(self, state: TrainState, batch: Any):
        """`jax.stages.Traced` of the step."""
        check_state(state)
        batch, options = self._call_options(state, batch)
        jaxprs.check_devices(state=state, batch=batch)
        with self.settings.context():
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
        if self.settings.donate:
            reused = donated_arguments(report.hlo)
            leaves = jax.tree_util.tree_leaves_with_path(state)
            report_kept([leaf for index, leaf in enumerate(leaves) if index not in reused], state)
        return report

    def _call_options(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The batch in its place, and what the program depends on besides shapes."""
        check_batch(batch)
        batch = self._on_mesh(batch)
        return batch, {
            "sharding": self.slices_sharding(state, batch),
            "places": places_on_mesh(state),
        }

    def _on_mesh(self, batch: Any) -> Any:
        """The batch, spread over the mesh if it is not yet."""
        sharding = self.settings.sharding
        if sharding is None:
            return batch
        if any(map(first_axes, jax.tree.leaves(batch))):
            return on_automatic_axes(sharding.mesh, batch)
        return sharding.place_batch(batch)

    def functional(self) -> Callable:
        """``loss_fn`` as a function of a state's parameters, whatever module they came from."""
        return self._loss.functional()

    def plain_loss(self, params: Any, batch: Any, model_state: Any = None, key: Any = None) -> Any:
        """The loss and the new model state, of ``loss_fn`` as it is: no precision, no regions."""
        results = self._loss.call(params, batch, model_state, key)
        return results.loss, results.model_state

    def loss(self, params: Any, batch: Any, model_state: Any = None, key: Any = None) -> tuple:
        """What ``remat=`` is given: loss, model state if there is one, and metrics, in the
        precision asked for. A plan of it, at the shapes of one microbatch, is one for the step."""
        return self._loss.in_precision(params, batch, model_state, key)

    def slices_sharding(self, state: TrainState, batch: Any) -> NamedSharding | None:
        """Where a batch lies, if its slices' gradients can be summed across devices once at the
        end: the loss has no state of the whole batch, and parameters are whole on each device."""
        if (
            callable(self.settings.microbatches)
            or self.settings.microbatches == 1
            or state.model_state is not None
            or (self.settings.sharding is not None and self.settings.sharding.model)
        ):
            return None
        places = {first_axes(leaf) for leaf in jax.tree.leaves(batch)}
        place = places.pop() if len(places) == 1 else None
        if place is None:
            return None
        mesh, axes = place
        if any(not named_axes(leaf).isdisjoint(axes) for leaf in jax.tree.leaves(state)):
            return None
        return NamedSharding(mesh, PartitionSpec(axes))


def _shapes(batch: Any) -> Any:
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
