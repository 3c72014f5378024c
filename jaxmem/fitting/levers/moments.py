"""8-bit moments as a lever."""

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import bytes_of
from jaxmem.optim import small_moments


class MomentsLever(Lever):
    """``moments``: whether the optimizer's moments are in 8 bits."""

    name = "moments"
    allowed = {"moments": "keep the optimizer's moments in 8 bits, with other rounding"}  # noqa: RUF012
    shrinks_state = True

    def values(self, workload):
        return [False, True] if workload.may("moments") and workload.has_large_state else [False]

    def text(self, value):
        return "8-bit moments"

    def optimizer(self, workload, optimizer, value):
        return small_moments(optimizer)

    def seconds(self, costs, levers):
        """They are expanded to be updated: they move as many bytes as whole ones."""
        workload = costs.workload.on(levers)
        whole, small = (
            bytes_of(workload.state(levers.replace(moments=value)).opt_state)
            for value in (False, True)
        )
        return 2 * (whole - small) / workload.device.memory_bandwidth
