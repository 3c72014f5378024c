"""What `fit` considered, as a table."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Hashable, Iterator
from typing import Any

from jaxmem.fitting.levers import Levers
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.rematerialization import Plan, Written, time_error_text
from jaxmem.reports import MemoryReport
from jaxmem.reports.drawn.grouping import grouped
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.verdict import short_verdict
from jaxmem.targets import LocalDevice, Target

_NUMBER = re.compile(r"[\d.]+")
# Steps in a sentence. Chosen: it has no room for more. Half and twice change words alone.
_NAMED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A step that was considered.

    Attributes:
        levers, plan: how it is made; None: not planned, since it cannot be the fastest.
        projected: device bytes of the whole step by jaxmem's own arithmetic, of a plan; without
            one, fewer than which no plan takes.
        seconds: predicted time of one step on the target; without a plan, at best.
        host: bytes that cross the link to the host in a step.
        compiled: device bytes by XLA, or None: not compiled.
        verdict: why it was chosen or refused.
        report: of the compiled step.
    """

    levers: Levers
    plan: Plan | None
    projected: int | None
    seconds: float
    host: int = 0
    compiled: int | None = None
    verdict: str = ""
    report: MemoryReport | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The levers in a few words."""
        return self.levers.text or "as it is"

    @property
    def remat(self) -> str:
        """The plan in two words."""
        if self.plan is None:
            return ""
        if not self.plan.recomputes:
            return "none"  # regions of the loss's own are told above the table
        again, offloaded = self.plan.predicted.recompute_share, self.plan.predicted.host_peak
        where = f", {format_bytes(offloaded)} on the host" if offloaded else ""
        who = "its own" if self.plan.keeps_own_regions else self.plan.planner
        return f"{who}, +{again:.1%}{where}"


@dataclasses.dataclass(frozen=True, repr=False)
class Fitting(Printed):
    """What `fit` considered: ``TrainStep.fitting`` of the step that it returns.

    Attributes:
        chosen: the candidate that became the step; None: nothing fits, or nothing was compiled.
        considered: every candidate, by predicted time.
        refused: what was not searched, by name, and why.
        budget, target: what for.
        report: of the chosen step, or of the one with the fewest bytes.
        written: what the loss costs with regions of its own, which were opened; None: it has none.
        baseline_policies: the policies of `jax.checkpoint` on every block of the step as it is:
            name, projected bytes and predicted seconds.

    Predicted times are printed with their error on the target (`Target.time_error`), or as
    "unchecked".
    """

    chosen: Candidate | None
    considered: tuple[Candidate, ...]
    refused: dict[str, str]
    budget: int
    target: Target | LocalDevice
    report: MemoryReport | None = dataclasses.field(compare=False)
    written: Written | None = None
    baseline_policies: tuple[tuple[str, int, float], ...] = ()

    def _parts(self) -> Iterator[Part]:
        yield f"jaxmem.fit: {self._answer()}"
        yield f"on {self.target}"
        yield from self._as_written()
        yield ""
        yield self._table()
        yield ""
        yield from self._equally_fast()
        for name, why in self.refused.items():
            yield f"not searched: {name}: {why}"
        known = "have not been compared with a real device's"
        if time_error(self.target) is not None:
            where = "your" if self.target.known and self.target.known.calibrated else "such a"
            known = f"are as far from measured ones on {where} device as is printed (in the median)"
        how = "arithmetic, memory traffic and the host link, with nothing overlapped but residuals"
        yield f"times are predicted ({how}) and {known}"

    @property
    def plain(self) -> Candidate | None:
        """The step without any lever; None: it was not considered."""
        plain = [one for one in self.considered if one.plan and not one.plan.recomputes]
        return min(plain, key=lambda one: len(one.levers.used()), default=None)

    def to_html(self, path: str | os.PathLike, *, name: str = "") -> None:
        """Writes one self-contained page: bytes against time of all that was considered, and of
        the policies of `jax.checkpoint`. A click
        on a step, or a budget that is dragged, shows its timeline beside that of the step as it
        is, and what its plan does with the values of each module and line, and why.

        Args:
            path: of the file.
            name: of the step, for the title.
        """
        from jaxmem.fitting.choice_page import page_of_fitting

        pathlib.Path(path).write_text(page_of_fitting(self, name=name), encoding="utf-8")

    def _answer(self) -> str:
        chosen, budget = self.chosen, self.budget
        if chosen is None or chosen.compiled is None:
            return f"nothing is chosen for the budget of {format_bytes(budget)}"
        plain = self.plain
        more = ""
        if plain:
            used = plain.levers.used()  # on several devices there is a stage at least
            baseline = f"{plain.name}, nothing recomputed" if used else "the step as it is"
            slower = chosen.seconds / max(plain.seconds, 1e-30) - 1
            much = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
            more = f", {baseline}"
            if chosen != plain:
                more = f", {much} than {baseline} {time_error_text(time_error(self.target))}"
        return short_verdict(chosen.compiled, budget) + more

    def _table(self) -> Table:
        rows = []
        for alike in grouped(self.considered, _row_group):
            one = alike[0]
            name, least = one.name, "" if one.plan else "at least "
            projected = "" if one.projected is None else f"{least}{format_bytes(one.projected)}"
            compiled = "" if one.compiled is None else format_against(one.compiled, self.budget)
            if len(alike) > 1:
                name = f"{name} (and {len(alike) - 1} more)"
            rows.append(
                (name, one.remat, projected, compiled, f"{one.seconds * 1e3:.4g}", one.verdict)
            )
        error = time_error_text(time_error(self.target))
        heads = ("", "recompute", "projected", "compiled", f"ms {error}", "")
        return Table(heads, rows, left=(0, 5), wraps=True)

    def _equally_fast(self) -> Iterator[str]:
        """Which other steps that fit may as well be the fastest: those whose predicted time is
        within its error of the chosen one's."""
        chosen, error = self.chosen, time_error(self.target)
        if chosen is None or error is None:
            return
        names = [
            f"{one.name} (recompute {one.remat})"
            for one in self.considered
            if one is not chosen and one.plan and self._may_fit(one)
            if abs(one.seconds - chosen.seconds) <= error * chosen.seconds
        ]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield (
                f"as fast as the chosen step within {time_error_text(error)}: "
                f"{'; '.join(names[:_NAMED])}{more}"
            )

    def _may_fit(self, one: Candidate) -> bool:
        """Whether its bytes are within the budget, by the compiler or as far as is known."""
        size = one.projected if one.compiled is None else one.compiled
        return size is not None and size <= self.budget

    def _as_written(self) -> Iterator[str]:
        """What the loss's own regions cost, and whether the budget asks for it."""
        written, chosen = self.written, self.chosen
        if written is None or chosen is None or chosen.plan is None:
            return
        left = self.budget - written.bytes
        size = f"projected {format_bytes(written.bytes)}, {format_bytes(abs(left))}"
        levers = f", {chosen.levers}," if chosen.levers.used() else ""
        yield (
            f"the loss's own regions recompute {written.recompute_share:.1%} of a step ({size} "
            f"{'of the budget unused' if left >= 0 else 'over the budget'}); the chosen step"
            f"{levers} recomputes {chosen.plan.predicted.recompute_share:.1%}. They "
            + (
                "stay: nothing else that fits was found to take less time"
                if chosen.plan.keeps_own_regions
                else "are opened; keep='regions' keeps them"
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """The table as plain data."""

        def row(one: Candidate) -> dict[str, Any]:
            fields = ("projected", "compiled", "seconds", "host", "verdict")
            levers = one.levers.to_dict()
            return levers | {"remat": one.remat} | {name: getattr(one, name) for name in fields}

        return {
            "budget": self.budget,
            "target": str(self.target),
            "time_error": time_error(self.target),
            "written": self.written and dataclasses.asdict(self.written),
            "chosen": self.chosen and row(self.chosen),
            "considered": [row(one) for one in self.considered],
            "refused": self.refused,
        }


def _row_group(one: Candidate) -> Hashable:
    """What rows have in common that are told as one: those that were not even planned, and why."""
    if one.plan is None and one.compiled is None:
        return _NUMBER.sub("", one.verdict)
    return id(one)


def holders(report: MemoryReport, most: int = 3) -> str:
    """What holds the most bytes at the peak, by source line, in words."""
    if not report.has_timeline:
        largest = {"arguments": report.argument, "temporary values": report.temp}
    else:
        largest = dict(list(report.by_source.items())[:most])
    return ", ".join(f"{format_bytes(size)} by {line}" for line, size in largest.items())


def time_error(target: Target | LocalDevice) -> float | None:
    """How far predicted times may be off there; None: unchecked."""
    return target.known.time_error if target.known else None


def milliseconds(candidate: Candidate, target: Target | LocalDevice) -> str:
    """The predicted time, and how far off it may be."""
    return f"{candidate.seconds * 1e3:.4g} {time_error_text(time_error(target))}"
