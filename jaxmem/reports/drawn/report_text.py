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


def report_text(report: "MemoryReport") -> str:
    """The totals and, of what was compiled for a GPU, what is alive at the peak."""
    lines = [f"compiled for {report.target}", *_total_lines(report)]
    usable = report.target.usable_bytes
    if usable:
        verdict = "fits" if report.fits() else "does not fit"
        lines.append(f"{verdict}: {report.device / usable:.0%} of {format_bytes(usable)} usable")
    if is_cpu(report.target):
        lines.append(f"note: {CPU_NOTE}")
    if report.has_timeline:
        lines += ["", *_peak_lines(report)]
    return "\n".join(lines)


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
