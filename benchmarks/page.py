"""The documentation's page "Measured": the claims, every table of results, and plots of some.

``python -m benchmarks.page`` writes docs/results.md, which is not committed, and docs/plots, which
are. A guide shows ``plots/NAME.svg``: that of the results of this name with the oldest version of
jax. ``plots/NAME-dark.svg`` is the same for a dark page. A plot holds the checksum of what it
shows, and is drawn again where that has changed: other versions of matplotlib draw otherwise.
"""

import hashlib
import json
import re
import textwrap
from importlib import import_module

import matplotlib
from matplotlib.figure import Figure

from benchmarks.__main__ import GROUPS
from benchmarks._record import ROOT, results_of, same_rows, source, table

DOCS = ROOT / "docs"
INK = {"": "#222222", "-dark": "#d5d7e0"}  # of text and axes on a light and on a dark page
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def gib(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit] / 2**30


def titled(title: str, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure


def bars(title: str, names: list[str], values: list[float], label: str) -> Figure:
    figure = titled(title, 8, 0.8 + 0.4 * len(names))
    axes = figure.add_subplot()
    drawn = axes.barh(names[::-1], values[::-1], color="tab:blue")
    axes.bar_label(drawn, fmt="%.4g", padding=3)
    axes.set(xlabel=label)
    axes.margins(x=0.12)
    return figure


def grouped(title: str, names: list[str], groups: dict[str, list[float]], label: str) -> Figure:
    """Several bars for each name, one of each group."""
    figure = titled(title, 8, 1 + 0.28 * len(names) * len(groups))
    axes = figure.add_subplot()
    thickness = 0.8 / len(groups)
    for number, (group, values) in enumerate(groups.items()):
        places = [
            place + (number - (len(groups) - 1) / 2) * thickness for place in range(len(names))
        ]
        drawn = axes.barh(places, values, thickness, label=group)
        axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize="small")
    axes.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.legend()
    return figure


def columns(*shown: str, name: str = "step", label: str = "GiB, compiled"):
    """A plot of some columns of bytes, a bar for each in every row that has them all."""

    def draw(title: str, rows: list[dict]) -> Figure:
        rows = [row for row in rows if all(row[column] for column in shown)]
        names = [row[name].replace("`", "") for row in rows]
        values = {column: [gib(row[column]) for row in rows] for column in shown}
        if len(shown) == 1:
            return bars(title, names, values[shown[0]], label)
        return grouped(title, names, values, label)

    return draw


def fit(title: str, rows: list[dict]) -> Figure:
    names = []
    for row in rows:
        chosen = row["chosen"].removeprefix("precision as it is")
        where = f"{row['GPU']} {row['options']}".strip()
        names.append(f"{row['problem']}\n{where}\n{chosen.lstrip(',; ')}")
    groups = {
        "the step as it is": [gib(row["plain"]) for row in rows],
        "budget": [gib(row["budget"]) for row in rows],
        "chosen, compiled": [gib(row["compiled"]) for row in rows],
    }
    return grouped(title, names, groups, "GiB")


