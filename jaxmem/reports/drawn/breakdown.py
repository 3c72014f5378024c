"""Bytes by name, such as `MemoryReport.by_phase`."""

from typing import Any

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.drawn.tables import Table, as_html, as_text

_ROWS = 6  # of a table in a report; the rest is one row


class Breakdown(dict[str, Any]):
    """Bytes by name: a dict that prints as a table with units and shares of the whole."""

    def unit(self, size: Any) -> str:
        """One of its values with its unit."""
        return format_bytes(size)

    def table(self, title: str = "", most: int = _ROWS) -> Table:
        """The largest rows, the rest as one row, nothing of 0, and shares of the whole."""
        whole = sum(self.values()) or 1
        shown = [(name, size) for name, size in self.items() if size]
        if len(shown) > most + 1:
            rest = sum(size for _, size in shown[most:])
            shown = [*shown[:most], (f"({len(shown) - most} more)", rest)]
        cells = [(self.unit(size), _share(size / whole), name) for name, size in shown]
        return Table(("", "", ""), cells, title, (2,))

    def __str__(self) -> str:
        return as_text([self.table(most=len(self))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html([self.table(most=len(self))])


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.005 else "<1%"
