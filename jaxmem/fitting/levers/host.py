"""The place of the optimizer's state as a lever."""

from jaxmem.fitting.levers.lever import Lever
from jaxmem.levers.host.offloading import offload


class HostLever(Lever):
    """``host``: whether the optimizer's state is in host memory."""

    name = "host"
    kept = {  # noqa: RUF012
        "placement": "keep the optimizer's state, or residuals of a scan, in host memory"
    }
    shrinks_state = True

    def values(self, workload):
        return [False, True] if workload.may("placement") and workload.has_large_state else [False]

    def text(self, value):
        return "state on the host"

    def optimizer(self, workload, optimizer, value):
        return offload(optimizer)

    def reserved_bytes(self, costs, levers):
        return -costs.workload.on(levers).host_bytes(levers)

    def seconds(self, costs, levers):
        """It is fetched and sent back, with nothing overlapped."""
        workload = costs.workload.on(levers)
        return 2 * workload.host_bytes(levers) / workload.device.host_bandwidth
