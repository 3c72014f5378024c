"""Propose, compile, correct: the loop that all searches with the compiler share."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from jaxmem.ground.progress import tell

Proposal = TypeVar("Proposal", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposal.

    Attributes:
        said: one line about it.
        price: the lower, the better, of those that fit.
        projected, compiled: bytes by jaxmem's arithmetic and by XLA; ``compiled`` is None where
            there is no program.
        place: what proposals have in common whose projections are off alike.
    """

    said: str
    price: float
    projected: int
    compiled: int | None
    place: Hashable

    @property
    def ratio(self) -> float:
        """Compiled bytes over projected ones."""
        return max(self.compiled or 0, 1) / max(self.projected, 1)


class Search(Generic[Proposal]):
    """Proposals compiled one after the other; the bytes of one correct what is expected of others.

    Attributes:
        outcomes: by proposal, in the order of compilation.
        ratios: compiled bytes over projected ones, by place; the last one last.
    """

    def __init__(self, allowed: int, compilations: int, over: float = 1.0):
        self.allowed, self.compilations, self.over = allowed, compilations, over
        self.outcomes: dict[Proposal, Outcome] = {}
        self.ratios: dict[Any, float] = {}

    def run(self, proposals: Iterable[Proposal], compile: Callable[[Proposal], Outcome]) -> None:
        """Compiles what is proposed until nothing is, or as many as are allowed. ``proposals`` is a
        generator that looks at the outcomes so far before it proposes the next."""
        if not self.left:
            return
        for proposal in proposals:
            outcome = compile(proposal)
            self.outcomes[proposal] = outcome
            if outcome.compiled is not None:
                self.ratios.pop(outcome.place, None)  # so that it comes last
                more = self.over if outcome.compiled > self.allowed else 1.0
                self.ratios[outcome.place] = outcome.ratio * more
            tell(
                f"jaxmem: compiled {len(self.outcomes)} of at most {self.compilations}"
                f"{outcome.said}"
            )
            if not self.left:
                break

    def reject(self, proposal: Proposal) -> None:
        """Takes back what was compiled: it is no program after all."""
        self.outcomes[proposal] = dataclasses.replace(self.outcomes[proposal], compiled=None)

    @property
    def left(self) -> int:
        """How many more may be compiled."""
        return max(self.compilations - len(self.outcomes), 0)

    def fits(self, proposal: Proposal) -> bool:
        """Whether it was compiled, and its bytes are allowed."""
        found = self.outcomes.get(proposal)
        return found is not None and found.compiled is not None and found.compiled <= self.allowed

    @property
    def best(self) -> Proposal | None:
        """The one of the least price that fits."""
        fitting = filter(self.fits, self.outcomes)
        return min(fitting, key=lambda one: self.outcomes[one].price, default=None)

    @property
    def lowest(self) -> Proposal | None:
        """The one of the fewest compiled bytes."""
        known = {
            proposal: outcome.compiled
            for proposal, outcome in self.outcomes.items()
            if outcome.compiled is not None
        }
        return min(known, key=known.__getitem__, default=None)