def layers(title: str, rows: list[dict]) -> Figure:
    rows = [row for row in rows if row["scheduler"] == "default"]
    figure = titled(title, 7, 4)
    axes = figure.add_subplot()
    for place in ("host", "device"):
        points = [(row["layers"], gib(row[place])) for row in rows]
        axes.plot(*zip(*points, strict=True), "o-", label=place)
        for point in points:
            axes.annotate(f"{point[1]:.4g}", point, (0, 6), textcoords="offset points")
    axes.set(xlabel="layers", ylabel="GiB, compiled", yscale="log")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def optim_training(title: str, rows: list[dict]) -> Figure:
    """What each state does to the last loss: a point for each task, with its standard error."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    states = list(dict.fromkeys(row["state"] for row in rows))
    figure = titled(title, 9, 1.5 + 0.45 * len(states))
    axes = figure.add_subplot()
    for number, task in enumerate(tasks):
        own = [row for row in rows if row["task"] == task]
        axes.errorbar(
            [percent(row["last, against fp32"]) for row in own],
            [states.index(row["state"]) + 0.12 * (number - 1.5) for row in own],
            xerr=[percent(row["its standard error"]) for row in own],
            fmt="o",
            markersize=4,
            label=task,
        )
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set(xlabel="last loss, % from float32's (lower is better)")
    axes.set(yticks=range(len(states)), yticklabels=states)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="small")
    return figure


def percent(text: str) -> float:
    return float(text.rstrip("%"))


def largest_batch(title: str, rows: list[dict]) -> Figure:
    names = [row["step"].replace("`", "") for row in rows]
    return bars(title, names, [row["largest batch"] for row in rows], "images")


def resnet50(title: str, rows: list[dict]) -> Figure:
    names = [f"{row['step']}, batch {row['batch']}, {row['target']}" for row in rows]
    values = [gib(row["device"]) for row in rows]
    return bars(title, [name.replace("`", "") for name in names], values, "GiB")


def planner(title: str, rows: list[dict]) -> Figure:
    rows = [row for row in rows if {"whole step", "FLOPs"} <= row.keys()]
    figure = titled(title, 7, 4)
    axes = figure.add_subplot()
    points = sorted((gib(row["whole step"]), float(row["FLOPs"].rstrip("x"))) for row in rows)
    axes.step(*zip(*points, strict=True), "o-", where="post")  # nothing lies between two plans
    axes.set(xlabel="GiB, compiled", ylabel="FLOPs of the plain step")
    axes.grid(alpha=0.3)
    return figure


def best_within(points: list[tuple[float, float]], most: float) -> tuple[list, list]:
    """Bytes and the fewest FLOPs of a point that takes no more, from the smallest to ``most``."""
    sizes, flops = [], []
    for size, count in sorted(points):
        sizes.append(size)
        flops.append(min([count, *flops]))
    return [*sizes, most], [*flops, flops[-1]]


def curves(title: str, rows: list[dict], group, line, name, x: str) -> Figure:
    """FLOPs against bytes, a picture for each ``group(row)``: what ``line(row)`` names is joined by
    steps, the rest are points by ``name(row)``, and the best of those, or the plain step, is a line
    of steps too. One legend is for all: a name has one colour.

    A line is at each number of bytes the fewest FLOPs that are known to fit: so all are compared at
    the same bytes, up to the most of any."""
    groups = list(dict.fromkeys(map(group, rows)))
    across = min(len(groups), 2)
    down = -(-len(groups) // across)
    figure = titled(title, 3 + 3.5 * across, 0.8 + 3.4 * down)
    colors: dict[str, str] = {}
    shown: dict[str, object] = {}

    def color(label: str) -> str:
        return colors.setdefault(label, f"C{len(colors) % 10}")

    for place, one in enumerate(groups):
        axes = figure.add_subplot(down, across, place + 1)
        joined: dict[str, list] = {}
        policies, plain = [], []
        for row in (row for row in rows if group(row) == one):
            point = gib(row[x]), float(row["FLOPs"].rstrip("x"))
            if line(row):
                joined.setdefault(line(row), []).append(point)
                plain += [point] if name(row) == "plain" else []
            else:
                policies.append(point)
                label = name(row).replace("`", "")
                (shown[label],) = axes.plot(*point, "x", color=color(label))
        most = max(size for points in (policies, *joined.values()) for size, _ in points)
        for label, points in joined.items():
            axes.plot(*zip(*points, strict=True), "o", color=color(label))
            (drawn,) = axes.step(*best_within(points, most), where="post", color=color(label))
            shown[label] = drawn
        if policies:
            best = best_within([*policies, *plain], most)
            (drawn,) = axes.step(*best, "--", where="post", color="gray", linewidth=1)
            shown["the best of these, or the plain step, in the same bytes"] = drawn
        axes.set(title=one, xlabel="GiB", ylabel="FLOPs of the plain step")
        axes.grid(alpha=0.3)
    places = {"loc": "outside lower center", "ncols": 2, "fontsize": "small", "frameon": False}
    figure.legend(shown.values(), shown.keys(), **places)
    return figure


def frontiers(title: str, rows: list[dict]) -> Figure:
    def network(row):
        return row["network"]

    def line(row):
        return "jaxmem" if row["step"] == "plain" or row["step"].startswith("jaxmem, ") else ""

    def name(row):
        return row["step"]

    return curves(title, rows, network, line, name, "compiled")


def pytorch(title: str, rows: list[dict]) -> Figure:
    def network(row):
        return row["part"].rpartition(", ")[0]

    def system(row):
        return row["part"].rpartition(", ")[2]

    return curves(title, rows, network, system, system, "peak")


PLOTS = {
    "largest_batch": largest_batch,
    "resnet50": resnet50,
    "planner": planner,
    "frontiers": frontiers,
    "pytorch": pytorch,
    "accumulation": columns("device"),
    "precision": columns("device"),
    "offload": columns("device", "host", name="optimizer"),
    "layers": layers,
    "optim_training": optim_training,
    "shard": columns("parameters and state per GPU", "device temp", name="program"),
    "ops": columns("plain", "plan", "operation", name="what"),
    "fit": fit,
}


def claims() -> str:
    """The first part of benchmarks/README.md, its links leading to the sections of the page."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    text = text.partition("\n")[2].partition("\n## ")[0]
    return re.sub(r"\(results/\w+\.md#(\w+)\)", r"(#\1)", text).strip()


