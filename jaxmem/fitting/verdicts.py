"""What is said of a search: a verdict for each candidate, and what else could be done."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxmem.fitting.levers import LEVERS, allowed
from jaxmem.fitting.table import Candidate, Fitting, holders
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.ground.errors import BudgetError

if TYPE_CHECKING:
    from jaxmem.fitting.search import LeverSearch
    from jaxmem.fitting.workload import Workload

CHOSEN = "chosen"
# Of a step's time: what is worth one more compilation. Chosen
# (benchmarks/planner/sensitivity.py).
MIN_GAIN = 0.005


class Verdicts:
    """The words for what a search has done so far."""

    def __init__(self, search: "LeverSearch"):
        self.search, self.workload = search, search.workload

    def table(self, best: Candidate | None) -> Fitting:
        """Everything that was considered, by predicted time."""
        reports = self.search.reports
        rows = sorted(self._rows(best), key=lambda row: row.seconds)
        chosen = next((row for row in rows if row.verdict.startswith(CHOSEN)), None)
        known = {key: report.device for key, report in reports.items()}
        key = key_of(best) if best else min(known, key=known.__getitem__, default=None)
        report = None if key is None else reports[key]
        workload = self.workload
        about = self._refused(best), workload.budget, workload.target
        costs = self.search.costs
        baseline_policies = tuple(costs.baseline_policies())
        return Fitting(
            chosen, tuple(rows), *about, report, costs.own_regions_cost(), baseline_policies
        )

    def _refused(self, best: Candidate | None) -> dict[str, str]:
        """What was not searched and why, with what it would bring."""
        said = dict(self.workload.refused)
        for lever in LEVERS.values():
            for name in said.keys() & lever.allowed.keys() - self.workload.keep:
                brings = lever.brings(self.search.costs, name, best)
                said[name] += f". {brings[:1].upper()}{brings[1:]}" if brings else ""
        return said

    def _rows(self, best: Candidate | None) -> Iterator[Candidate]:
        """What was compiled, and one row for each setting of the levers that was not."""
        search = self.search
        for found in search.found.values():
            verdict = found.verdict
            if best and key_of(found) == key_of(best):
                verdict = f"{CHOSEN}: {self._why(best)}"
            elif found.compiled is not None and found.compiled > self.workload.budget:
                over = format_bytes(found.compiled - self.workload.budget)
                verdict = f"compiled: {over} over the budget"
            elif best and found.compiled is not None:
                verdict = f"fits, {_slower(found, best):.1%} slower"
            yield dataclasses.replace(found, verdict=verdict)
        compiled = {found.levers for found in search.found.values()}
        if search.options:
            first = search.options[0]  # everything as it is
            row = search.costs.without_recomputation(first)
            if key_of(row) not in search.found:
                compiled.add(first)
                yield dataclasses.replace(row, verdict=self._not_compiled(row, best))
        for levers in search.options:
            if levers not in compiled:
                unplanned = Candidate(levers, None, None, search.costs.bound(levers))
                row = search.seen.get(levers, unplanned)
                yield dataclasses.replace(row, verdict=self._not_compiled(row, best))

    def _not_compiled(self, candidate: Candidate, best: Candidate | None) -> str:
        over = self.search.expected(candidate) - self.workload.budget
        if candidate.projected is not None and over > 0:
            least = "at least " if candidate.plan is None else ""
            expected = format_bytes(self.search.expected(candidate))
            ratio = self.search.ratio(candidate.levers)
            corrected = f" (projected x {ratio:.4g})" if ratio != 1 else ""
            over_budget = f"{format_bytes(over)} over the budget"
            return f"not compiled: expected {least}{expected}{corrected}, {over_budget}"
        if best is None:
            return "not compiled"
        least = "at least " if candidate.plan is None else ""
        if candidate.seconds > best.seconds:
            return f"not compiled: {least}{_slower(candidate, best):.1%} slower"
        gain = -_slower(candidate, best)
        if gain <= MIN_GAIN:
            return "not compiled: gains too little"
        most = "at most " if candidate.plan is None else ""
        return f"not compiled: {most}{gain:.1%} faster"

    def _why(self, best: Candidate) -> str:
        """Why the best one found was chosen: it is the fastest, or the search ended too early."""
        compiled = self.search.compiled
        left = None if compiled.remaining else self.search.faster_than(best)
        if left is None:
            return "the least predicted time that fits"
        others = "faster ones are projected to fit"
        if self.search.expected(left) > self.workload.budget:
            # A policy on each block, or the step as it is.
            others = f"a faster one (recompute {left.remat}) may fit, though it is projected not to"
        return (
            f"the least predicted time of {len(self.search.found)} compiled; {others} "
            f"(compilations={compiled.compilations})"
        )

    def too_small(self) -> BudgetError:
        """The error of a budget that nothing fits: the lowest bytes met, and what holds them."""
        fitting, search = self.table(None), self.search
        budget, target = format_bytes(self.workload.budget), self.workload.target.name
        lines = [f"Nothing fits the budget of {budget} on {target}."]
        lowest = None
        if fitting.report is not None:
            key = min(search.reports, key=lambda key: search.reports[key].device)
            lowest = fitting.report.device
            takes = format_against(lowest, self.workload.budget)
            lines.append(
                f"The lowest compiled is {takes} ({lowest} bytes: "
                f"{search.found[key].levers}; recompute {search.found[key].remat}), held by "
                f"{holders(fitting.report)}."
            )
        hope = search.compiled.exhausted_note
        if hope and search.next_candidate() is None:
            hope = ""
        text = " ".join(lines) + hope
        return BudgetError(f"{text} {self.remedies()}\n{fitting}", lowest)

    def remedies(self) -> str:
        """What else could be done, in words."""
        last = "Or raise the budget, shrink the batch, or shard over more devices."
        return " ".join([*permissions(self.workload), last])


def permissions(workload: "Workload") -> Iterator[str]:
    """What else the caller could let be done, in sentences."""
    named = workload.allow | workload.keep
    more = [name for name in allowed() if name in workload.refused and name not in named]
    if more:
        what = "; ".join(f"allow={name!r} to {allowed()[name]}" for name in more)
        yield f"What else could be allowed: {what}."
    kept = [name for name in workload.refused if name in workload.keep]
    if kept:
        yield f"What is kept and need not be: {', '.join(map(repr, kept))}."


def key_of(candidate: Candidate) -> tuple:
    """What tells candidates apart: their levers and their regions, or the loss's own."""
    plan = candidate.plan
    return (
        candidate.levers,
        plan and (plan.regions, plan.loops, plan.segments, plan.own_regions.kept),
    )


def _slower(candidate: Candidate, best: Candidate) -> float:
    """By what share of the best one's time."""
    return candidate.seconds / max(best.seconds, 1e-30) - 1  # a program may do nothing
