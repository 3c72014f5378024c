"""What is projected of a step, beside what it is compiled to."""

from collections.abc import Callable

import jax

import jaxmem


def projected_and_compiled(loss: Callable, args: tuple, target: str = "h100") -> tuple[int, int]:
    """Bytes of the value and gradient of a loss as it is written."""
    plan = jaxmem.plan(loss, *args, budget="100%", target=target, compilations=0)
    step = jax.value_and_grad(loss)
    return plan.plain_bytes, jaxmem.memory(step, *args, target=target, timeline=False).device
