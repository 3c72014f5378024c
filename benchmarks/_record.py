"""Writes the rows of a benchmark to benchmarks/results as JSON and Markdown, and prints them."""

import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version

RESULTS = pathlib.Path(__file__).with_name("results")
UNCHECKED = "Predicted times are unchecked: no GPU has run these programs yet."


def _stem() -> pathlib.Path:
    """Where the results of the running script go, less the suffix."""
    return RESULTS / f"{pathlib.Path(sys.argv[0]).stem}-jax-{version('jax')}"


def merge(column: str, order: list[str], rows: list[dict]) -> list[dict]:
    """Rows beside those of earlier runs: they replace those of the same ``column``, and all are in
    this order of it. For scripts whose parts take long."""
    path = pathlib.Path(f"{_stem()}.json")
    new = {row[column] for row in rows}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if row[column] in set(order) - new]
    return sorted([*kept, *rows], key=lambda row: order.index(row[column]))


def record_parts(
    title: str, column: str, names: list[str], rows_of: Callable[[str], Iterable[dict]], note: str
) -> None:
    """Records the parts that the command line names, or all, one after the other: each part's rows
    have its name in this column, and the others' stay as they are."""
    for name in sys.argv[1:] or names:
        record(title, merge(column, names, list(rows_of(name))), note)


def record(title: str, rows: list[dict], note: str = "") -> None:
    """Rows of text and numbers, under the name of the running script."""
    name = pathlib.Path(sys.argv[0]).stem
    packages = ("jaxmem", "jax", "flax", "optax")
    about = {
        "command": f"python benchmarks/{name}.py",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in packages},
    }
    heads = list(rows[0])
    if any(head.startswith("predicted") for head in heads):
        note = f"{note}\n\n{UNCHECKED}".strip()
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    text = [f"# {title}", *lines, *([note] if note else [])]
    text.append(f"`{about['command']}`, {about['date']}, {versions}")
    markdown = "\n\n".join([text[0], "\n".join(lines), *text[1 + len(lines) :]]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    pathlib.Path(f"{_stem()}.md").write_text(markdown)
    pathlib.Path(f"{_stem()}.json").write_text(
        json.dumps({"title": title, **about, "rows": rows, "note": note}, indent=1) + "\n"
    )
    print(markdown)
