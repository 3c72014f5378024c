"""The levers of one step."""

import contextlib
import dataclasses
from collections.abc import Callable

import optax

from jaxmem.levers.mixed_precision.loss_scale import LossScale
from jaxmem.levers.mixed_precision.policy import Precision
from jaxmem.levers.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `jaxmem.train_step` was given, checked; its docstring tells of each."""

    loss_fn: Callable
    optimizer: optax.GradientTransformationExtraArgs
    precision: Precision | None
    remat: Callable[[Callable], Callable] | None
    microbatches: int | Callable[[Callable], Callable]
    reduction: str | None
    loss_scale: LossScale | None
    has_state: bool | None
    donate: bool
    sharding: Sharding | None
    # Whether parameters whose gradients the update does not read have none: where no transformation
    # of the user's looks at them.
    freezes: bool = False

    def context(self) -> contextlib.AbstractContextManager:
        """In which the step is traced and run: on the mesh of its sharding."""
        return contextlib.nullcontext() if self.sharding is None else self.sharding.context()
