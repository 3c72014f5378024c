"""Two reports side by side: what grew, what shrank, and a verdict."""

import dataclasses
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmem.ground.bytes import device_budget, format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.plain_data import describe, with_values
from jaxmem.reports.report import MemoryReport

_TABLES = ("by_phase", "by_kind", "by_module", "by_source", "by_value")
_TITLES = {
    "by_phase": "phase",
    "by_kind": "kind",
    "by_module": "module",
    "by_source": "line",
    "by_value": "value",
}
_ROWS = 8  # of a table in a terminal; the rest is one row


@dataclasses.dataclass(frozen=True, repr=False)
class Diff(Printed):
    """What changed from one report to another; `diff` makes it.

    ``before`` and ``after`` are the reports as plain data. ``changes["by_module"]`` and its sisters
    have the bytes by which each row grew (negative: shrank), largest change first; every table adds
    up to the change of the device bytes.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    changes: dict[str, dict[str, int]]

    @property
    def device(self) -> int:
        """Device bytes that the second report has more than the first."""
        return self.after["device"] - self.before["device"]

    @property
    def verdict(self) -> str:
        """One sentence: what changed at the peak, and where it is now."""
        change = self.device
        now = f"{format_bytes(self.after['device'])} of device memory"
        if "peak" not in self.before or "peak" not in self.after:
            return f"The step takes {_words(change)}: {now}."
        first, at = (report["peak_operation"] for report in self._both())
        place = f"in the {at['phase']} phase, at {at['module']} ({at['source']})"
        moved = any(first[what] != at[what] for what in ("phase", "module", "source"))
        where = f"the peak is {'now' if moved else 'still'} {place}"
        if change == 0:
            return f"The step takes as much as before, {now}; {where}."
        kinds = self.changes["by_kind"]
        # What was done to the step is not told: a shorter dtype may bring recompute, for example.
        most = max(kinds, key=lambda kind: kinds[kind] * change)
        came = "came off" if change < 0 else "were put onto"
        moved_bytes = f"{format_bytes(abs(change))} {came} the peak, the largest change in {most}"
        return f"{moved_bytes}; {where}. The step takes {now}."

    def _both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.before, self.after

    def _on_chip(self) -> dict[str, list[int]]:
        """Bytes of each memory of the chip itself, before and after."""
        sizes = [report.get("on_chip", {}) for report in self._both()]
        return {name: [one.get(name, 0) for one in sizes] for name in sizes[0] | sizes[1]}

    def _allowed(self, budget: int | str | None) -> int | None:
        if budget is None:
            return None
        return device_budget(budget, self.after.get("usable"), self.after["target"])

    def to_json(self) -> str:
        """The changes and the verdict as JSON text."""
        totals = {
            name: [self.before.get(name), self.after.get(name)]
            for name in ("device", "host", "peak", "fragmentation")
        }
        more = {"on_chip": self._on_chip(), "changes": self.changes, "verdict": self.verdict}
        return json.dumps(totals | more, indent=1)

    def to_html(self, path: str | os.PathLike, *, budget: int | str | None = None) -> None:
        """Writes one self-contained page: both timelines on one scale, and sortable tables of what
        grew and what shrank.

        Args:
            path: of the file.
            budget: bytes or text: a line in the timelines, and what the page says of the second
                step; None: what is usable on its target.

        Raises:
            BudgetError: the budget does not parse.
            JaxmemError: one of the reports has no timeline.
        """
        from jaxmem.reports.drawn.page import diff_page

        more = {"changes": self.changes, "what": self.verdict}
        text = diff_page(*self._both(), more, self._allowed(budget))
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def plot(
        self, path: str | os.PathLike, *, budget: int | str | None = None, dark: bool = False
    ) -> None:
        """Draws both timelines below each other on one scale, as a ``.png``, ``.svg`` or ``.pdf``
        file. Needs matplotlib (``pip install 'jaxmem[viz]'``).

        Args:
            path: of the file.
            budget: bytes or text, drawn as a line.
            dark: for a dark page.

        Raises:
            BudgetError: the budget does not parse.
            JaxmemError: one of the reports has no timeline, matplotlib is missing, or it does not
                know the suffix.
        """
        from jaxmem.reports.drawn.plot import draw

        both = {"before: ": self.before, "after: ": self.after}
        draw(both, path, self._allowed(budget), dark)

    def _parts(self) -> Iterable[Part]:
        yield self.verdict
        yield ""
        for what in ("target", "jax"):
            first, second = (report.get(what) for report in self._both())
            if first != second:
                yield f"before: {what} {first}"
                yield f"after:  {what} {second}"
        totals = ("device", "peak", "fragmentation", "host")
        rows = [
            (name, *(report.get(name, 0) for report in self._both()))
            for name in totals
            if name in self.before and name in self.after
        ]
        rows += [(f"on the chip: {name}", *sizes) for name, sizes in self._on_chip().items()]
        yield _changes("", rows)
        for table, changes in self.changes.items():
            sizes = [
                (name, *(report[table].get(name, 0) for report in self._both()))
                for name, change in changes.items()
                if change
            ]
            if len(sizes) > _ROWS + 1:
                rest = [sum(row[at] for row in sizes[_ROWS:]) for at in (1, 2)]
                sizes = [*sizes[:_ROWS], (f"({len(sizes) - _ROWS} more)", *rest)]
            if sizes:
                yield ""
                yield _changes(f"by {_TITLES[table]}", sizes)


def _changes(title: str, rows: Iterable[tuple[str, int, int]]) -> Table:
    """Bytes before and after, and by how many they grew; nothing of 0 bytes."""
    cells = [
        (
            format_bytes(one).rjust(12),
            format_bytes(two).rjust(12),
            _signed(two - one).rjust(13),
            name,
        )
        for name, one, two in rows
        if one or two
    ]
    return Table(("before", "after", "change", title), cells, left=(3,))


def diff(
    before: MemoryReport | Mapping[str, Any] | str, after: MemoryReport | Mapping[str, Any] | str
) -> Diff:
    """Compares two reports, of two steps, two targets or two versions.

    Args:
        before, after: reports, or what `MemoryReport.to_json` wrote of them.

    Returns:
        A `Diff`, which prints a verdict, and what grew and what shrank.

    Raises:
        JaxmemError: a text is not a report's.

    >>> import jax.numpy as jnp, jaxmem
    >>> small, large = (jaxmem.memory(jnp.sin, jnp.ones(n), target="local") for n in (8, 1024))
    >>> jaxmem.diff(small, large).device == large.device - small.device
    True
    """
    first, second = (with_values(read_report(one)) for one in (before, after))
    changes = {}
    for table in _TABLES:
        if table in first and table in second:
            rows = Counter(second[table])
            rows.subtract(first[table])
            ordered = sorted(rows.items(), key=lambda row: -abs(row[1]))
            changes[table] = dict(ordered)
    return Diff(first, second, changes)


def read_report(report: MemoryReport | Mapping[str, Any] | str) -> dict[str, Any]:
    """A report as plain data, also of what `MemoryReport.to_json` wrote."""
    if isinstance(report, MemoryReport):
        return describe(report)
    if isinstance(report, str):
        try:
            report = json.loads(report)
        except ValueError:
            report = {}
    if not isinstance(report, Mapping) or report.get("jaxmem") != 1 or "device" not in report:
        raise JaxmemError(
            "jaxmem.diff compares two reports: jaxmem.MemoryReport, or what report.to_json() (or "
            "`jaxmem estimate --json`) wrote. This is neither."
        )
    return dict(report)


def _signed(count: int) -> str:
    return ("+" if count > 0 else "") + format_bytes(count)


def _words(change: int) -> str:
    return f"{format_bytes(abs(change))} {'less' if change < 0 else 'more'}"
