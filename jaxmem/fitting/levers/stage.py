"""ZeRO's stages as a lever."""

from typing import TYPE_CHECKING

from jaxmem.fitting.communication import gathered_bytes
from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import bytes_together

if TYPE_CHECKING:
    from jaxmem.fitting.costs import Costs
    from jaxmem.fitting.levers.setting import Levers


class StageLever(Lever):
    """``stage``: ZeRO's on the mesh; 0: there is none."""

    name, neutral = "stage", 0
    shrinks_state = changes_loss = shifts_projection_error = separate_projection_error = True

    def as_is(self, workload):
        return 0 if workload.mesh is None else 1

    def values(self, workload):
        if workload.mesh is None:
            return [0]
        meshes = workload.meshes
        spread = any(meshes.sharding(shape, 1).count > 1 for shape in meshes.shapes or [()])
        return [1, 2, 3] if spread else [1]  # of copies alone there is nothing to spread

    def text(self, value):
        return f"ZeRO stage {value}"

    def optimizer(self, workload, optimizer, value):
        return workload.sharding(value).optimizer(optimizer)

    def options(self, workload, value):
        return {"sharding": workload.sharding(value)}

    def fastest_loss_value(self, workload, value):
        return value if value == 3 else self.as_is(workload)

    def least_seconds(self, costs, levers, least):
        """At stage 3 parameters are gathered in the loss, those of each slice."""
        if levers.stage < 3:
            return 0.0
        gathered = levers.microbatches * _gathering(costs, levers, least)
        return gathered - _gathering(costs, least, least)

    def seconds(self, costs, levers):
        """Gradients are summed, those of each slice, and updates gathered. At stage 3 both are in
        the time of the loss and its gradient: parameters are gathered where they are read. What is
        left there are the sums over copies."""
        workload = costs.workload.on(levers)
        sharding, device = workload.sharding(levers.stage), workload.device
        cut, count = workload.meshes.model(sharding), sharding.count
        params = bytes_together(costs.trained(workload.state(levers).params)) // cut
        seconds = 0.0
        if levers.stage < 3:
            crossings = levers.microbatches + 1
            sent = crossings * params * (count - 1) // count
            seconds += device.sending_seconds(sent, count, cut)
        copies = workload.devices // (cut * count)
        if copies > 1:  # each device sums its piece with those of its copies: twice around a ring
            sent = 2 * levers.microbatches * params // count * (copies - 1) // copies
            seconds += device.sending_seconds(sent, copies, cut * count)
        return seconds


def _gathering(costs: "Costs", levers: "Levers", first: "Levers") -> float:
    """Seconds in which all parameters are gathered once: as many bytes as on the first mesh, from
    those that have them on that of the levers."""
    workload = costs.workload.on(levers)
    sharding = workload.sharding(3)
    assert sharding is not None
    cut, count = workload.meshes.model(sharding), sharding.count
    params = bytes_together(workload.state(first).params)
    sent = min(gathered_bytes(costs.program(first)), params) // cut
    return workload.device.sending_seconds(sent * (count - 1) / count, count, cut)
