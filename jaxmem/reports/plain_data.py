"""A report as plain data: what JSON, pages, plots and `jaxmem.diff` are made of."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import jaxlib

from jaxmem.reports.drawn.grouping import group_numbers, without_numbers
from jaxmem.reports.where.peak import FRAGMENTATION
from jaxmem.targets import rated

if TYPE_CHECKING:
    from jaxmem.reports.report import MemoryReport


def describe(report: "MemoryReport") -> dict[str, Any]:
    """The bytes of a report as plain data: what `MemoryReport.to_json` writes of them."""
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
    if report.cliff is not None:
        about["cliff"] = {"limit": report.cliff.limit, "left": report.cliff.left}
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
        "on_chip": report.on_chip,
        "padding": [dataclasses.asdict(one) for one in report.padding],
        "timeline": {
            "schedule": list(report.timeline.schedule),
            "phases": list(report.phases),
            "origins": [dataclasses.asdict(one) for one in dict.fromkeys(origins)],
            "origin": group_numbers(origins),
            "live": report.timeline.live.tolist(),
            "live_by_kind": {kind: row.tolist() for kind, row in report.live_by_kind.items()},
        },
    }


def costs(report: "MemoryReport") -> dict[str, Any]:
    """What a run of the step costs beside bytes, as plain data: FLOPs, traffic, predicted time."""
    known = rated(report.target)
    time = None
    if known is not None:
        parts = ("seconds", "waiting", "by_phase", "by_limit", "by_module", "by_source")
        time = {"error": known.time_error} | {part: getattr(report.time, part) for part in parts}
    return {"work": dataclasses.asdict(report.work), "moved": report.moved, "time": time}


def summary(report: "MemoryReport") -> dict[str, Any]:
    """What a diff needs of a report, without its timeline and its buffers: a few KiB."""
    about = with_values(describe(report))
    return {name: part for name, part in about.items() if name not in ("timeline", "buffers")}


def with_values(about: dict[str, Any]) -> dict[str, Any]:
    """A report's plain data with the bytes at the peak by value: operation, shape and line, equal
    ones of equal layers together; the rows add up to the device bytes."""
    if "by_value" in about or "buffers" not in about:
        return about
    rows: Counter[str] = Counter()
    for one in about["buffers"]:
        shape = f"{one['dtype']}[{','.join(map(str, one['shape']))}]"
        module = without_numbers(one["module"])
        rows[f"{one['operation']} {shape} {module} {one['source']}"] += one["bytes"]
    return about | {"by_value": {**dict(rows.most_common()), FRAGMENTATION: about["fragmentation"]}}
