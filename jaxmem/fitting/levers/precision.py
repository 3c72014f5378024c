"""bfloat16 compute as a lever."""

import dataclasses

import jax.numpy as jnp

from jaxmem.fitting.levers.lever import Lever
from jaxmem.levers.mixed_precision.policy import precision as parse_precision


class PrecisionLever(Lever):
    """``precision``: its text; "" is as the function has it."""

    name, neutral = "precision", ""
    allowed = {"precision": "compute in bfloat16, with other rounding"}  # noqa: RUF012
    changes_loss = shifts_projection_error = True
    unused_label = "precision as it is"

    def as_is(self, workload):
        return "" if workload.precision is None else str(workload.precision)

    def values(self, workload):
        own = self.as_is(workload)
        if workload.precision is not None and workload.precision.compute.itemsize <= 2:
            return [own]
        may = workload.may("precision")
        if may and not workload.device.has_bfloat16:
            workload.refused["precision"] = (
                f"{workload.device.kind} has no bfloat16 arithmetic; "
                "precision='fp16' with loss_scale=jaxmem.LossScale() is for it"
            )
        elif may:
            whole = workload.precision or parse_precision("fp32")
            half = dataclasses.replace(whole, compute=jnp.dtype(jnp.bfloat16))
            return [own, str(half) if workload.precision else "bf16"]
        return [own]

    def text(self, value):
        return value

    def options(self, workload, value):
        return {"precision": value}
