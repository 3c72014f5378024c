"""Writes the rows of a benchmark to benchmarks/results as JSON and Markdown, and prints them."""

import datetime
import json
import pathlib
import platform
import sys
from importlib.metadata import version

RESULTS = pathlib.Path(__file__).with_name("results")


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
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    text = [f"# {title}", *lines, *([note] if note else [])]
    text.append(f"`{about['command']}`, {about['date']}, {versions}")
    markdown = "\n\n".join([text[0], "\n".join(lines), *text[1 + len(lines) :]]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    stem = f"{name}-jax-{version('jax')}"
    (RESULTS / f"{stem}.md").write_text(markdown)
    (RESULTS / f"{stem}.json").write_text(
        json.dumps({"title": title, **about, "rows": rows, "note": note}, indent=1) + "\n"
    )
    print(markdown)
