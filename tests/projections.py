"""What is projected of a step, beside what it is compiled to."""

from collections.abc import Callable
from typing import Any

import jax

import jaxmem


def projected_and_compiled(
    loss: Callable, args: tuple, target: str = "h100", as_planned: bool = False, **by: Any
) -> tuple[int, int]:
    """Bytes of the value and gradient of a loss as it is written, ``by`` some arguments;
    ``as_planned``: compiled with the options of plans."""
    plan = jaxmem.plan(loss, *args, budget="100%", target=target, compilations=0, **by)
    options = plan.compiler_options if as_planned else None
    step = jax.value_and_grad(loss, **by)
    report = jaxmem.memory(step, *args, target=target, timeline=False, compiler_options=options)
    return plan.plain_bytes, report.device


def planned_and_compiled(
    loss: Callable, args: tuple, share: float | None, target: str = "h100"
) -> tuple[jaxmem.Plan, int]:
    """The projected plan within a share of the bytes of the step as it is (None: of the fewest),
    and the bytes that it compiles to."""
    plain = jaxmem.plan(loss, *args, budget="100%", target=target, compilations=0).plain_bytes
    budget = share and int(share * plain)
    plan = jaxmem.plan(loss, *args, budget=budget, target=target, compilations=0)
    step, options = jax.value_and_grad(plan.apply(loss)), plan.compiler_options
    report = jaxmem.memory(step, *args, target=target, compiler_options=options, timeline=False)
    return plan, report.device
