"""What objects print: an answer, sentences and tables, as text for terminals and as HTML."""

import dataclasses
import html
import textwrap
from collections.abc import Iterable, Sequence

from jaxmem.ground.garbage import uncollected
from jaxmem.reports.drawn.text import columns, side_by_side


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; every cell is text.

    Attributes:
        heads: of the columns; without any there is no line of them.
        rows: the cells.
        title: a line above.
        left: numbers of the columns that are words; the others are numbers, and end in one line.
        wraps: whether the last column, which takes the room that is left, goes on in further lines;
            otherwise its beginning is cut.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Sequence[int] = ()
    wraps: bool = False

    def lines(self, width: int) -> list[str]:
        """The table in at most so many columns."""
        from jaxmem.reports.drawn.columns import lines_of  # rich takes long to import

        found = lines_of(self.heads, self.rows, self.left, self.wraps, width)
        return [self.title, *found] if self.title else found

    def html(self) -> str:
        """The table for a notebook."""

        def cells(kind: str, row: Sequence[str]) -> str:
            side = ["left" if at in self.left else "right" for at in range(len(row))]
            return "".join(
                f'<{kind} style="text-align:{at}">{html.escape(cell)}</{kind}>'
                for at, cell in zip(side, row, strict=True)
            )

        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        head = f"<thead><tr>{cells('th', self.heads)}</tr></thead>" if any(self.heads) else ""
        rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        return f"<table>{title}{head}<tbody>{rows}</tbody></table>"


def _wrapped(text: str, width: int, initial_indent: str = "", subsequent_indent: str = ""):
    """Lines of words that stay whole."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


Part = str | Table | tuple[Table, Table]


@uncollected()
def as_text(parts: Iterable[Part]) -> str:
    """Sentences, tables, and pairs of tables beside each other, below one another."""
    width = columns()
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += part.lines(width)
        elif isinstance(part, tuple):
            lines += side_by_side(*(list(one.lines(width // 2 - 2)) for one in part))
        else:
            indent = " " * (len(part) - len(part.lstrip()) + 2)
            lines += _wrapped(part, width, subsequent_indent=indent) or [""]
    return "\n".join(lines)


@uncollected()
def as_html(parts: Iterable[Part]) -> str:
    """The same for a notebook; the first sentence, the answer, is bold."""
    found = []
    for part in parts:
        if isinstance(part, Table):
            found.append(part.html())
        elif isinstance(part, tuple):
            both = "".join(one.html() for one in part)
            found.append(f'<div style="display:flex;gap:2em">{both}</div>')
        elif part:
            text = html.escape(part.strip())
            found.append(f"<p>{text}</p>" if found else f"<p><b>{text}</b></p>")
    return "\n".join(found)


class Printed:
    """An object that prints as an answer and tables, and as HTML in notebooks."""

    def _parts(self) -> Iterable[Part]:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self._parts())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self._parts())
