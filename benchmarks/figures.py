"""Fills the figures of the README and the documentation in from benchmarks/results.

    python -m benchmarks.figures            # `make figures`
    python -m benchmarks.figures --check    # changes nothing; lists what differs, and ends with 1

A figure is followed by a comment that says where it is from, and that no page shows:

    takes 1.47 GiB<!--=offload[optimizer=jaxmem.offload(optax.adam)].device--> of an H200

That is ``NAME[COLUMN=VALUE & COLUMN=VALUE].COLUMN`` of what the script NAME found: of the one row
with these values, from the run with the oldest jax (``NAME@VERSION[...]``: with another). The
beginning of a COLUMN's name is enough if no other begins so. With ``largest`` or ``least`` before
NAME it is the largest or least absolute value of several rows, with ``count`` how many different
values there are; ``count NAME[COLUMN=VALUE]``, without a column, is how many rows. The figure as it
stands tells how it is written: its decimals, its unit (GiB as MiB, 1.034x as 3.4 %), and whether
with a sign. A whole table has the columns that are named, some under another head:

    <!--=table offload[host=2.00 GiB]: optimizer; device temp as temporary-->
    <!--/table-->
"""

import argparse
import functools
import pathlib
import re
import sys
from decimal import ROUND_HALF_UP, Decimal

from benchmarks._record import ROOT, results_by_name, table

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS = (*BYTES, "%", "per cent", "x", "times", "billion", "ms", "s", "seconds")
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
MARKED = re.compile(
    r"<!--=table (?P<table>.*?)-->\n.*?<!--/table-->"
    rf"|(?:(?<![\w.,])(?P<number>{NUMBER})(?: ?(?P<unit>{'|'.join(UNITS)}))?)?"
    r"<!--=(?P<figure>.*?)-->",
    re.DOTALL,
)
CELL = re.compile(rf"(?P<number>{NUMBER}) ?(?P<unit>[A-Za-z]+|%)?")
SOURCE = re.compile(
    r"((?P<of>largest|least|count) )?(?P<name>\w+)(@(?P<jax>[\d.]+))?(\[(?P<where>.*)\])?"
)
_NO_MARK = "this is not NAME[COLUMN=VALUE & ...].COLUMN"


class MarkError(Exception):
    """What is wrong with a comment."""


def pages() -> list[pathlib.Path]:
    """The pages whose figures are filled in."""
    docs = (page for page in (ROOT / "docs").rglob("*.md") if page.name != "results.md")
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(docs)]


def fill(text: str) -> tuple[str, list[str]]:
    """The text with the figures as they are in the results, and what was not so, with its line."""
    found: list[str] = []

    def replace(mark: re.Match) -> str:
        source = mark["table"] or mark["figure"]
        try:
            new = _table(mark) if mark["table"] else _figure(mark)
            wrong = "" if new == mark[0] else f"{_figures(mark[0])} should be {_figures(new)}"
        except MarkError as error:
            new, wrong = mark[0], str(error)
        if wrong:
            found.append(f"line {text.count(chr(10), 0, mark.start()) + 1}: {wrong} ({source})")
        return new

    return MARKED.sub(replace, text), found


def _figures(text: str) -> str:
    """Without comments, on one line."""
    return " ".join(re.sub(r"<!--.*?-->", "", text).split())


def _figure(mark: re.Match) -> str:
    """A figure as the text has it, of the value that its source has now."""
    if mark["number"] is None:
        raise MarkError("no figure stands right before its comment")
    source, found, column = mark["figure"].rpartition("].")
    rows, of = _rows(f"{source}]" if found else column)
    if not (found or of == "count"):
        raise MarkError(_NO_MARK)
    if of == "count":
        counted = {row[_column(rows, column)] for row in rows} if found else rows
        return f"{len(counted)}{mark[0].removeprefix(mark['number'])}"
    cells = [_cell(row, column, mark["unit"]) for row in rows]
    if of is None and len(cells) != 1:
        raise MarkError(f"{len(cells)} rows are so, not one")
    value = {None: lambda cells, key: cells[0], "largest": max, "least": min}[of](cells, key=abs)
    digits = len(mark["number"].partition(".")[2])
    value = value.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    signed = mark["number"][0] in "+-"
    grouped = "," if "," in mark["number"] else ""
    number = f"{value if signed else abs(value):{'+' if signed else ''}{grouped}f}"
    return number + mark[0].removeprefix(mark["number"])


def _table(mark: re.Match) -> str:
    """Columns of a result as a table."""
    source, _, columns = mark["table"].partition(": ")
    rows, _ = _rows(source)
    heads = [column.partition(" as ")[::2] for column in columns.split("; ")]
    heads = [(_column(rows, column), head) for column, head in heads]
    shown = [{head or column: row[column] for column, head in heads} for row in rows]
    return f"<!--=table {mark['table']}-->\n\n{table(shown)}\n\n<!--/table-->"


def _rows(source: str) -> tuple[list[dict], str | None]:
    """The rows that a source names, and whether the largest or least of them is asked for."""
    found = SOURCE.fullmatch(source)
    if not found:
        raise MarkError(_NO_MARK)
    runs = _runs(found["name"])
    if found["jax"] and found["jax"] not in runs:
        raise MarkError(f"there is no run with jax {found['jax']}, but with {', '.join(runs)}")
    rows = runs[found["jax"] or next(iter(runs))]["rows"]
    for condition in filter(None, (found["where"] or "").split(" & ")):
        column, _, value = condition.partition("=")
        column = _column(rows, column)
        rows = [row for row in rows if _plain(row[column]) == _plain(value)]
        if not rows:
            raise MarkError(f"no row has {condition}")
    return rows, found["of"]


@functools.cache
def _runs(name: str) -> dict[str, dict]:
    found = results_by_name()
    if name not in found:
        raise MarkError(f"benchmarks/results has nothing of a script {name!r}")
    return found[name]["runs"]


def _column(rows: list[dict], name: str) -> str:
    """The column of this name, or the only one whose name begins so."""
    found = [name] if name in rows[0] else [head for head in rows[0] if head.startswith(name)]
    if len(found) != 1:
        raise MarkError(f"there is no column {name!r}, but {', '.join(map(repr, rows[0]))}")
    return found[0]


def _plain(value: str | int | float) -> str:
    return str(value).replace("`", "")


def _cell(row: dict, column: str, unit: str | None) -> Decimal:
    """The first number of a cell, in a unit."""
    cell = str(row[_column([row], column)])
    found = CELL.search(cell)
    if not found:
        raise MarkError(f"{cell!r} is no number")
    number, own = Decimal(found["number"].replace(",", "")), found["unit"] or ""
    if unit in BYTES and own in BYTES:
        return number * BYTES[own] / BYTES[unit]
    if own == "x" and unit in ("%", "per cent"):
        return 100 * (number - 1)
    same = {"times": "x", "per cent": "%", "seconds": "s", None: own}
    if own not in ("", same.get(unit, unit)):
        raise MarkError(f"{cell!r} cannot be told in {unit}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, end with 1")
    check = parser.parse_args().check
    wrong = []
    for page in pages():
        text, found = fill(page.read_text())
        if not check:
            page.write_text(text)
            found = fill(text)[1]  # what could not be filled in
        wrong += [f"{page.relative_to(ROOT)}, {one}" for one in found]
    print("\n".join(wrong or ["All figures are those of benchmarks/results."]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
