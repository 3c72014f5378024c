"""The documentation's page of results: every table of benchmarks/results, and plots of some.

``python benchmarks/_page.py`` writes docs/results.md and docs/plots, which are not committed. A
guide shows ``plots/NAME.svg``: that of ``benchmarks/NAME.py`` with the oldest version of jax.
"""

import json
import pathlib
import re
import shutil

from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
TIMELINE = ROOT / "examples" / "resnet50" / "report.png"
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

    def draw(results: dict) -> Figure:
        rows = [row for row in results["rows"] if all(row[column] for column in shown)]
        names = [row[name].replace("`", "") for row in rows]
        values = {column: [gib(row[column]) for row in rows] for column in shown}
        if len(shown) == 1:
            return bars(results["title"], names, values[shown[0]], label)
        return grouped(results["title"], names, values, label)

    return draw


def fit(results: dict) -> Figure:
    rows = results["rows"]
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
    return grouped(results["title"], names, groups, "GiB")


def layers(results: dict) -> Figure:
    rows = [row for row in results["rows"] if row["scheduler"] == "default"]
    figure = titled(results["title"], 7, 4)
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


def optim_training(results: dict) -> Figure:
    """What each state does to the last loss: a point for each task, with its standard error."""
    rows = results["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    states = list(dict.fromkeys(row["state"] for row in rows))
    figure = titled(results["title"], 9, 1.5 + 0.45 * len(states))
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


def largest_batch(results: dict) -> Figure:
    rows = results["rows"]
    names = [row["step"].replace("`", "") for row in rows]
    return bars(results["title"], names, [row["largest batch"] for row in rows], "images")


def resnet50(results: dict) -> Figure:
    rows = results["rows"]
    names = [f"{row['step']}, batch {row['batch']}, {row['target']}" for row in rows]
    values = [gib(row["device"]) for row in rows]
    return bars(results["title"], [name.replace("`", "") for name in names], values, "GiB")


def planner(results: dict) -> Figure:
    rows = [row for row in results["rows"] if {"whole step", "FLOPs"} <= row.keys()]
    figure = titled(results["title"], 7, 4)
    axes = figure.add_subplot()
    axes.plot(
        [gib(row["whole step"]) for row in rows],
        [float(row["FLOPs"].rstrip("x")) for row in rows],
        "o-",
    )
    axes.set(xlabel="GiB, compiled", ylabel="FLOPs of the plain step")
    axes.grid(alpha=0.3)
    return figure


def curves(results: dict, group, line, name, x: str) -> Figure:
    """FLOPs against bytes, a picture for each ``group(row)``: what ``line(row)`` names is joined,
    the rest are points by ``name(row)``."""
    groups = list(dict.fromkeys(map(group, results["rows"])))
    across = min(len(groups), 2)
    rows = -(-len(groups) // across)
    figure = titled(results["title"], 3 + 3.5 * across, 3.6 * rows)
    for place, one in enumerate(groups):
        axes = figure.add_subplot(rows, across, place + 1)
        joined: dict[str, list] = {}
        for row in (row for row in results["rows"] if group(row) == one):
            point = gib(row[x]), float(row["FLOPs"].rstrip("x"))
            if line(row):
                joined.setdefault(line(row), []).append(point)
            else:
                axes.plot(*point, "x", label=name(row).replace("`", ""))
        for label, points in joined.items():
            axes.plot(*zip(*points, strict=True), "o-", label=label)
        axes.set(title=one, xlabel="GiB", ylabel="FLOPs of the plain step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return figure


def frontiers(results: dict) -> Figure:
    def line(row):
        return "jaxmem" if row["step"] == "plain" or row["step"].startswith("jaxmem, ") else ""

    return curves(results, lambda row: row["network"], line, lambda row: row["step"], "compiled")


def pytorch(results: dict) -> Figure:
    def network(row):
        return row["part"].rpartition(", ")[0]

    def system(row):
        return row["part"].rpartition(", ")[2]

    return curves(results, network, system, system, "peak")


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


def main():
    (DOCS / "plots").mkdir(exist_ok=True)
    shutil.copy(TIMELINE, DOCS / "plots" / "report.png")
    drawn = set()
    lines = [
        "# Measured",
        "Every table is the committed output of the script under it, by `make bench`. Bytes are "
        "compiled for GPUs that were not in the machine; times are of its two CPU cores.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        name, _, version = path.stem.partition("-jax-")
        results = json.loads(path.read_text())
        text = path.with_suffix(".md").read_text()
        title, _, body = text.partition("\n")
        lines.append(f"## {title.lstrip('# ')} (jax {version})")
        if name in PLOTS and results["rows"]:
            picture = f"plots/{path.stem}.svg"
            PLOTS[name](results).savefig(DOCS / picture)
            if name not in drawn:
                shutil.copy(DOCS / picture, DOCS / "plots" / f"{name}.svg")
            drawn.add(name)
            lines.append(f"![{results['title']}]({picture})")
        lines.append(re.sub(r"(?m)^#+ ", "### ", body).strip())
    (DOCS / "results.md").write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
