"""Propose, compile, correct: the loop that all searches with the compiler share."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic

from jaxmem.ground.bar import Bar
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.progress import counting, tell
from jaxmem.rematerialization.corrections import Corrections, Outcome, Proposal

# Times the budget: rows of regions that are projected to take no more may yet fit, where they cost
# less than what does. Chosen: projections of the networks that tuned the planner are up to a third
# too high (benchmarks/results/planner.md).
MAX_OVERPROJECTION = 1.3
# The same for what is compiled as it is, which costs nothing where it fits. Measured: of 130 small
# programs of many kinds five are projected 1.3 to 1.5 times as high as they compile, and none more
# (exact gelus, elements that are taken or set by indices).
MAX_PLAIN_OVERPROJECTION = 1.5
# Expected bytes of a proposal over those of the one that is compiled beside it, for where that does
# not fit. Measured: first projections are off by about as much (benchmarks/planner/projected.py).
ALTERNATIVE = 1.04
# Times the budget: a program as it is that is expected to take no more, by what came out lowest
# beside its projection, is compiled before a budget is refused. Chosen: with what is near 1 budgets
# are refused that the program meets (tests/test_plans.py); with twice of what is above 1 one more
# program is compiled that does not fit.
TRY_PLAIN_LIMIT = 1.5
# A share of projected bytes: rows of regions by several policies that differ by less are the same
# to XLA. Chosen: four of them compiled to 699.3 MiB each, for a budget of 539 (convolutions with a
# CTC loss). At half and at twice of it they are the same four.
_ALIKE = 0.005


@dataclasses.dataclass(frozen=True, slots=True)
class PendingCompilation:
    """A proposal that is being compiled.

    Attributes:
        message: what it is, in words.
        finish: waits, and says what became of it.
        stop: for where nobody waits for it any more.
    """

    message: str
    finish: Callable[[], Outcome]
    stop: Callable[[], None]


class Search(Generic[Proposal]):
    """Proposals compiled in rounds; the bytes of one round correct what is expected of the next.

    A round has the same proposals on every machine, so that what is found does not depend on how
    many are compiled at a time, nor on which is there first.

    Attributes:
        allowed: bytes; infinite: any.
        compilations: how many at most.
        overshoot: times the ratio of what did not fit: what is proposed next differs from it.
        corrections: the outcomes so far, and what is expected by them.
    """

    def __init__(self, allowed: int | None, compilations: int, overshoot: float = 1.0):
        self.allowed = math.inf if allowed is None else allowed
        self.compilations, self.overshoot = compilations, overshoot
        self.corrections: Corrections[Proposal] = Corrections()

    def run(
        self, rounds: Iterable[Sequence[Proposal]], start: Callable[[Proposal], PendingCompilation]
    ) -> None:
        """Compiles what is proposed until nothing is, or as many as are allowed.

        Args:
            rounds: a generator that looks at the outcomes so far before it proposes the next. The
                first of a round is what is wanted; the others count only where it does not fit, and
                leave one compilation over.
            start: begins to compile one.

        Raises:
            JaxmemError: what the first of a round raised.
        """
        if not self.remaining:
            return
        with counting(self.compilations, len(self.outcomes)) as bar:
            for proposals in rounds:
                self._round(proposals, start, bar)
                if not self.remaining:
                    break

    def try_plain(
        self, proposal: Proposal, projected: int, start: Callable[[Proposal], PendingCompilation]
    ) -> None:
        """Where nothing fits: compiles the program as it is, though no more are allowed, if there
        is hope."""
        expected = projected * min(self.corrections.least_ratio, 1.0)
        if not self.best and expected <= TRY_PLAIN_LIMIT * self.allowed:
            asked, self.compilations = self.compilations, len(self.outcomes) + 1
            self.run([[proposal]], start)
            self.compilations = asked

    def _round(
        self,
        proposals: Sequence[Proposal],
        start: Callable[[Proposal], PendingCompilation],
        bar: Bar,
    ) -> None:
        began = time.monotonic()
        proposals = proposals[: max(self.remaining - 1, 1)]
        bar.begin(len(proposals))
        with contextlib.ExitStack() as stack:
            begun: list[tuple[Proposal, PendingCompilation]] = []
            for proposal in proposals:
                one = _start_alternative(start, proposal) if begun else start(proposal)
                begun.append((proposal, one))
                stack.callback(one.stop)
            number = f"{len(self.outcomes) + 1} of at most {self.compilations}"
            said, *others = [one.message for _, one in begun if one.message]
            # Those beside the first get a number when they count.
            alternatives = (
                f"; beside it, in case it does not fit: {'; '.join(others)}" if others else ""
            )
            tell(f"jaxmem: compiling {number}: {said}{alternatives}")
            bar.show(f"compiling {'; '.join([said, *others])}")
            for at, (proposal, one) in enumerate(begun):
                try:
                    outcome = one.finish()
                except JaxmemError as error:
                    if not at:
                        raise
                    outcome = Outcome(f": {error}", math.inf, 1, None, proposal)
                self._record(proposal, outcome, time.monotonic() - began)
                bar.finish()
                if not at and self.fits(proposal):
                    break  # what is beside it was for the other case

    def _record(self, proposal: Proposal, outcome: Outcome, seconds: float) -> None:
        """Keeps an outcome that was there so long after its round began."""
        missed = outcome.compiled is not None and outcome.compiled > self.allowed
        self.corrections.record(proposal, outcome, self.overshoot if missed else 1.0)
        more = round(self.remaining * seconds)
        rest = f"; up to about {more} s more" if more else ""
        number = f"{len(self.outcomes)} of at most {self.compilations}"
        tell(f"jaxmem: compiled {number}{outcome.message}{rest}")

    @property
    def outcomes(self) -> dict[Proposal, Outcome]:
        """What became of the proposals so far, in their order."""
        return self.corrections.outcomes

    @property
    def remaining(self) -> int:
        """How many more may be compiled."""
        return max(self.compilations - len(self.outcomes), 0)

    @property
    def exhausted_note(self) -> str:
        """What is said where nothing fits: whether it was for want of compilations; a sentence."""
        return (
            "" if self.remaining else f" More compilations than {self.compilations} may find one."
        )

    def fits(self, proposal: Proposal) -> bool:
        """Whether it was compiled, and its bytes are allowed."""
        found = self.outcomes.get(proposal)
        return found is not None and found.compiled is not None and found.compiled <= self.allowed

    def has_missed(self, projected: int, among: Collection[Proposal]) -> bool:
        """Whether one of some proposals was far from fitting that was projected to take as many
        bytes, or two of them did not fit."""
        missed = [
            outcome.compiled or 0
            for one, outcome in self.corrections.compiled.items()
            if abs(outcome.projected - projected) <= _ALIKE * projected
            and one in among
            and not self.fits(one)
        ]
        return len(missed) > 1 or any(size > ALTERNATIVE * self.allowed for size in missed)

    def bracket(self, sizes: Mapping[Proposal, float]) -> tuple[float, float]:
        """Of the sizes of proposals that were compiled, the largest that fits (0: none), and the
        smallest above it that does not (infinite: none)."""
        tried = {one: size for one, size in sizes.items() if one in self.outcomes}
        fits = max((size for one, size in tried.items() if self.fits(one)), default=0.0)
        above = (size for one, size in tried.items() if size > fits and not self.fits(one))
        return fits, min(above, default=math.inf)

    @property
    def best(self) -> Proposal | None:
        """The one of the least price that fits."""
        fitting = filter(self.fits, self.outcomes)
        return min(fitting, key=lambda one: self.outcomes[one].price, default=None)

    @property
    def lowest(self) -> Proposal | None:
        """The one of the fewest compiled bytes."""
        known = self.corrections.compiled
        return min(known, key=lambda one: known[one].compiled or 0, default=None)


def _start_alternative(
    start: Callable[[Proposal], PendingCompilation], proposal: Proposal
) -> PendingCompilation:
    """Begins what may not be wanted: what is wrong with it is raised when somebody waits for it."""
    try:
        return start(proposal)
    except Exception as error:
        return PendingCompilation("", functools.partial(_raise, error), lambda: None)


def _raise(error: Exception) -> Outcome:
    raise error
