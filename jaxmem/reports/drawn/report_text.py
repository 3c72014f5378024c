"""A memory report as text for a terminal."""

from typing import TYPE_CHECKING

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.cpu import CPU_NOTE, is_cpu
from jaxmem.reports.drawn.text import (
    breakdown_lines,
    buffer_lines,
    columns,
    fit,
    rolled_up,
    side_by_side,
)

if TYPE_CHECKING:
    from jaxmem.reports.report import MemoryReport


def report_text(report: "MemoryReport", budget: int | None = None) -> str:
    """The totals, whether they fit a budget (None: what is usable on the target) and, of what was
    compiled for a GPU, what is alive at the peak."""
    lines = [f"compiled for {report.target}", *_total_lines(report)]
    of_budget = budget is not None
    allowed = budget if of_budget else report.target.usable_bytes
    if allowed:
        verdict = "fits" if report.device <= allowed else "does not fit"
        of = (
            f"the budget of {format_bytes(allowed)}"
            if of_budget
            else f"{format_bytes(allowed)} usable"
        )
        lines.append(f"{verdict}: {_share(report.device / allowed)} of {of}")
    if is_cpu(report.target):
        lines.append(f"note: {CPU_NOTE}")
    if report.has_timeline:
        lines += ["", *_peak_lines(report)]
    return "\n".join(lines)


def _share(share: float) -> str:
    text = f"{share:.0%}"
    return "under 1%" if share and text == "0%" else text


def _total_lines(report: "MemoryReport") -> list[str]:
    on_device, on_host = report.on_device, report.on_host
    rows = [
        ("argument", on_device.argument, on_host.argument),
        ("output", on_device.output, on_host.output),
        ("alias", -on_device.alias, -on_host.alias),
        ("temp", on_device.temp, on_host.temp),
        ("total", on_device.total, on_host.total),
    ]
    return [
        f"{'':10}{'device':>14}{'host':>14}",
        *(f"{name:10}{format_bytes(one):>14}{format_bytes(two):>14}" for name, one, two in rows),
    ]


def _peak_lines(report: "MemoryReport") -> list[str]:
    at = report.peak_operation
    where = " · ".join([at.operation, at.module, at.source])
    start = f"peak {format_bytes(report.peak_bytes)} in the {at.phase} phase, at "
    return [
        start + fit(where, columns() - len(start)),
        "",
        *side_by_side(
            breakdown_lines("by phase", report.by_phase, report.device),
            breakdown_lines("by kind", report.by_kind, report.device),
        ),
        *breakdown_lines("by line", report.by_source, report.device),
        *breakdown_lines("by module", rolled_up(report.by_module), report.device),
        *buffer_lines(report.peak),
    ]
