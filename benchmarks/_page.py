"""The documentation's page of results: every table of benchmarks/results, and plots of some.

``python benchmarks/_page.py`` writes docs/results.md and docs/plots, which are not committed.
"""

import json
import pathlib
import re

from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def gib(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit] / 2**30


def bars(title: str, names: list[str], values: list[float], label: str) -> Figure:
    figure = Figure(figsize=(8, 0.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh(names[::-1], values[::-1], color="tab:blue")
    axes.bar_label(drawn, fmt="%.4g", padding=3)
    axes.set(xlabel=label, title=title)
    axes.margins(x=0.12)
    return figure


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
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [gib(row["whole step"]) for row in rows],
        [float(row["FLOPs"].rstrip("x")) for row in rows],
        "o-",
    )
    axes.set(title=results["title"], xlabel="GiB, compiled", ylabel="FLOPs of the plain step")
    axes.grid(alpha=0.3)
    return figure


def curves(results: dict, group, line, name, x: str) -> Figure:
    """FLOPs against bytes, a picture for each ``group(row)``: what ``line(row)`` names is joined,
    the rest are points by ``name(row)``."""
    groups = list(dict.fromkeys(map(group, results["rows"])))
    rows = -(-len(groups) // 2)
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    figure.suptitle(results["title"])
    for place, one in enumerate(groups):
        axes = figure.add_subplot(rows, 2, place + 1)
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
}


def main():
    (DOCS / "plots").mkdir(exist_ok=True)
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
            lines.append(f"![{results['title']}]({picture})")
        lines.append(re.sub(r"(?m)^#+ ", "### ", body).strip())
    (DOCS / "results.md").write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
