"""The timeline of a report as a picture."""

import os
import pathlib
from typing import TYPE_CHECKING

from jaxmem._bytes import format_bytes
from jaxmem._errors import JaxmemError

if TYPE_CHECKING:
    from jaxmem.memory._report import MemoryReport

# Okabe and Ito's colours and two greys: told apart by the colour-blind too.
COLORS = {
    "parameters": "#0072b2",
    "optimizer state": "#56b4e9",
    "model state": "#8c8c8c",
    "batch": "#c4c4c4",
    "gradients": "#cc79a7",
    "residuals": "#e69f00",
    "temporaries": "#009e73",
    "workspace": "#d55e00",
    "outputs": "#f0e442",
}
_SUFFIXES = (".png", ".svg", ".pdf")


def draw(report: "MemoryReport", path: str | os.PathLike) -> None:
    """See `MemoryReport.plot`."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise JaxmemError(
            f"A plot is written as {', '.join(_SUFFIXES)}; got the path {str(path)!r}."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise JaxmemError(
            "Plots need matplotlib, which is not installed: pip install 'jaxmem[viz]'."
        ) from error
    timeline, unit = report.timeline, 1024**3
    name = "GiB"
    if report.device < unit:
        unit, name = 1024**2, "MiB"
    rows = {kind: report.live_by_kind[kind] / unit for kind in COLORS}
    rows = {kind: row for kind, row in rows.items() if row.max() > 0.002 * report.device / unit}
    # Without pyplot: no global state, no window, and safe in threads.
    figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    points = range(len(timeline.schedule))
    axes.stackplot(
        points,
        *rows.values(),
        labels=rows,
        colors=[COLORS[kind] for kind in rows],
        step="post",
        linewidth=0,
    )
    at, peak = timeline.peak_point, report.peak_bytes / unit
    axes.axhline(report.device / unit, color="#555", linewidth=0.8, linestyle=":")
    axes.axvline(at, color="#111", linewidth=0.9, linestyle="--")
    told = report.peak_operation
    where = "\n".join(
        [f"peak {format_bytes(report.peak_bytes)}", f"{told.phase}: {told.module}", told.source]
    )
    left = at < len(timeline.schedule) / 2
    axes.annotate(
        where,
        (at, peak),
        xytext=(10 if left else -10, -8),
        textcoords="offset points",
        ha="left" if left else "right",
        va="top",
        fontsize=8.5,
        bbox={
            "boxstyle": "round,pad=0.35",
            "facecolor": "white",
            "alpha": 0.9,
            "edgecolor": "#999",
        },
    )
    axes.set(
        xlim=(0, max(len(timeline.schedule) - 1, 1)),
        ylim=(0, 1.06 * report.device / unit),
        xlabel="compiled schedule (instruction)",
        ylabel=f"live device memory ({name})",
        title=f"{format_bytes(report.device)} on {report.target.description}",
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path)
