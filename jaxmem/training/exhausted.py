"""What is said when a step runs out of memory at run time."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import MemoryReport, memory
from jaxmem.targets import LocalDevice, Target, resolve

# Times the budget that was met and ran out of memory all the same. Chosen: workspaces and gaps of
# the allocator are a few percent; who runs out again is told the same, of a smaller budget.
_LESS = 0.9

_advisers: list[Callable[..., str]] = []


def register_advice(advise: Callable[..., str]) -> None:
    """``advise(step, state, batch, budget, device)`` says what else there is to do."""
    _advisers.append(advise)


def out_of_memory(step: Any, state: Any, batch: Any, error: Exception) -> JaxmemError:
    """The error of a `TrainStep` whose run XLA ended for want of memory: the budget, the compiled
    and the measured bytes, what holds the most, and what `jaxmem.fit` would do."""
    state, batch = jax.tree.map(jaxprs.abstract, (state, batch))  # donated arrays may be gone
    device = resolve(None)
    budget = step.fitting.budget if step.fitting else device.usable_bytes
    report = None
    with contextlib.suppress(JaxmemError):  # nothing may hide what happened
        report = memory(step, state, batch, target=device)
    if step.fitting and not (report and report.has_timeline):
        report = step.fitting.report
    statistics = jax.local_devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    measured = f"{format_bytes(peak)} at the peak" if peak else "not known: no statistics"
    lines = [
        f"The step ran out of memory on {device.description}.",
        f"  budget    {format_bytes(budget) if budget else 'not known'}",
        f"  compiled  {_compiled(report, budget)}",
        f"  measured  {measured}",
    ]
    if report and report.has_timeline:
        largest = list(report.by_source.items())[:3]
        lines += ["  held by   " + f"{format_bytes(size)} at {line}" for line, size in largest]
    lines.append(_advice(step, state, batch, report, budget, device))
    lines.append(f"XLA said: {str(error).splitlines()[0]}")
    return JaxmemError("\n".join(lines))


def _compiled(report: MemoryReport | None, budget: int) -> str:
    if report is None:
        return "not known: it could not be compiled again"
    host = f", {format_bytes(report.host)} on the host" if report.host else ""
    size = format_against(report.device, budget) if budget else format_bytes(report.device)
    return f"{size} for {report.target.name}{host}"


def _advice(step, state, batch, report, budget: int, device: Target | LocalDevice) -> str:
    if report and budget and report.device <= budget:
        return (
            "The compiled bytes are within the budget: other arrays are on the device, kernels "
            "take workspace while they run, or memory is in pieces. Delete what is not needed "
            "(jax.live_arrays() lists it), give JAX more of the device "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION), or call jaxmem.fit with a budget of "
            f"{format_bytes(int(_LESS * budget))}."
        )
    device = step.fitting.target if step.fitting else device
    return "\n".join(advise(step, state, batch, budget, device) for advise in _advisers)
