"""What is expected of programs that were not compiled, by those that were: for all searches."""

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

# Compiled bytes over projected ones, at most, before anything was compiled. Measured: networks were
# within 15 % (benchmarks/planner/projected.py), microbatches of a small one 26 % off. What is
# compiled once and for all leaves that much room.
FIRST_ERROR = 1.3
# A share of the bytes: projections so near to each other may be off alike. Chosen, with the shares
# of a budget in named/search.py. At half and at twice tests/test_names.py, test_corrections.py and
# test_few_compilations.py pass.
_NEAR = 0.2
# What was not compiled borrows a ratio rounded up to 1 / this. Chosen: fewer plans are made so.
# At half and at twice the searches of tests/test_names.py and test_few_compilations.py find as
# much.
_BORROWED_STEPS = 50

Proposal = TypeVar("Proposal", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposal.

    Attributes:
        message: one line about it.
        price: the lower, the better, of those that fit.
        projected, compiled: bytes by jaxmem's arithmetic and by XLA; ``compiled`` is None where
            there is no program.
        ratio_key: what proposals have in common whose projections are off alike.
    """

    message: str
    price: float
    projected: int
    compiled: int | None
    ratio_key: Hashable

    @property
    def ratio(self) -> float:
        """Compiled bytes over projected ones."""
        return max(self.compiled or 0, 1) / max(self.projected, 1)

    @property
    def excess(self) -> int:
        """Compiled bytes less projected ones."""
        return (self.compiled or 0) - self.projected


class Corrections(Generic[Proposal]):
    """The outcomes of a search, and what is expected by them.

    Attributes:
        outcomes: by proposal, in the order of the proposals.
        ratios: compiled bytes over projected ones, by key, but of exceptions; the last one last.
    """

    def __init__(self) -> None:
        self.outcomes: dict[Proposal, Outcome] = {}
        self.ratios: dict[Hashable, float] = {}

    def record(self, proposal: Proposal, outcome: Outcome, overshoot: float = 1.0) -> None:
        """Keeps an outcome; its key is expected to be off by so many times as much. One that takes
        more than what was projected to take no less is an exception (XLA has an array twice, in two
        layouts), and tells nothing of others."""
        compiled = outcome.compiled
        is_exception = compiled is not None and any(
            one.projected >= outcome.projected and (one.compiled or 0) < compiled
            for one in self._with_key(outcome.ratio_key)
        )
        self.outcomes[proposal] = outcome
        if compiled is not None and not is_exception:
            self.ratios.pop(outcome.ratio_key, None)  # so that it comes last
            self.ratios[outcome.ratio_key] = outcome.ratio * overshoot

    def reject(self, proposal: Proposal) -> None:
        """Takes back what was compiled: it is no program after all."""
        self.outcomes[proposal] = dataclasses.replace(self.outcomes[proposal], compiled=None)

    @property
    def compiled(self) -> dict[Proposal, Outcome]:
        """What became of the proposals that XLA compiled."""
        return {one: found for one, found in self.outcomes.items() if found.compiled is not None}

    @property
    def least_ratio(self) -> float:
        """The least of compiled bytes over projected ones; 1: nothing was compiled yet."""
        return min((outcome.ratio for outcome in self.compiled.values()), default=1.0)

    def ratio(self, key: Hashable, is_alike: Callable[[Any], bool] | None = None) -> float:
        """Compiled bytes over projected ones, as they are expected for a key. One that was not
        compiled borrows the last one of those that are alike, if there is one; else it is 1."""
        if key in self.ratios:
            return self.ratios[key]
        alike = [ratio for one, ratio in self.ratios.items() if is_alike and is_alike(one)]
        return math.ceil(alike[-1] * _BORROWED_STEPS) / _BORROWED_STEPS if alike else 1.0

    def least_expected(self, projected: int, key: Hashable) -> float:
        """Bytes, if as few of those projected are compiled as of any projection near it with that
        key: proposals of one projection may compile to several sizes."""
        near = (
            outcome.ratio
            for outcome in self._with_key(key)
            if abs(outcome.projected / projected - 1) <= _NEAR
        )
        return projected * min(near, default=1.0)

    def expected_by_nearest(self, projected: int, key: Hashable) -> int:
        """Bytes, if as many are missing as of the nearest projection with that key."""
        off = [(abs(one.projected - projected), one.excess) for one in self._with_key(key)]
        return projected + min(off)[1] if off else projected

    def goal(self, proposal: Proposal, allowed: float) -> float:
        """Projected bytes of which so many are expected to be compiled, after a proposal was. What
        a projection leaves out may be a share of the bytes or so many bytes: where another one
        with its key was compiled, the line through both tells."""
        outcome = self.outcomes[proposal]
        others = [o for o in self._with_key(outcome.ratio_key) if o.projected != outcome.projected]
        if outcome.compiled is None or not others:
            return allowed / outcome.ratio
        other = min(others, key=lambda one: (abs(one.projected - outcome.projected), one.projected))
        slope = (outcome.compiled - (other.compiled or 0)) / (outcome.projected - other.projected)
        low, high = sorted([outcome.ratio, 1.0])
        return outcome.projected + (allowed - outcome.compiled) / min(max(slope, low), high)

    def worst_case_goal(self, allowed: float, others: Collection[Proposal] = ()) -> float:
        """Projected bytes that are allowed if nothing is further off than what was compiled,
        whatever its key, by share or by bytes; ``others`` tell nothing where something else was
        compiled."""
        found = self.compiled
        known = [one for proposal, one in found.items() if proposal not in others]
        known = known or list(found.values())
        ratio = max((one.ratio for one in known), default=1.0)
        return min(allowed / ratio, allowed - max((one.excess for one in known), default=0))

    def _with_key(self, key: Hashable) -> list[Outcome]:
        return [outcome for outcome in self.compiled.values() if outcome.ratio_key == key]
