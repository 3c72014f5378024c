"""Bytes by name, such as `MemoryReport.by_phase`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.drawn.tables import Table, as_html, as_text

_ROWS = 6  # of a table in a report; the rest is one row


class Breakdown(dict[str, int]):
    """Bytes by name: a dict that prints as a table with units and shares of the whole."""

    def __str__(self) -> str:
        return as_text([breakdown_table("", self, sum(self.values()), len(self))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html([breakdown_table("", self, sum(self.values()), len(self))])


def breakdown_table(
    title: str,
    rows: Mapping[str, float],
    whole: float,
    most: int = _ROWS,
    unit: Callable[[Any], str] = format_bytes,
) -> Table:
    """The largest rows, the rest as one row, nothing of 0, and shares of the whole."""
    shown = [(name, size) for name, size in rows.items() if size]
    if len(shown) > most + 1:
        rest = sum(size for _, size in shown[most:])
        shown = [*shown[:most], (f"({len(shown) - most} more)", rest)]
    cells = [(unit(size), _share(size / whole), name) for name, size in shown]
    return Table(("", "", ""), cells, title, (2,))


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.005 else "<1%"
