"""The search over the levers together: candidates by predicted time, corrected by the compiler."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmem.fitting.costs import Costs
from jaxmem.fitting.levers import LEVERS, Levers
from jaxmem.fitting.table import Candidate, Fitting
from jaxmem.fitting.verdicts import MIN_GAIN, Verdicts, key_of
from jaxmem.fitting.workload import Workload
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_count
from jaxmem.ground.errors import CompileError
from jaxmem.ground.progress import tell
from jaxmem.rematerialization import (
    ALTERNATIVE,
    FIRST_ERROR,
    MAX_OVERPROJECTION,
    MAX_PLAIN_OVERPROJECTION,
    Outcome,
    PendingCompilation,
    Plan,
    Search,
    is_offloaded,
)
from jaxmem.reports import Compiling, MemoryReport, begin
from jaxmem.targets import family_of
from jaxmem.training import TrainStep

# Chosen: what half and twice of these change beside a stand-in for the compiler prints
# benchmarks/planner/sensitivity.py; the step that is returned was compiled and fits in any case.
_GOOD_ENOUGH = 0.97  # of the budget: no need to look for less recomputation
_RETRY_RANGE = 1.2  # times the budget: near enough to try plans in between
_OVERPLAN = 1.06  # times the most that was tried: projected to take more, it may compile to less
_AFTER_MISS = 1.01  # times the ratio of what did not fit: the next one differs from it


class LeverSearch:
    """The search of `fit`."""

    def __init__(self, workload: Workload):
        self.workload, self.costs = workload, Costs(workload)
        self.options = list(workload.options)
        self.seen: dict[Levers, Candidate] = {}  # the last plan of each
        self.found: dict[tuple, Candidate] = {}  # by key: what was compiled
        self.baselines: list[Candidate] = []  # of these, what a line of the author's would do
        self.reports: dict[tuple, MemoryReport] = {}
        self.lowered: dict[tuple, tuple[TrainStep, Compiling]] = {}  # traced and lowered
        self.compiled: Search[Candidate] = Search(workload.budget, 0)

    def run(self, compilations: int) -> TrainStep:
        """The step that fits, after compiling so many candidates at most.

        Raises:
            BudgetError: nothing that was compiled fits.
            CompileError: XLA generates no code for what fits.
        """
        check_count("jaxmem.fit", "compilations", compilations)
        self.compiled = Search(self.workload.budget, compilations, _AFTER_MISS)
        refused: CompileError | None = None
        while True:
            self.compiled.run(self._rounds(), self._start)
            if self._best is None:
                _try_plain(self)
            best = self._best
            if best is None:
                raise refused or Verdicts(self).too_small()
            step, compiling = self._lowered(best)
            verifies = family_of(self.workload.device).verifies_codegen
            try:
                if verifies:
                    compiling.start("full")
                # Beside it: what is not searched is traced to say what it would bring.
                step.fitting = self.fitting(best)
                if verifies:
                    compiling.report("full")
            except CompileError as error:
                refused = error
                self._reject(best, error)
            else:
                return step
            finally:
                compiling.stop()

    def _lowered(self, candidate: Candidate) -> tuple[TrainStep, Compiling]:
        """The step of a candidate, and the same traced and lowered."""
        key, workload = key_of(candidate), self.workload
        if key not in self.lowered:
            step = workload.step(candidate.levers, candidate.plan)
            state = workload.state(candidate.levers)
            self.lowered[key] = (
                step,
                begin(step, state, workload.on(candidate.levers).batch, target=workload.target),
            )
        return self.lowered[key]

    def bytes_of(self, candidate: Candidate) -> int:
        """Device bytes of a candidate's step, compiled.

        Raises:
            CompileError: XLA does not compile it.
        """
        return self._lowered(candidate)[1].report().device

    def _reject(self, best: Candidate, error: CompileError) -> None:
        """Its buffers could be assigned, and no code can be generated for it."""
        proposal, why = self.compiled.best, f"XLA could not compile it: {_reason(error)}"
        assert proposal is not None
        self.compiled.corrections.reject(proposal)
        del self.reports[key_of(best)]
        self.found[key_of(best)] = dataclasses.replace(
            best, compiled=None, report=None, verdict=why
        )
        tell(f"jaxmem: {best.levers}; recompute {best.remat}: {why}")

    def fitting(self, best: Candidate | None = None) -> Fitting:
        """The table of everything that was considered so far."""
        return Verdicts(self).table(best)

    def projected(self) -> Candidate | None:
        """The candidate of the least predicted time that is projected to fit; nothing compiled."""
        return self.cheapest(None)

    @property
    def _best(self) -> Candidate | None:
        best = self.compiled.best
        return self.found[key_of(best)] if best else None

    def _rounds(self) -> Iterator[Sequence[Candidate]]:
        while True:
            best = self._best
            # What may still be returned is kept as it was lowered, and nothing else: it is large.
            self.lowered = {
                key: one for key, one in self.lowered.items() if best and key == key_of(best)
            }
            candidate = self.faster_than(best) if best else self.next_candidate()
            if candidate is None:
                return
            yield [candidate, *self._alternatives(candidate, best)]

    def faster_than(self, best: Candidate) -> Candidate | None:
        """What promises to be faster than the best so far."""
        return self.cheapest(best) or _baseline_policy(self, best) or _as_it_is(self, best)

    def next_candidate(self) -> Candidate | None:
        """What may fit, where nothing has so far."""
        if self.found and self.compiled.remaining == 1:
            likely = self._safest()
        else:
            likely = self.cheapest(None) or self.smallest()
        return likely or _baseline_policy(self, None) or _interpolated(self)

    def _alternatives(self, candidate: Candidate, best: Candidate | None) -> list[Candidate]:
        """What to compile beside a candidate, in case that it does not fit: the one of the least
        predicted time that is expected to take a little less."""
        if self.expected(candidate) * ALTERNATIVE < self.workload.budget:
            return []  # nothing is expected to keep it from fitting
        other = self.cheapest(best, lambda levers: ALTERNATIVE * self.ratio(levers))
        return [] if other is None or key_of(other) == key_of(candidate) else [other]

    def cheapest(
        self, best: Candidate | None, ratio: Callable[[Levers], float] | None = None
    ) -> Candidate | None:
        """The least predicted time that is not compiled yet and is expected to fit, its bytes so
        many times projected as `ratio` says; None: nothing promises to be faster than ``best``."""
        found: Candidate | None = None
        limit = best.seconds if best else 1e30
        bound = self.costs.bound
        for levers in sorted(self.options, key=lambda levers: (bound(levers), str(levers))):
            if bound(levers) >= min(limit, found.seconds if found else math.inf):
                break
            close = best is not None and (best.compiled or 0) >= _GOOD_ENOUGH * self.workload.budget
            if best and levers == best.levers and close:
                continue
            candidate = self._candidate(levers, ratio)
            if candidate is None or key_of(candidate) in self.found:
                continue
            gain = limit - candidate.seconds
            if gain > MIN_GAIN * limit and (found is None or candidate.seconds < found.seconds):
                found = candidate
        return found

    def _candidate(
        self, levers: Levers, ratio: Callable[[Levers], float] | None
    ) -> Candidate | None:
        """The levers with the plan that is expected to fit; None: none is."""
        costs, allowed = self.costs, self.workload.budget / (ratio or self.ratio)(levers)
        least = costs.argument_bytes(levers)
        found = costs.plan(levers, int(allowed)) if least <= self.workload.budget else least
        plan, lowest = (None, found) if isinstance(found, int) else (found, None)
        if plan and plan.recomputes and "residuals" in self.workload.keep:
            plan, lowest = None, costs.without_recomputation(levers).projected
        unplanned = Candidate(levers, None, lowest, costs.bound(levers))
        candidate = costs.candidate_of(levers, plan) if plan else unplanned
        if ratio is None:
            self.seen[levers] = candidate
        return candidate if plan else None

    def smallest(self) -> Candidate | None:
        """The fewest projected bytes of what is not compiled yet: the state as small as may be, and
        the batch whole or in the most slices. None: there is no hope in it."""
        most = max((levers.microbatches for levers in self.options), default=1)
        least: Candidate | None = None
        smallest = max(map(_state_reduction, self.options), default=None)
        for levers in self.options:
            if _state_reduction(levers) != smallest or levers.microbatches not in (1, most):
                continue
            found = self.costs.plan(levers, None if "residuals" in self.workload.keep else 1)
            found = self.costs.plan(levers, found) if isinstance(found, int) else found
            assert isinstance(found, Plan)
            candidate = self.costs.candidate_of(levers, found)
            self.seen.setdefault(levers, candidate)
            if key_of(candidate) in self.found:
                continue
            if least is None or self.expected(candidate) < self.expected(least):
                least = candidate
        tried = len(self.found) > 1
        hopeless = least and tried and self.expected(least) > _RETRY_RANGE * self.workload.budget
        return None if hopeless else least

    def expected(self, candidate: Candidate) -> int:
        """Bytes that are expected of the compiler."""
        return int((candidate.projected or 0) * self.ratio(candidate.levers))

    def ratio(self, levers: Levers) -> float:
        """Compiled bytes over projected ones, as they are expected of some levers."""
        if self.compiled.compilations == 1 and not self.found:
            return FIRST_ERROR  # it has no other to learn from
        group = _ratio_group(levers)
        return self.compiled.corrections.ratio(
            _ratio_key(levers), lambda key: _ratio_group(key) == group
        )

    def _safest(self) -> Candidate | None:
        """For the last compilation, after others failed: the least predicted time that fits though
        projections are further off than the worst that was seen; else the fewest bytes."""
        ratios = self.compiled.corrections.ratios

        def worst_ratio(levers: Levers) -> float:
            return FIRST_ERROR * max([self.ratio(levers), *ratios.values()])

        return self.cheapest(None, worst_ratio) or self.smallest()

    def _start(self, candidate: Candidate) -> PendingCompilation:
        _, compiling = self._lowered(candidate)
        compiling.start(hold=True)  # the one that is returned is compiled in full
        said = f"{candidate.levers}; recompute {candidate.remat}"
        return PendingCompilation(said, lambda: self._finish(candidate, compiling), compiling.stop)

    def _finish(self, candidate: Candidate, compiling: Compiling) -> Outcome:
        levers, key = candidate.levers, key_of(candidate)
        assert candidate.projected and candidate.plan
        about = f"{levers}; recompute {candidate.remat}"

        def outcome(said: str, **fields: Any) -> Outcome:
            self.found[key] = found = dataclasses.replace(candidate, **fields)
            assert found.projected
            return Outcome(said, found.seconds, found.projected, found.compiled, _ratio_key(levers))

        try:
            report = compiling.report()
        except CompileError as error:
            why = f"XLA could not compile it: {_reason(error)}"
            if candidate.plan.predicted.host_bytes:
                self.workload.refuse_offload(why)
            else:
                self.options = [option for option in self.options if option != levers]
            return outcome(f": {about}: {why}", verdict=why)
        if not is_offloaded(candidate.plan, report.host - self.workload.host_bytes(levers)):
            why = "XLA keeps on the device what was to wait in host memory"
            self.workload.refuse_offload(why)
            return outcome(f": {about}: {why}", verdict=why)
        self.reports[key] = report
        said = (
            f" for {self.workload.target.name}: {about}: {format_bytes(report.device)} "
            f"(projected {format_bytes(candidate.projected)})"
        )
        return outcome(said, compiled=report.device, report=report)


def _try_plain(search: LeverSearch) -> None:
    """Compiles the step as it is, where nothing fits and there is hope."""
    if candidate := _untried_plain(search):
        search.compiled.try_plain(candidate, candidate.projected or 0, search._start)


def _untried_plain(search: LeverSearch) -> Candidate | None:
    """The step as it is; None: it was compiled."""
    candidate = search.costs.without_recomputation(search.workload.as_is)
    return None if key_of(candidate) in search.found else candidate


def _reason(error: CompileError) -> str:
    lines = str(error).splitlines()
    return lines[min(1, len(lines) - 1)]


def _ratio_key(levers: Levers) -> Levers:
    """What levers have in common whose projections are off alike."""
    return levers.only(lambda lever: lever.shifts_projection_error)


def _ratio_group(levers: Levers) -> Levers:
    """What settings have in common that learn from each other how far projections are off."""
    return levers.only(lambda lever: lever.separate_projection_error)


def _state_reduction(levers: Levers) -> tuple:
    """How far the levers shrink the state, to be compared."""
    return tuple(getattr(levers, name) for name, lever in LEVERS.items() if lever.shrinks_state)


def _baseline_policy(search: LeverSearch, best: Candidate | None) -> Candidate | None:
    """What a line of the author's would do, which may fit though it is projected not to: no step
    that is returned is to lose to it. None: it would not be faster than the best."""
    workload, compiled = search.workload, search.compiled
    if "residuals" in workload.keep:
        return None
    levers = best.levers if best else workload.as_is
    error = min(compiled.corrections.least_ratio, 1.0)
    most = MAX_OVERPROJECTION * workload.budget / error
    for one in search.costs.baseline_candidates(levers, best.seconds if best else math.inf, most):
        missed = compiled.has_missed(one.projected or 0, search.baselines)
        if not (key_of(one) in search.found or missed or _has_missed_like(search, one)):
            search.baselines.append(one)
            return one
    return None


def _as_it_is(search: LeverSearch, best: Candidate) -> Candidate | None:
    """The step without any lever, which may fit though it is projected not to; None: it would not
    be faster than the best."""
    one = _untried_plain(search)
    most = MAX_PLAIN_OVERPROJECTION * search.workload.budget
    error = max(search.compiled.corrections.least_ratio, 1.0)  # of all that was compiled
    if one is None or error * (one.projected or 0) > most:
        return None
    return one if one.seconds < (1 - MIN_GAIN) * best.seconds else None


def _has_missed_like(search: LeverSearch, candidate: Candidate) -> bool:
    """Whether one of the same levers, projected bytes and time was compiled and does not fit: the
    same but for the names of its regions, or next to it."""
    return any(
        one.levers == candidate.levers
        and one.projected == candidate.projected
        and one.seconds == candidate.seconds
        and (one.compiled or 0) > search.workload.budget
        for one in search.found.values()
    )


def _interpolated(search: LeverSearch) -> Candidate | None:
    """A plan between two that were compiled, or a little above them, of the levers that came
    nearest to the budget: bytes do not fall evenly with what is recomputed. None: it is too
    far off."""
    known = [one for one in search.found.values() if one.compiled and one.projected]
    nearest = min(known, key=lambda one: one.compiled or 0, default=None)
    if nearest is None or (nearest.compiled or 0) > _RETRY_RANGE * search.workload.budget:
        return None
    sizes = sorted(one.projected or 0 for one in known if one.levers == nearest.levers)
    sizes.append(int(_OVERPLAN * sizes[-1]))
    gaps = sorted(itertools.pairwise(sizes), key=lambda gap: gap[0] - gap[1])
    goals = [goal for low, high in gaps for goal in ((low + high) // 2, high)]
    for goal in goals:
        found = search.costs.plan(nearest.levers, goal)
        if isinstance(found, Plan):
            candidate = search.costs.candidate_of(nearest.levers, found)
            if key_of(candidate) not in search.found:
                return candidate
    return None
