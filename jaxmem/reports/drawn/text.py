"""Tables as text for a terminal."""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmem.ground.bytes import format_bytes

_ROWS = 6  # of a table in a terminal; the rest is one row


def columns() -> int:
    """Columns of a report: those of the terminal, within 80 to 100; 100 where there is none."""
    return min(100, max(80, shutil.get_terminal_size((100, 24)).columns))


def breakdown_lines(
    title: str, rows: Mapping[str, int], whole: int, limit: int = _ROWS
) -> list[str]:
    """A breakdown as a table: its largest rows, the rest as one row, and shares of the whole."""
    shown = list(rows.items())
    if len(shown) > limit + 1:
        rest = sum(size for _, size in shown[limit:])
        shown = [*shown[:limit], (f"({len(shown) - limit} more)", rest)]
    lines = [title]
    for name, size in shown:
        share = f"{size / whole:.0%}" if whole else ""
        lines.append(f"{format_bytes(size):>14} {share:>4}  {fit(name, columns() - 21)}")
    return lines


def side_by_side(left: list[str], right: list[str]) -> Iterable[str]:
    """Two tables beside each other."""
    half = columns() // 2
    for number in range(max(len(left), len(right))):
        first = left[number] if number < len(left) else ""
        second = right[number] if number < len(right) else ""
        yield f"{fit(first, half - 2):{half}}{fit(second, half)}".rstrip()


def buffer_lines(buffers: Iterable[Any], limit: int = _ROWS) -> list[str]:
    """The largest buffers as a table."""
    lines = ["largest buffers at the peak"]
    for number, buffer in enumerate(buffers):
        if number == limit:
            break
        what = f"{buffer.dtype}{list(buffer.shape)}".replace(" ", "")
        where = " · ".join([buffer.operation, buffer.module, buffer.source])
        start = f"{format_bytes(buffer.bytes):>14}  {fit(what, 24):24} {buffer.phase:9} "
        lines.append(start + fit(where, columns() - len(start)))
    return lines


def fit(text: str, width: int) -> str:
    """The text in at most that many columns; its end is what tells most."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def rolled_up(rows: Mapping[str, int], depth: int = 2) -> dict[str, int]:
    """Module paths cut to their first parts, largest first; rows in parentheses stay last."""
    total: Counter[str] = Counter()
    for name, size in rows.items():
        total[name if name.startswith("(") else "/".join(name.split("/")[:depth])] += size
    return dict(sorted(total.items(), key=lambda row: (row[0].startswith("("), -row[1])))
