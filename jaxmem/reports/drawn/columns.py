"""Tables laid out in a terminal's columns, by `rich`."""

from collections.abc import Iterator, Sequence

import rich.console
import rich.measure
import rich.padding
import rich.table
import rich.text

from jaxmem.reports.drawn.text import truncate

_NARROW = 26  # columns; where a sentence has fewer it goes below its row. Chosen: four words

_WIDE = 2**10  # columns: more than any row has

Rows = Sequence[Sequence[str]]


def lines_of(
    heads: Sequence[str], rows: Rows, left: Sequence[int], wraps: bool, width: int
) -> list[str]:
    """Rows under headings in at most so many columns, a line each; the arguments are those of
    `jaxmem.reports.drawn.tables.Table`."""
    if wraps:
        first = _table(heads[:-1], [row[:-1] for row in rows], left, False)
        wide = _console(_WIDE)
        least = rich.measure.Measurement.get(wide, wide.options, first)
        room = width - least.maximum - 2
        if room < min(_NARROW, max((len(row[-1]) for row in rows), default=0)):
            found = _lines(first, max(least.maximum, width))  # its numbers are whole
            told = found[: len(found) - len(rows)]
            for line, row in zip(found[len(told) :], rows, strict=True):
                below = rich.padding.Padding(rich.text.Text(row[-1]), (0, 0, 0, 4))
                told += [line, *(_lines(below, width) if row[-1] else ())]
            return told
    return _lines(_table(heads, rows, left, wraps), width)


def _console(width: int) -> rich.console.Console:
    return rich.console.Console(width=width, highlight=False, color_system=None)


def _lines(shown: rich.console.RenderableType, width: int) -> list[str]:
    console = _console(width)
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def _table(heads: Sequence[str], rows: Rows, left: Sequence[int], wraps: bool) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False, show_header=any(heads))
    for at, head in enumerate(heads):
        table.add_column(
            rich.text.Text(head),
            justify="left" if at in left else "right",
            no_wrap=at < len(heads) - 1,  # the last one gives way
        )
    for *cells, end in rows:
        table.add_row(*map(rich.text.Text, cells), rich.text.Text(end) if wraps else _KeepEnd(end))
    return table


class _KeepEnd:
    """A cell of which the end is shown where there is no room for all: it tells most."""

    def __init__(self, text: str):
        self.text = text

    def __rich_measure__(self, console, options) -> rich.measure.Measurement:
        return rich.measure.Measurement(min(len(self.text), 8), len(self.text))

    def __rich_console__(self, console, options) -> Iterator[rich.text.Text]:
        yield rich.text.Text(truncate(self.text, options.max_width), justify=options.justify)
