"""The timelines of reports as pictures."""

import importlib.util
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.targets import example

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


def check_plot(path: str | os.PathLike) -> None:
    """That a plot can be written to a path, as far as its name tells, and drawn at all.

    Raises:
        JaxmemError: the suffix is not known, or matplotlib is missing.
    """
    if pathlib.Path(path).suffix.lower() not in _SUFFIXES:
        raise JaxmemError(
            f"A plot is written as {', '.join(_SUFFIXES)}; got the path {str(path)!r}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise JaxmemError(
            "Plots need matplotlib, which is not installed: pip install 'jaxmem[viz]'."
        )


def check_timeline(about: dict[str, Any]) -> None:
    """That a report's plain data has a timeline.

    Raises:
        JaxmemError: it has none.
    """
    if "timeline" not in about:
        raise JaxmemError(
            f"There is no timeline of what was compiled for {about['target']}, and so no page and "
            f"no plot of it. Name a target, as in jaxmem.memory(step, *args, {example()})."
        )


def draw(named: Mapping[str, dict[str, Any]], path: str | os.PathLike) -> None:
    """Draws the timelines of reports' plain data (`MemoryReport.to_json`) below each other, to one
    scale of bytes, with a name before each title. See `MemoryReport.plot`."""
    check_plot(path)
    reports = list(named.values())
    for about in reports:
        check_timeline(about)
    # Without pyplot: no global state, no window, and safe in threads.
    from matplotlib.figure import Figure

    most = max(about["device"] for about in reports)
    name, unit = ("GiB", 1024**3) if most >= 1024**3 else ("MiB", 1024**2)
    shown = [
        kind
        for kind in COLORS
        if any(max(about["timeline"]["live_by_kind"][kind]) > 0.002 * most for about in reports)
    ]
    figure = Figure(figsize=(10, 0.9 + 3.7 * len(reports)), dpi=110, layout="constrained")
    panels = figure.subplots(len(reports), squeeze=False, sharey=True)[:, 0]
    for axes, (title, about) in zip(panels, named.items(), strict=True):
        _panel(axes, title, about, shown, unit)
        axes.set(ylim=(0, 1.06 * most / unit), ylabel=f"live device memory ({name})")
    panels[-1].set_xlabel("compiled schedule (instruction)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path)


def _panel(axes, name: str, about: dict[str, Any], kinds: list[str], unit: int) -> None:
    """One timeline."""
    timeline = about["timeline"]
    points = len(timeline["schedule"])
    axes.stackplot(
        range(points),
        *([size / unit for size in timeline["live_by_kind"][kind]] for kind in kinds),
        labels=kinds,
        colors=[COLORS[kind] for kind in kinds],
        step="post",
        linewidth=0,
    )
    axes.axhline(about["device"] / unit, color="#555", linewidth=0.8, linestyle=":")
    axes.axvline(about["peak_point"], color="#111", linewidth=0.9, linestyle="--")
    at = about["peak_operation"]
    told = [f"peak {format_bytes(about['peak'])}", f"{at['phase']}: {at['module']}", at["source"]]
    left = about["peak_point"] < points / 2
    axes.annotate(
        "\n".join(told),
        (about["peak_point"], about["peak"] / unit),
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
    device, target = format_bytes(about["device"]), about["target"].partition(": ")[2]
    axes.set(
        xlim=(0, max(points - 1, 1)),
        title=f"{name}{device} on {target.partition(',')[0] or about['target']}",
    )
    axes.spines[["top", "right"]].set_visible(False)
