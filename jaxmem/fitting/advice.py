"""What `fit` would do for a step, by projected bytes."""

from typing import Any

from jaxmem.fitting.search import LeverSearch
from jaxmem.fitting.table import milliseconds
from jaxmem.fitting.verdicts import Verdicts
from jaxmem.fitting.workload import Workload
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.targets import LocalDevice, Target
from jaxmem.training import TrainState, TrainStep
from jaxmem.training.exhausted import register_advice


def advise(
    step: TrainStep, state: TrainState, batch: Any, budget: int, target: Target | LocalDevice
) -> str:
    """What `fit` would do for a step, by projected bytes: nothing is compiled."""
    call = "jaxmem.fit(loss_fn, optimizer, params, batch, ...)"
    try:
        workload = Workload(
            step.functional(),
            step.optimizer,
            state.params,
            batch,
            budget=budget,
            target=target,
            model_state=state.model_state,
            key=state.key,
            precision=step.precision,
            loss_scale=step.loss_scale,
            mesh=step.sharding.mesh if step.sharding else None,
            split=dict(step.sharding.split) or None if step.sharding else None,
        )
        search = LeverSearch(workload)
        found = search.projected()
    except JaxmemError as error:
        return f"{call} searches the levers that make it fit; here it says: {error}"
    if found is None or found.projected is None:
        return f"{call} is not projected to fit either: {Verdicts(search).remedies()}"
    return (
        f"{call} would take {found.levers}, recompute {found.remat}: projected "
        f"{format_bytes(found.projected)}; {milliseconds(found, target)} ms a step."
    )


register_advice(advise)
