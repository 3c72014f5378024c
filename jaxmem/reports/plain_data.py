"""A report as plain data: what JSON, pages, plots and `jaxmem.diff` are made of."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jaxlib

from jaxmem.reports.drawn.grouping import group_numbers

if TYPE_CHECKING:
    from jaxmem.reports.report import MemoryReport


def describe(report: "MemoryReport") -> dict[str, Any]:
    """A report as plain data: what `MemoryReport.to_json` writes."""
    on_host = dataclasses.asdict(report.on_host)
    about: dict[str, Any] = {
        "jaxmem": 1,
        "jax": jaxlib.__version__,
        "name": report.name,
        "target": str(report.target),
        "usable": report.target.usable_bytes,
        "device": report.device,
        "host": report.host,
        "totals": dataclasses.asdict(report.on_device)
        | {f"host_{role}": size for role, size in on_host.items()},
    }
    if not report.has_timeline:
        return about
    origins = report.origins
    return about | {
        "peak": report.peak_bytes,
        "fragmentation": report.fragmentation,
        "peak_point": report.timeline.peak_point,
        "peak_operation": dataclasses.asdict(report.peak_operation),
        "by_phase": report.by_phase,
        "by_kind": report.by_kind,
        "by_module": report.by_module,
        "by_source": report.by_source,
        "buffers": [dataclasses.asdict(buffer) for buffer in report.peak],
        "timeline": {
            "schedule": list(report.timeline.schedule),
            "phases": list(report.phases),
            "origins": [dataclasses.asdict(one) for one in dict.fromkeys(origins)],
            "origin": group_numbers(origins),
            "live": report.timeline.live.tolist(),
            "live_by_kind": {kind: row.tolist() for kind, row in report.live_by_kind.items()},
        },
    }
