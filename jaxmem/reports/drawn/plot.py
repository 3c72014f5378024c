"""The timelines of reports as pictures."""

import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.targets import example

# Of each kind: Okabe and Ito's colours and three greys, told apart by the colour-blind too.
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
    "constants": "#5f5f5f",
}
LIMIT = "#d1495b"  # of a budget: read on light and on dark
_LABEL = 0.07  # of the axis: the height of a line of text, with room
_IN_SIGHT = 1.6  # times the largest report: a budget above that is not drawn
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


def unit_of(most: int) -> tuple[str, int]:
    """The unit that suits so many bytes: its name and its bytes."""
    units = [("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("bytes", 1)]
    return next(unit for unit in units if most >= unit[1] or unit[1] == 1)


@contextlib.contextmanager
def style(dark: bool) -> Iterator[None]:
    """The colours of a light or a dark page, while a figure is made and saved."""
    import matplotlib

    ink, paper = ("#ececee", "#1f2023") if dark else ("#1d1d1f", "white")
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    colors: Any = dict.fromkeys(names, ink) | dict.fromkeys(papers, paper)
    with matplotlib.rc_context(colors):
        yield


def draw(
    named: Mapping[str, dict[str, Any]],
    path: str | os.PathLike,
    budget: int | None = None,
    dark: bool = False,
) -> None:
    """Draws the timelines of reports' plain data (`MemoryReport.to_json`) below each other, to one
    scale of bytes, with a name before each title and the budget as a line. See
    `MemoryReport.plot`."""
    check_plot(path)
    reports = list(named.values())
    for about in reports:
        check_timeline(about)
    # Without pyplot: no global state, no window, and safe in threads.
    from matplotlib.figure import Figure

    most = max(about["device"] for about in reports)
    high = max(most, budget) if budget and budget <= _IN_SIGHT * most else most
    name, unit = unit_of(most)
    shown = [
        kind
        for kind in COLORS
        if any(max(about["timeline"]["live_by_kind"][kind]) > 0.002 * most for about in reports)
    ]
    with style(dark):
        figure = Figure(figsize=(10, 0.9 + 3.7 * len(reports)), dpi=110, layout="constrained")
        panels = figure.subplots(len(reports), squeeze=False, sharey=True)[:, 0]
        for axes, (title, about) in zip(panels, named.items(), strict=True):
            _panel(axes, title, about, shown, unit, _above(about["peak"], budget, high))
            if budget and budget <= high:
                _limit(axes, budget, unit)
            axes.set(ylim=(0, 1.14 * high / unit), ylabel=f"live device memory ({name})")
        panels[-1].set_xlabel("compiled schedule (instruction)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9
        )
        figure.savefig(path)


def _above(peak: int, budget: int | None, high: int) -> int:
    """Bytes above which the peak's label stands: a budget just above would go through it."""
    return budget if budget and peak <= budget <= peak + _LABEL * high else peak


def _limit(axes, budget: int, unit: int) -> None:
    axes.axhline(budget / unit, color=LIMIT, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"budget {format_bytes(budget)}",
        (0.005, budget / unit),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color=LIMIT,
    )


def _panel(axes, name: str, about: dict[str, Any], kinds: list[str], unit: int, above: int) -> None:
    """One timeline, with its peak's label above so many bytes."""
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
    at = about["peak_operation"]
    peak, point = about["peak"] / unit, about["peak_point"]
    axes.plot([point, point], [0, peak], color="#111", linewidth=0.9, linestyle="--")
    told = f"peak {format_bytes(about['peak'])}, {at['phase']}: {at['module']}, {at['source']}"
    side = "left" if point < 0.35 * points else "right" if point > 0.65 * points else "center"
    axes.annotate(
        told,
        (point, above / unit),
        xytext=(0, 5),
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=8.5,
    )
    device, target = format_bytes(about["device"]), about["target"].partition(": ")[2]
    axes.set(
        xlim=(0, max(points - 1, 1)),
        title=f"{name}{device} on {target.partition(',')[0] or about['target']}",
    )
    axes.spines[["top", "right"]].set_visible(False)
