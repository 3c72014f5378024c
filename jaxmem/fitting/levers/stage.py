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
        if problem.mesh is None:
            return [0]
        meshes = problem.meshes
        spread = any(meshes.sharding(shape, 1).count > 1 for shape in meshes.shapes or [()])
        return [1, 2, 3] if spread else [1]  # of copies alone there is nothing to spread

    def text(self, value):
        return f"ZeRO stage {value}"

    def optimizer(self, problem, optimizer, value):
        return problem.sharding(value).optimizer(optimizer)

    def options(self, problem, value):
        return {"sharding": problem.sharding(value)}

    def seconds(self, problem, levers):
        """Gradients are summed, those of each slice, and updates gathered. At stage 3 both are in
        the time of the loss and its gradient: parameters are gathered where they are read. What is
        left there are the sums over copies."""
        sharding, device = problem.sharding(levers.stage), problem.device
        cut, count = problem.meshes.model(sharding), sharding.count
        params = bytes_of(jax.tree.map(whole, problem.state(levers).params)) // cut
        seconds = 0.0
        if levers.stage < 3:
            crossings = levers.microbatches + 1
            sent = crossings * params * (count - 1) // count
            seconds += device.sending_seconds(sent, count, cut)
        copies = problem.devices // (cut * count)
        if copies > 1:  # each device sums its piece with those of its copies: twice around a ring
            sent = 2 * levers.microbatches * params // count * (copies - 1) // copies
            seconds += device.sending_seconds(sent, copies, cut * count)
        return seconds
