"""Operations that keep less, in the place of plain ones, as a lever."""

import jax

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.sizes import whole
from jaxmem.ops.swapping import swapped, swaps

_LEAST = 2**26  # bytes of scores or logits on each device: as `jaxmem.ops.swap` has it


class OperationsLever(Lever):
    """``operations``: whether `jaxmem.ops` are in the place of the loss's plain attention and
    cross-entropy."""

    name = "operations"
    allowed = {  # noqa: RUF012
        "operations": "put jaxmem.ops in the place of attention and cross-entropy, with other "
        "rounding"
    }
    changes_state = False
    changes_loss = shifts_projection_error = True

    def values(self, workload):
        step, state = workload.step(workload.as_is), workload.state(workload.as_is)
        arguments = state.params, workload.batch, state.model_state, state.key
        found = swaps(step.plain_loss, jax.tree.map(whole, arguments), _LEAST * workload.devices)
        if not found:
            if self.name in workload.allow:
                workload.refused[self.name] = "the loss has no attention and no cross-entropy of "
                workload.refused[self.name] += "64 MiB or more"
            return [False]
        if workload.may(self.name):
            return [False, True]
        if self.name not in workload.keep:
            largest = max(found, key=lambda one: one.aval.size)
            together = ", on all devices together" if workload.devices > 1 else ""
            workload.refused[self.name] += f" ({largest.matrix}{together})"
        return [False]

    def text(self, value):
        return "jaxmem.ops"

    def loss(self, workload, loss_fn, value):
        return swapped(loss_fn, _LEAST * workload.devices)
