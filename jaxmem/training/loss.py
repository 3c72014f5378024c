"""The user's loss, in the precision of the step, of whatever model."""

from collections.abc import Callable
from typing import Any

from jaxmem import jaxprs
from jaxmem.frameworks import flax
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.loss import Results, call_loss
from jaxmem.levers.mixed_precision.autocasting import autocast, autocast_inside_regions
from jaxmem.training.frozen import FrozenParameters
from jaxmem.training.settings import Settings


class Loss:
    """The loss of a step; where its model is a Flax nnx module, ``structure`` is all of it but its
    arrays, known from `TrainStep.init` on."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.structure: flax.Structure | None = None
        self._frozen = FrozenParameters(settings)

    def functional(self) -> Callable:
        """The user's function, of a state's parameters."""
        return self._of_parameters(self.settings.loss_fn)

    def unplanned(self) -> Callable:
        """The same without what `jaxmem.remat` or `jaxmem.ops.swap` has made of it."""
        loss_fn = self.settings.loss_fn
        return self._of_parameters(getattr(loss_fn, "unplanned", loss_fn))

    def _of_parameters(self, loss_fn: Callable) -> Callable:
        return self.structure.functional(loss_fn) if self.structure else loss_fn

    def in_precision(
        self, params: Any, batch: Any, model_state: Any = None, key: Any = None
    ) -> tuple:
        """What ``remat=`` is given: loss, model state if there is one, and metrics, in the
        precision asked for. A plan of it, at the shapes of one microbatch, is one for the step.
        Parameters that are spread over devices are gathered where they are read."""
        sharding = self.settings.sharding
        fun = self._in_precision
        fun = sharding.gathered_where_read(fun) if sharding is not None else fun
        if self.settings.freezes:
            params = self._frozen.stopped(params)
        return fun(params, batch, model_state, key)

    def _in_precision(self, params: Any, batch: Any, model_state: Any, key: Any) -> tuple:
        chosen = self.settings.precision

        def plain(params, batch, model_state, key):
            results = self.call(params, batch, model_state, key)
            return results._asdict()

        fun = plain
        if chosen is not None and chosen.compute.itemsize == 2:
            fun = (
                autocast_inside_regions(fun, chosen)
                if self.settings.remat
                else autocast(fun, chosen)
            )
        elif chosen is not None:
            params, batch = chosen.cast_to_compute((params, batch))
        results = Results(**fun(params, batch, model_state, key))
        loss, metrics = results.loss, results.metrics
        if chosen is not None:
            loss, metrics = chosen.cast_to_output((loss, metrics))
        return (loss, metrics) if model_state is None else (loss, results.model_state, metrics)

    def call(self, params, batch, model_state, key) -> Results:
        """What the user's function returns, checked."""
        args = params, batch, model_state, key
        with self.settings.context():
            results = call_loss(self.functional(), *args)
            if "loss" in results.metrics and self._is_loss(args):  # the step's metrics have it
                metrics = {name: one for name, one in results.metrics.items() if name != "loss"}
                results = results._replace(metrics=metrics)
        for name in ("loss", "loss_scale", "skipped"):
            if name in results.metrics:
                raise JaxmemError(
                    f'The metrics that loss_fn returned have a "{name}" of their own, which is a '
                    "name in the metrics of the step. Give it another name (the loss itself may be "
                    "among them)."
                )
        return results

    def _is_loss(self, args: tuple) -> bool:
        """Whether the metric of that name is the value of the loss, whatever returns both: a
        function under `jax.jit` has two arrays of it."""

        def both(*args):
            results = call_loss(self.functional(), *args)
            return results.loss, results.metrics["loss"]

        leaves, call = jaxprs.split_arrays(both, args, {})
        flat = jaxprs.flatten(call, leaves, open_regions=True, merge=True)
        stopped = {
            step.outputs[0]: step.inputs[0]
            for step in flat.steps
            if step.primitive == "stop_gradient"
        }
        loss, metric = flat.outputs
        return loss == stopped.get(metric, metric)

    def split_module(self, module: Any, model_state: Any) -> tuple[Any, Any]:
        """Parameters and model state of a Flax nnx module, as plain trees."""
        if model_state is not None:
            raise JaxmemError("A Flax nnx module has its own state: pass no model_state with it.")
        structure, params, model_state = flax.split(module)
        if self.structure is not None and self.structure != structure:
            raise JaxmemError(
                "This TrainStep was initialised with an nnx module of another structure. Make one "
                "train_step for each model."
            )
        self.structure = structure
        return params, model_state
