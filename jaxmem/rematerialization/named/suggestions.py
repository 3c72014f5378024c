"""What is worth a name, for people."""

import dataclasses
import re
from collections.abc import Iterable

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.words import pluralize
from jaxmem.rematerialization.plan_text import time_error_text
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.verdict import short_verdict

LINE = re.compile(r"(.*?):(\d+)(?: \((.*)\))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Suggestion:
    """Equal values that one name would mark: those of a line in all layers.

    Attributes:
        name: the one that it has, or one to give it; ``named`` says which.
        line: ``file:line (function)`` that makes it.
        path: the module, ``*`` where that of several layers differs.
        operation: what makes it.
        type: dtype and shape of one.
        count: how many there are in a step.
        bytes: of one.
        seconds: predicted time of making one again: what is spared if it alone is saved, and 0 if
            the backward pass does not read it.
        action: what the budget would choose: ``"save"``, ``"offload"`` or ``"recompute"``; empty:
            there is no budget.
    """

    name: str
    named: bool
    line: str
    path: str
    operation: str
    type: str
    count: int
    bytes: int
    seconds: float
    action: str = ""

    @property
    def worth(self) -> float:
        """Seconds of recomputation that a byte saved spares."""
        return self.seconds / max(self.bytes, 1)


@dataclasses.dataclass(frozen=True, repr=False)
class Suggestions(Printed):
    """What is worth a name: `suggest_names` makes it.

    Attributes:
        rows: a `Suggestion` each, the most seconds for a byte first.
        regions: what stands for the regions that a policy acts in, in words.
        bytes: projected device bytes of ``value_and_grad(fun)`` with what the budget would choose;
            without a budget, with no name saved.
        budget, target, time_error: as of a `Plan`.
    """

    rows: tuple[Suggestion, ...]
    regions: str
    bytes: int
    budget: int | None = None
    target: str = ""
    time_error: float | None = None

    def _parts(self) -> Iterable[Part]:
        fresh = [row for row in self.rows if not row.named]
        named = len(self.rows) - len(fresh)
        saved = [row for row in self.rows if row.action in ("save", "offload")]
        what = f"{pluralize(len(fresh), 'value')} to name, {named} named already"
        if self.budget is None:
            yield f"{what}; with none of them saved {format_bytes(self.bytes)} (projected)"
        else:
            chosen = f"with {len(saved)} of {len(self.rows)} kept"
            yield f"{what}; {chosen} {short_verdict(self.bytes, self.budget)} (projected)"
        yield f"{self.regions}; times {time_error_text(self.time_error)}"
        heads = ["ms/GiB", "bytes", "us", "count", "choice", "name", "made by"]
        rows = [
            [
                f"{row.worth * 2**30 * 1e3:.2f}",
                format_bytes(row.bytes),
                f"{row.seconds * 1e6:.0f}",
                f"x{row.count}",
                row.action,
                row.name if row.named else f"({row.name})",
                f"{row.operation} {_short(row.line)}",
            ]
            for row in self.rows
        ]
        if self.budget is None:
            rows = [row[:4] + row[5:] for row in rows]
            heads.remove("choice")
        last = len(heads) - 1
        yield Table(heads, rows, left=tuple(range(4, last + 1)))
        best = next((row for row in fresh if row.action != "recompute"), None)
        if best:
            yield f"names in brackets are to be given; the first, after {_short(best.line)}:"
            yield f"  x = jax.ad_checkpoint.checkpoint_name(x, {best.name!r})"


def _short(line: str) -> str:
    match = LINE.fullmatch(line)
    return f"{match[1]}:{match[2]}" if match else line
