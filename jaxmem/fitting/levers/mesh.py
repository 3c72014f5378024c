"""The shape of the mesh as a lever."""

from typing import TYPE_CHECKING

from jaxmem.fitting.communication import summed_bytes
from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.meshes import describe
from jaxmem.fitting.sizes import bytes_together
from jaxmem.planning import sums_seconds

if TYPE_CHECKING:
    from jaxmem.fitting.costs import Costs
    from jaxmem.fitting.levers.setting import Levers


class MeshLever(Lever):
    """``mesh``: names and sizes of its axes; empty: it is the one that was given, or none."""

    name, neutral = "mesh", ()
    changes_loss = shifts_projection_error = True

    def as_is(self, workload):
        return workload.meshes.shapes[0] if workload.meshes.shapes else ()

    def values(self, workload):
        if workload.meshes.refused:
            workload.refused["mesh"] = workload.meshes.refused
        return workload.meshes.shapes or [()]

    def text(self, value):
        return f"mesh {describe(value)}"

    def fastest_loss_value(self, workload, value):
        """The one that was given; what other ones take more is counted apart."""
        return self.as_is(workload)

    def least_seconds(self, costs, levers, least):
        if levers.mesh in ((), least.mesh):
            return 0.0
        return _summing(costs, levers, least) - _reading(costs, levers)


def _summing(costs: "Costs", levers: "Levers", first: "Levers") -> float:
    """Seconds in which results of matmuls are summed along axes that the model names: as many bytes
    as on the mesh where one of those axes has the fewest devices, times those."""
    seconds, apart, workload = 0.0, 1, costs.workload
    for name, size in reversed(levers.mesh):
        alone = workload.meshes.first_using_only(name) if size > 1 else None
        if alone is not None:
            program = costs.program(first.replace(mesh=alone))
            sent = summed_bytes(program) * (size - 1) / (dict(alone)[name] - 1)
            seconds += sums_seconds(workload.device, sent, size, apart)
        apart *= size
    return seconds


def _reading(costs: "Costs", levers: "Levers") -> float:
    """Seconds, at most, in which a device reads the parameters that are cut along axes that the
    model names, and others have: twice where they are cast."""
    workload = costs.workload.on(levers)
    sharding = workload.sharding(levers.stage or 1)
    assert sharding is not None
    params = bytes_together(workload.state(levers).params)
    others = params - params // workload.meshes.model(sharding)
    device = workload.device
    return 2 * others / (device.shares.memory * device.memory_bandwidth)
