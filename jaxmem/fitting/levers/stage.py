"""ZeRO's stages as a lever."""

import jax

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import bytes_of, whole


class StageLever(Lever):
    """``stage``: ZeRO's on the mesh; 0: there is none."""

    name, neutral = "stage", 0
    shrinks_state = changes_loss = own_ratio = True

    def as_is(self, problem):
        return 0 if problem.mesh is None else 1

    def values(self, problem):
        return [0] if problem.mesh is None else [1, 2, 3]

    def text(self, value):
        return f"ZeRO stage {value}"

    def optimizer(self, problem, optimizer, value):
        return problem.sharding(value).optimizer(optimizer)

    def options(self, problem, value):
        return {"sharding": problem.sharding(value)}

    def seconds(self, problem, levers):
        """Gradients are summed, those of each slice, and updates gathered. At stage 3 both are in
        the time of the loss and its gradient: parameters are gathered where they are read."""
        if problem.devices == 1 or levers.stage == 3:
            return 0.0
        crossings = levers.microbatches + 1
        moved = crossings * bytes_of(jax.tree.map(whole, problem.state(levers).params))
        sent = moved * (problem.devices - 1) // problem.devices
        return problem.device.sending_seconds(sent, problem.devices)
