"""What is projected of a step, beside what it is compiled to."""

from collections.abc import Callable

import jax

import jaxmem


def projected_and_compiled(
    loss: Callable, args: tuple, target: str = "h100", as_planned: bool = False
) -> tuple[int, int]:
    """Bytes of the value and gradient of a loss as it is written; ``as_planned``: compiled with the
    options of plans."""
    plan = jaxmem.plan(loss, *args, budget="100%", target=target, compilations=0)
    options = plan.compiler_options if as_planned else None
    step = jax.value_and_grad(loss)
    report = jaxmem.memory(step, *args, target=target, timeline=False, compiler_options=options)
    return plan.plain_bytes, report.device
