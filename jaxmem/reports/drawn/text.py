"""Widths of what is printed in a terminal."""

import shutil
from collections.abc import Iterable


def columns() -> int:
    """Columns of a report: those of the terminal, within 80 to 100; 100 where there is none."""
    return min(100, max(80, shutil.get_terminal_size((100, 24)).columns))


def side_by_side(left: list[str], right: list[str]) -> Iterable[str]:
    """Two tables beside each other."""
    half = columns() // 2
    for number in range(max(len(left), len(right))):
        first = left[number] if number < len(left) else ""
        second = right[number] if number < len(right) else ""
        yield f"{truncate(first, half - 2):{half}}{truncate(second, half)}".rstrip()


def milliseconds(seconds: float) -> str:
    """Seconds as they are printed."""
    return f"{1e3 * seconds:.4g} ms"


def truncate(text: str, width: int) -> str:
    """The text in at most that many columns; its end is what tells most."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
