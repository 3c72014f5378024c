"""The results of the benchmarks: a JSON file for each group, with what each of its scripts found.

``{NAME: {"title": ..., "runs": {VERSION: {"command", "dates", "versions", "rows", "note"}}}}``: by
the name of the script and the version of jax, the oldest first. Rows are text and numbers by the
names of their columns. Scripts that take long are run in parts: each part has its own date, and of
a script without parts "dates" has one, under "". Beside each file is the same as Markdown.
"""

import datetime
import json
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNCHECKED = "Predicted times are unchecked: no GPU has run these programs yet."
PACKAGES = ("jaxmem", "jax", "flax", "optax")


def record(title: str, rows: list[dict], note: str = "") -> None:
    """Keeps the rows of the running script, in place of those that it had with this jax."""
    _keep(title, rows, note, {"": _today()})


def record_parts(
    title: str,
    column: str,
    names: list[str],
    rows_of: Callable[[str], Iterable[dict]],
    note: str | Callable[[list[dict]], str],
) -> None:
    """Records the parts that the command line names, or all, one after the other: each part's rows
    have its name in this column, and the others' stay as they are, with their dates. The note may
    be a function of all rows. A part without rows is left as it is."""
    wanted = sys.argv[1:] or names
    if unknown := [name for name in wanted if name not in names]:
        sys.exit(f"{unknown[0]!r} is not a {column}; there are {', '.join(names)}")
    for name in wanted:
        new = list(rows_of(name))
        if not new:
            continue
        run = _runs().get(version("jax"), {"rows": [], "dates": {}})
        rows = [row for row in run["rows"] if row[column] in names and row[column] != name] + new
        dates = {part: run["dates"].get(part) for part in names} | {name: _today()}
        _keep(
            title,
            sorted(rows, key=lambda row: names.index(row[column])),
            note(rows) if callable(note) else note,
            {part: date for part, date in dates.items() if date},
        )


def results_of(group: str) -> dict[str, dict]:
    """What the scripts of a group found, by their names."""
    path = RESULTS / f"{group}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def results_by_name() -> dict[str, dict]:
    """What each script found."""
    groups = sorted(path.stem for path in RESULTS.glob("*.json"))
    return {name: found for group in groups for name, found in results_of(group).items()}


def write(group: str, results: dict[str, dict]) -> None:
    """The files of a group."""
    results = {name: results[name] for name in sorted(results)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{group}.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / f"{group}.md").write_text(page(group, results))


def page(group: str, results: dict[str, dict]) -> str:
    """The results of a group as Markdown, each under an anchor with the name of its script."""
    contents = "\n".join(f"* [{found['title']}](#{name})" for name, found in results.items())
    parts = [f"# Results: {group}", contents]
    parts += [f'<a id="{name}"></a>\n\n{markdown(found)}' for name, found in results.items()]
    return "\n\n".join(parts) + "\n"


def markdown(results: dict) -> str:
    """A table for each version of jax, or one where both have the same rows."""
    parts = [f"## {results['title']}"]
    for versions, run in same_rows(results["runs"]):
        parts += [f"### jax {' and '.join(versions)}", table(run["rows"])]
        parts += [run["note"]] if run["note"] else []
        parts += [source(results["runs"][jax]) for jax in versions]
    return "\n\n".join(parts)


def same_rows(runs: dict[str, dict]) -> list[tuple[list[str], dict]]:
    """Runs with the versions that agree with them, in rows and note."""
    found: list[tuple[list[str], dict]] = []
    for jax, run in runs.items():
        for versions, other in found:
            if (other["rows"], other["note"]) == (run["rows"], run["note"]):
                versions.append(jax)
                break
        else:
            found.append(([jax], run))
    return found


def table(rows: list[dict]) -> str:
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def source(run: dict) -> str:
    """What made a run, when, and with which packages."""
    versions = ", ".join(f"{package} {number}" for package, number in run["versions"].items())
    return f"`{run['command']}`, {_when(run['dates'])}, {versions}"


def _when(dates: dict[str, str]) -> str:
    """The date of most parts, and those of the others with their names."""
    parts: dict[str, list[str]] = {}
    for part, date in sorted(dates.items(), key=lambda one: one[1], reverse=True):
        parts.setdefault(date, []).append(part)
    most = max(parts, key=lambda date: len(parts[date]))
    others = [f"{date}: {', '.join(names)}" for date, names in parts.items() if date != most]
    return most + (f" ({'; '.join(others)})" if others else "")


def _keep(title: str, rows: list[dict], note: str, dates: dict[str, str]) -> None:
    """Writes the run of the running script with this jax."""
    if any(head.startswith("predicted") for head in rows[0]):
        note = f"{note.strip()}\n\n{UNCHECKED}".strip()
    module = pathlib.Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    run = {
        "command": f"python -m {'.'.join(module.parts)}",
        "dates": dates,
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        "rows": rows,
        "note": note.strip(),
    }
    runs = _runs() | {version("jax"): run}
    group, name = _group_and_name()
    results = {"title": title, "runs": {jax: runs[jax] for jax in sorted(runs, key=_numbers)}}
    write(group, results_of(group) | {name: results})
    print(table(rows))


def _today() -> str:
    return datetime.date.today().isoformat()


def _group_and_name() -> tuple[str, str]:
    """Of the running script."""
    path = pathlib.Path(sys.argv[0]).resolve()
    group = path.parent.name
    return "gpu" if group == "benchmarks" else group, path.stem


def _runs() -> dict[str, dict]:
    """Those that the running script has already."""
    group, name = _group_and_name()
    return results_of(group).get(name, {"runs": {}})["runs"]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