def checksum(name: str, run: dict) -> str:
    """Of what a plot shows."""
    return hashlib.sha256(json.dumps([name, run["rows"]]).encode()).hexdigest()


def draw(name: str, title: str, run: dict, file: str) -> str:
    """Draws a plot for light and for dark pages; returns the Markdown that shows it."""
    shown = []
    for scheme, ink in INK.items():
        path = DOCS / "plots" / f"{file}{scheme}.svg"
        about = checksum(name, run)
        if not path.exists() or about not in path.read_text():
            inked = [
                "text.color",
                "axes.edgecolor",
                "axes.labelcolor",
                "xtick.color",
                "ytick.color",
            ]
            style = dict.fromkeys(inked, ink) | {"svg.fonttype": "none", "svg.hashsalt": name}
            with matplotlib.rc_context(style):
                figure = PLOTS[name](title, run["rows"])
                for axes in figure.axes:
                    axes.patch.set_alpha(0)
                    if axes.get_legend():
                        axes.get_legend().get_frame().set_alpha(0)
                metadata = {"Date": None, "Description": about}
                figure.savefig(path, transparent=True, metadata=metadata)
        only = "dark" if scheme else "light"
        shown.append(f"![{title}](plots/{path.name}#only-{only})")
    return "\n".join(shown)


def section(name: str, results: dict) -> list[str]:
    """The tables of a result, a tab for each version of jax, and its plots."""
    lines = [f"### {results['title']} {{ #{name} }}"]
    runs = same_rows(results["runs"])
    for number, (versions, run) in enumerate(runs):
        body = [
            table(run["rows"]),
            run["note"],
            *(source(results["runs"][jax]) for jax in versions),
        ]
        if name in PLOTS:
            file = f"{name}-jax-{versions[0]}" if number else name
            body.insert(0, draw(name, results["title"], run, file))
        tab = f'=== "jax {" and ".join(versions)}"'
        lines.append(f"{tab}\n\n" + textwrap.indent("\n\n".join(filter(None, body)), "    "))
    return lines


def main():
    (DOCS / "plots").mkdir(exist_ok=True)
    about = (
        "One row for each claim first. Below are all results, with a tab for each version of JAX."
    )
    lines = ["# Measured", about, claims()]
    for group in GROUPS:
        if found := results_of(group):
            about = import_module(f"benchmarks.{group}").__doc__.partition("\n\n")[0].strip()
            heading, _, rest = about.rstrip(".").partition(": ")
            lines += [f"## {heading}", f"{rest[:1].upper()}{rest[1:]}"]
            lines += [line for name, one in found.items() for line in section(name, one)]
    (DOCS / "results.md").write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
