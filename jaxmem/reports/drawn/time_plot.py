"""The predicted time of a step as a picture."""

import collections
import os
from typing import TYPE_CHECKING, Any

from jaxmem.reports.drawn.plot import check_plot, style
from jaxmem.reports.drawn.text import truncate

if TYPE_CHECKING:
    from jaxmem.reports.speed.step_time import StepTime

# Okabe and Ito's colours and two greys, as in the timelines of bytes.
PHASES = {
    "forward": "#0072b2",
    "loss": "#56b4e9",
    "backward": "#e69f00",
    "recompute": "#d55e00",
    "update": "#009e73",
}
LIMITS = {"arithmetic": "#cc79a7", "memory": "#f0e442", "launches": "#8c8c8c"}
_OTHERS = "#c4c4c4"  # copies and collectives, and what is in no phase
_MODULES, _NAME = 8, 34  # rows, and columns of their names
_SMALL = 0.002  # of the step: a row too short to see


def draw_time(time: "StepTime", path: str | os.PathLike, dark: bool = False) -> None:
    """Draws when each phase of a step runs, and below it the milliseconds of each phase and of the
    largest modules, by what limits their kernels. See `MemoryReport.plot`."""
    check_plot(path)
    # Without pyplot: no global state, no window, and safe in threads.
    from matplotlib.figure import Figure

    phases, modules = _rows(time, "phase", len(PHASES) + 2), _rows(time, "module", _MODULES)
    heights = [1.6, 0.6 + 0.36 * len(phases), 0.6 + 0.36 * len(modules)]
    with style(dark):
        figure = Figure(figsize=(10, 1.3 + sum(heights)), dpi=110, layout="constrained")
        top, middle, below = figure.subplots(3, height_ratios=heights)
        _timeline(top, time)
        _bars(middle, phases, "by phase")
        _bars(below, modules, "by module")
        middle.sharex(below)
        below.set_xlabel("predicted time (ms)")
        places: Any = [
            ("phase", (top,), "outside right upper"),
            ("limited by", (middle, below), "outside right lower"),
        ]
        for title, panels, where in places:
            shown: dict[str, Any] = {}
            for axes in panels:
                handles, labels = axes.get_legend_handles_labels()
                shown |= dict(zip(labels, handles, strict=True))
            told: Any = list(shown.values()), list(shown)
            figure.legend(*told, loc=where, frameon=False, fontsize=9, title=title)
        figure.savefig(path)


def _timeline(axes, time: "StepTime") -> None:
    """The phases along the step, what runs in one after the other as one bar."""
    runs: list[list] = []  # phase, start and length in ms
    now = 0.0
    for phase, one in zip(time.by_run("phase"), time.ran, strict=True):
        length = 1e3 * one.seconds
        if runs and runs[-1][0] == phase:
            runs[-1][2] += length
        else:
            runs.append([phase, now, length])
        now += length
    for phase in _known(PHASES, (phase for phase, _, _ in runs)):
        bars = [(start, length) for name, start, length in runs if name == phase]
        color = PHASES.get(phase, _OTHERS)
        axes.broken_barh(bars, (0, 1), label=phase, facecolors=color, linewidth=0)
    axes.set(
        xlim=(0, now or 1),
        yticks=[],
        xlabel="time since the step began (ms)",
        title=f"{now:.4g} ms a step on {time.target.name}, predicted ({time.target.checked})",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bars(axes, rows: dict[str, dict[str, float]], title: str) -> None:
    """Milliseconds of each row by limit, and their sum beside it."""
    names = list(rows)[::-1]
    left = [0.0] * len(names)
    for limit in _known(LIMITS, (limit for row in rows.values() for limit in row)):
        lengths = [1e3 * rows[name].get(limit, 0.0) for name in names]
        color = LIMITS.get(limit, _OTHERS)
        axes.barh(range(len(names)), lengths, left=left, label=limit, color=color, height=0.7)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    most = max(left, default=0.0) or 1.0
    for at, length in enumerate(left):
        axes.annotate(
            f"{length:.3g} ms",
            (length, at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(names)), [truncate(name, _NAME) for name in names], fontsize=8.5)
    axes.set(xlim=(0, 1.12 * most))
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _rows(time: "StepTime", key: str, most: int) -> dict[str, dict[str, float]]:
    """Seconds by name and by limit, the largest names first; the rest is one row."""
    found: dict[str, dict[str, float]] = {}
    for name, limit, one in zip(time.by_run(key), time.by_run("limit"), time.ran, strict=True):
        row = found.setdefault(name, {})
        row[limit] = row.get(limit, 0.0) + one.seconds
    names = sorted(found, key=lambda name: -sum(found[name].values()))
    large = [name for name in names[:most] if sum(found[name].values()) >= _SMALL * time.seconds]
    rows = {name: found[name] for name in large}
    rest: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name in names[len(large) :]:
        for limit, seconds in found[name].items():
            rest[limit] += seconds
    return rows | ({f"({len(names) - len(large)} more)": dict(rest)} if rest else {})


def _known(colors: dict[str, str], names) -> list[str]:
    """The names in the order of their colours, the others last."""
    ordered = dict.fromkeys(names)
    return [name for name in colors if name in ordered] + [
        name for name in ordered if name not in colors
    ]
