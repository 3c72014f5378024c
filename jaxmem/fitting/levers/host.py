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

    def values(self, problem):
        return [False, True] if problem.may("placement") and problem.has_large_state else [False]

    def text(self, value):
        return "state on the host"

    def optimizer(self, problem, optimizer, value):
        return offload(optimizer)

    def reserved_bytes(self, problem, levers):
        return -problem.host_bytes(levers)

    def seconds(self, problem, levers):
        """It is fetched and sent back, with nothing overlapped."""
        return 2 * problem.host_bytes(levers) / problem.device.host_bandwidth
