"""ZeRO's stages as a lever."""

import jax

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import bytes_of, whole


class StageLever(Lever):
    """``stage``: ZeRO's on the mesh; 0: there is none."""

    name, neutral = "stage", 0
    shrinks_state = own_ratio = True

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

    def reserved_bytes(self, problem, levers, share):
        """Of parameters and gradients a device may have more than its share."""
        if share == 1:
            return 0
        params = problem.state(levers).params
        everywhere, own = bytes_of(jax.tree.map(whole, params)), bytes_of(params)
        gradients = everywhere // share if levers.stage >= 2 else everywhere
        reserved = own + gradients - 2 * everywhere // share
        if levers.stage == 3:  # XLA gathers all of them early and keeps them
            reserved += everywhere - own
        return reserved

    def seconds(self, problem, levers):
        """Gradients are summed and updates gathered; at stage 3 parameters once more."""
        if problem.devices == 1:
            return 0.0
        crossings = 3 if levers.stage == 3 else 2
        moved = crossings * bytes_of(jax.tree.map(whole, problem.state(levers).params))
        bandwidth = problem.device.links.among(problem.devices)
        return moved * (problem.devices - 1) // problem.devices / bandwidth
