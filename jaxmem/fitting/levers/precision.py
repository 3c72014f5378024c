"""bfloat16 compute as a lever."""

import dataclasses

import jax.numpy as jnp

from jaxmem.fitting.levers.lever import Lever
from jaxmem.levers.precision.policy import precision as parse_precision


class PrecisionLever(Lever):
    """``precision``: its text; "" is as the function has it."""

    name, neutral = "precision", ""
    allowed = {"precision": "compute in bfloat16, with other rounding"}  # noqa: RUF012
    changes_loss = own_ratio = True

    def as_is(self, problem):
        return "" if problem.precision is None else str(problem.precision)

    def values(self, problem):
        own = self.as_is(problem)
        if problem.precision is not None and problem.precision.compute.itemsize <= 2:
            return [own]
        may = problem.may("precision")
        if may and not problem.device.has_bfloat16:
            problem.refused["precision"] = (
                f"{problem.device.kind} has no bfloat16 arithmetic; "
                "precision='fp16' with loss_scale=jaxmem.LossScale() is for it"
            )
        elif may:
            whole = problem.precision or parse_precision("fp32")
            half = dataclasses.replace(whole, compute=jnp.dtype(jnp.bfloat16))
            return [own, str(half) if problem.precision else "bf16"]
        return [own]

    def text(self, value):
        return value

    def options(self, problem, value):
        return {"precision": value}
