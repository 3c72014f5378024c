"""The best policy over names within a budget: proposed by arithmetic, decided by the compiler."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxmem.ground.errors import OffloadError
from jaxmem.planning import NamedChoice
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.built_ins import BUILT_INS, kept_by
from jaxmem.rematerialization.named.choices import NamedChoices
from jaxmem.rematerialization.named.compiler import RATIO_KEY, NamedCompiler
from jaxmem.rematerialization.named.policy import BuiltIn, NamedPolicy
from jaxmem.rematerialization.search import ALTERNATIVE, Search
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets import Target

# Times the budget: what is expected there may fit yet, while little is known and later. Chosen: of
# all sets of six names over six layers, each compiled, the best is found at six budgets. (Their
# projections are 1 % too low in a scan and 9 % too high out of one, with deviations of 4 and 7 %.)
# At half and at twice of what is above 1 tests/test_names.py passes too.
_ABOVE = (1.15, 1.12, 1.1, 1.06)
# Of a step's price: what one more compilation should be able to save. Chosen: twice of it misses
# the best of those sets at one budget, by 2 % of the FLOPs (jax 0.12).
_WORTH = 0.005
# Of the price: by so much a policy of JAX's has to recompute less to be better. Chosen: prices of
# equal sets differ by less. At half and at twice tests/test_names.py passes.
_MIN_PRICE_GAIN = 1e-3


def named_policy(traced: TracedFunction, limits: Limits, fixed: Mapping[str, str]) -> NamedPolicy:
    """The policy of the least recomputation that fits.

    Raises:
        PlanError: the function has no names, no regions, or not those that are ``fixed``.
        BudgetError: no policy fits; names the lowest bytes found.
    """
    choices = NamedChoices(traced, limits, fixed)
    if limits.target is None or not limits.compilations:
        best = choices.best()
        recompute = 1 + best.flops / max(3 * choices.place.program.flops, 1)
        return _written(choices, best, choices.projected(best), recompute)
    return NamedSearch(choices, limits.target).policy()


class NamedSearch:
    """The search for the policy over a function's names, with the compiler."""

    def __init__(self, choices: NamedChoices, target: Target):
        self.choices, self.limits = choices, choices.limits
        self.found, self.compiler = choices.found, NamedCompiler(choices, target)
        # Those of JAX's policies come after the choices, and what they show after that.
        count = self.limits.compilations + len(BUILT_INS) + 1
        self.search: Search[NamedChoice | str] = Search(self.limits.budget.allowed, count)

    def policy(self) -> NamedPolicy:
        """The choice of the least compiled price that fits.

        Raises:
            BudgetError: none does; names the lowest bytes found.
            OffloadError: XLA keeps on the device what is fixed to be in host memory.
        """
        self.search.run(self._rounds(), self.compiler.start)
        best = self.search.best
        if not isinstance(best, NamedChoice):
            compiled = [
                (outcome.compiled or 0, one)
                for one, outcome in self.search.corrections.compiled.items()
                if isinstance(one, NamedChoice)
            ]
            if not compiled:
                raise OffloadError(f"No policy could be compiled: {'; '.join(self.compiler.notes)}")
            total, least = min(compiled, key=lambda one: one[0])
            raise self.choices.too_small(total, least, "compiled")
        compiler = self.compiler
        report = compiler.reports[best]
        compiler.note_pass(report)
        policy = _written(
            self.choices,
            best,
            self.limits.budget.total(report.device),
            report.work.flops / compiler.plain_flops,
        )
        return dataclasses.replace(
            policy,
            compiled=True,
            compilations=len(self.search.outcomes),
            built_ins=tuple(self._built_ins()),
            notes=(*policy.notes, *dict.fromkeys(compiler.notes)),
        )

    def _corrected_bytes(self, choice: NamedChoice) -> float:
        """What names hold is known to the byte, and what is beside it is about the same."""
        projected = self.choices.projected(choice)
        return self.search.corrections.expected_by_nearest(projected, RATIO_KEY)

    def _optimistic_bytes(self, choice: NamedChoice) -> float:
        return self.search.corrections.least_expected(self.choices.projected(choice), RATIO_KEY)

    def _rounds(self) -> Iterator[Sequence[NamedChoice | str]]:
        if self.limits.budget.allowed is None:
            yield [self.found.best_for(None)]
        else:
            yield from self._choices(self.search.allowed)
        for name in BUILT_INS:
            yield [name]
        # What a policy of JAX's keeps may all have names: then it is a choice like any other.
        for name in BUILT_INS:
            same = self._equivalent_choice(name)
            if same and same not in self.search.outcomes and self._beats_choice(name):
                yield [same]

    def _choices(self, allowed: float) -> Iterator[Sequence[NamedChoice]]:
        """The least recomputation that is expected to fit, corrected by each that was compiled,
        until nothing that recomputes less is expected to."""
        search, worth = self.search, _WORTH * 3 * self.choices.forward
        while len(search.outcomes) < self.limits.compilations:
            best = self._best_choice()
            tried = [one for one in search.outcomes if isinstance(one, NamedChoice)]
            left = {*self.found.front, *self.found.front_without(tried)}.difference(tried)
            pending = sorted(
                (one for one in left if best is None or one.price <= best.price - worth),
                key=lambda one: (one.price, one.bytes),
            )
            if not pending:
                return
            fitting = [one for one in pending if self._corrected_bytes(one) <= allowed]
            above = _ABOVE[min(len(tried), len(_ABOVE) - 1)] * allowed
            hoped = [one for one in pending if self._optimistic_bytes(one) <= above]
            if fitting:
                lower = [
                    one
                    for one in fitting[1:]
                    if self._corrected_bytes(one) * ALTERNATIVE <= allowed
                ]
                yield [fitting[0], *lower[:1]]
            elif best is None:
                yield [min(pending, key=self._corrected_bytes)]
            elif hoped:
                yield [min(hoped, key=self._optimistic_bytes)]
            else:
                return

    def _best_choice(self) -> NamedChoice | None:
        """Of the choices that fit the one of the least projected price."""
        fits = [one for one in self.search.outcomes if self.search.fits(one)]
        chosen = [one for one in fits if isinstance(one, NamedChoice)]
        return min(chosen, key=lambda one: one.price, default=None)

    def _beats_choice(self, name: str) -> bool:
        """Whether a policy of JAX's fits and recomputes less, compiled, than the best choice: in
        FLOPs, or by price."""
        best = self.search.best
        if self.limits.budget.allowed is None or not self.search.fits(name):
            return False
        if not isinstance(best, NamedChoice):
            return True
        report, ours = (self.compiler.reports[one] for one in (name, best))
        fewer = report.work.flops < ours.work.flops * (1 - _MIN_PRICE_GAIN)
        return fewer or self.compiler.price(report) < self.compiler.price(ours) * (
            1 - _MIN_PRICE_GAIN
        )

    def _equivalent_choice(self, name: str) -> NamedChoice | None:
        """The choice that keeps what a policy of JAX's does, where all of that has names."""
        values, unnamed = kept_by(name, self.choices.place)
        if unnamed:
            return None
        number = 0
        for at in range(len(self.choices.names)):
            marked = [(one, one.groups[at]) for one, _ in self.choices.place.all()]
            kept = all(group <= values.get(id(one), frozenset()) for one, group in marked)
            number |= (kept and any(group for _, group in marked)) << at
        return self.found.choice(number) if self.found.allowed[number] else None

    def _built_ins(self) -> Iterator[BuiltIn]:
        for name in BUILT_INS:
            report = self.compiler.reports.get(name)
            if name in self.search.outcomes:
                yield BuiltIn(
                    name,
                    self.limits.budget.total(report.device) if report else None,
                    report.work.flops / self.compiler.plain_flops if report else math.nan,
                    kept_by(name, self.choices.place)[1],
                    self._beats_choice(name),
                )


def _written(
    choices: NamedChoices, choice: NamedChoice, size: int, recompute: float
) -> NamedPolicy:
    policy, limits, target = choices.policy_of(choice), choices.limits, choices.limits.target
    seconds = 3 * limits.rates.forward(choices.place.program)
    return NamedPolicy(
        policy.saveable_names,
        policy.offloaded,
        choices.order,
        size,
        recompute,
        choices.projected(choice),
        choice.host,
        choice.seconds / max(seconds, 1e-30),
        budget=limits.budget.allowed,
        reserved=limits.budget.reserved,
        target=target.name if target else "",
        time_error=target.time_error if target else None,
        notes=tuple(choices.notes),
    )
