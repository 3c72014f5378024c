"""The best policy over names within a budget: proposed by arithmetic, decided by the compiler."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxmem import jaxprs
from jaxmem.ground.budget import Budget
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import BudgetError, JaxmemError, OffloadError, PlanError
from jaxmem.planning import DEAR, MOST, NamedChoice, Names, Rates, of_each
from jaxmem.rematerialization.built_ins import BUILT_INS, kept_by
from jaxmem.rematerialization.named import named_place, names_of
from jaxmem.rematerialization.named_policy import BuiltIn, NamedPolicy
from jaxmem.rematerialization.search import Begun, Outcome, Search
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.reports import Compiling, MemoryReport, begin
from jaxmem.targets import Target, family_of, known_targets

_BELOW = 0.96  # of the budget: what is compiled beside a choice, for where that does not fit
# Times the budget: what is expected there may fit yet, while little is known and later. Chosen: of
# all sets of six names over six layers, each compiled, the best is found at six budgets.
_ABOVE = (1.08, 1.08, 1.08, 1.03)
_NEAR = 0.2  # of the bytes: projections so near to each other may be off alike. Chosen
_WORTH = 0.01  # of a step's price: what one more compilation should be able to save
_LESS = 1e-3  # of the price: by so much a policy of JAX's has to recompute less to be better
_SAYS = "jaxmem.suggest_names(fun, *args) says which values are worth one, and on which lines"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a policy may cost, and on what: bytes with what is reserved, None: as few as there are;
    a target, None: nothing is compiled; and the XLA flags of who compiles it in the end."""

    budget: int | None
    reserved: int
    target: Target | None
    offload: bool = False
    compilations: int = 8
    options: Mapping[str, Any] | None = None

    @property
    def rates(self) -> Rates:
        device = self.target or known_targets()[family_of(None).example]
        return Rates(device, device.host_bandwidth if self.offload else 0.0)


class NamedSearch:
    """The search for the policy of a traced function over its names.

    Raises:
        PlanError: it has no names, no regions, or not those that are ``fixed``.
    """

    def __init__(self, traced: TracedFunction, limits: Limits, fixed: Mapping[str, str]):
        self.traced, self.limits = traced, limits
        found, outside = names_of(traced)
        _check(found, outside, fixed, bool(traced.program.opened))
        self.notes = []
        if outside:
            self.notes.append(f"in no region, where no policy decides: {', '.join(outside)}")
        self.order = tuple(found)
        self.names = self._ranked(found, fixed)
        if len(self.names) < len(found):
            self.notes.append(
                f"of {len(found)} names the {MOST} that spare the most time are weighed; the "
                "others are recomputed"
            )
        self.place = named_place(traced, limits.target, self.names)
        given = {at: fixed[name] for at, name in enumerate(self.names) if name in fixed}
        self.found = Names(self.place, len(self.names), limits.rates, given)
        boundary = self.place.program.boundary_bytes
        count = limits.target.count if limits.target else 1
        self.budget = Budget(limits.budget, boundary + limits.reserved, count)
        self.reports: dict[NamedChoice | str, MemoryReport] = {}

    def _ranked(self, found: Sequence[str], fixed: Mapping[str, str]) -> list[str]:
        """The names that are weighed: all, or those whose values take the longest to make."""
        if len(found) <= MOST:
            return list(found)
        place, rates = named_place(self.traced, self.limits.target, found), self.limits.rates
        spared = [0.0] * len(found)
        for one, times in place.all():
            for kernel in one.program.kernels:
                for name, values in enumerate(one.groups):
                    if not values.isdisjoint(kernel.results):
                        spared[name] += times * rates.price(kernel)
        ranked = sorted(range(len(found)), key=lambda at: (found[at] not in fixed, -spared[at]))
        return [found[at] for at in sorted(ranked[:MOST])]

    def policy(self) -> NamedPolicy:
        """The choice of the least recomputation that fits.

        Raises:
            BudgetError: none does; names the lowest budget that works.
        """
        if self.limits.target is None or not self.limits.compilations:
            return self._written(self._projected_best())
        allowed = 2**62 if self.limits.budget is None else self.limits.budget
        # Those of JAX's policies come after the choices, and what they show after that.
        count = self.limits.compilations + len(BUILT_INS) + 1
        self.search: Search[NamedChoice | str] = Search(allowed, count)
        self.search.run(self._rounds(allowed), self._start)
        best = self.search.best
        if isinstance(best, NamedChoice):
            return self._written(best)
        compiled = [
            (outcome.compiled, one)
            for one, outcome in self.search.outcomes.items()
            if isinstance(one, NamedChoice) and outcome.compiled is not None
        ]
        raise self._too_small(*min(compiled, key=lambda one: one[0]), "compiled")

    def _projected_best(self) -> NamedChoice:
        if self.limits.budget is None:
            return min(self.found.front, key=self._projected)
        assert self.budget.left is not None
        best = self.found.laid_out_within(self.budget.left)
        if self._projected(best) > self.limits.budget:
            raise self._too_small(self._projected(best), best, "projected")
        return best

    def _projected(self, choice: NamedChoice) -> int:
        """Projected bytes of everything on one device."""
        return self.budget.total(self.found.laid_out(choice))

    def _expected(self, choice: NamedChoice) -> float:
        """Projected bytes, corrected by what the nearest choice was compiled to: what names hold is
        known to the byte, and what is beside it is about the same."""
        projected = self._projected(choice)
        off = [
            (abs(outcome.projected - projected), outcome.compiled - outcome.projected)
            for one, outcome in self.search.outcomes.items()
            if isinstance(one, NamedChoice) and outcome.compiled is not None
        ]
        return projected + min(off)[1] if off else projected

    def _rounds(self, allowed: int) -> Iterator[Sequence[NamedChoice | str]]:
        if self.limits.budget is None:
            yield [min(self.found.front, key=self._projected)]
        else:
            yield from self._choices(allowed)
        for name in BUILT_INS:
            yield [name]
        # What a policy of JAX's keeps may all have names: then it is a choice like any other.
        for name in BUILT_INS:
            same = self._like(name)
            if same and same not in self.search.outcomes and self._better(name):
                yield [same]

    def _choices(self, allowed: int) -> Iterator[Sequence[NamedChoice]]:
        """The least recomputation that is expected to fit, corrected by each that was compiled,
        until nothing that recomputes less is expected to."""
        search, worth = self.search, _WORTH * 3 * self._forward
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
            fitting = [one for one in pending if self._expected(one) <= allowed]
            above = _ABOVE[min(len(tried), len(_ABOVE) - 1)] * allowed
            hoped = [one for one in pending if self._hoped(one) <= above]
            if fitting:
                lower = [one for one in fitting[1:] if self._expected(one) <= _BELOW * allowed]
                yield [fitting[0], *lower[:1]]
            elif best is None:
                yield [min(pending, key=self._expected)]
            elif hoped:
                yield [min(hoped, key=self._hoped)]
            else:
                return

    def _hoped(self, choice: NamedChoice) -> float:
        """Projected bytes, corrected by the choice near it that was compiled to the least: choices
        of one projection may compile to several sizes."""
        projected = self._projected(choice)
        near = [
            outcome.ratio
            for one, outcome in self.search.outcomes.items()
            if isinstance(one, NamedChoice) and outcome.compiled is not None
            if abs(outcome.projected / projected - 1) <= _NEAR
        ]
        return projected * min(near, default=1.0)

    @functools.cached_property
    def _forward(self) -> float:
        """The price of one forward pass."""
        return sum(of_each(self.place.program, self.limits.rates.price))

    def _best_choice(self) -> NamedChoice | None:
        """Of the choices that fit the one of the least projected price."""
        fits = [one for one in self.search.outcomes if self.search.fits(one)]
        chosen = [one for one in fits if isinstance(one, NamedChoice)]
        return min(chosen, key=lambda one: one.price, default=None)

    def _better(self, name: str) -> bool:
        """Whether a policy of JAX's fits and recomputes less, compiled, than every choice that
        does."""
        best = self.search.best
        if name not in self.reports or not self.search.fits(name) or self.limits.budget is None:
            return False
        if not isinstance(best, NamedChoice):
            return True
        ours = self.search.outcomes[best].price
        return self._price(self.reports[name]) < ours * (1 - _LESS)

    def _like(self, name: str) -> NamedChoice | None:
        """The choice that keeps what a policy of JAX's does, where all of that has names."""
        values, unnamed = kept_by(name, self.place)
        if unnamed:
            return None
        number = 0
        for at in range(len(self.names)):
            marked = [(one, one.groups[at]) for one, _ in self.place.all()]
            kept = all(group <= values.get(id(one), frozenset()) for one, group in marked)
            number |= (kept and any(group for _, group in marked)) << at
        return self.found.choice(number) if self.found.allowed[number] else None

    def _price(self, report: MemoryReport) -> float:
        """What a compiled program costs: its arithmetic several times, as where plans are compared,
        and what it moves."""
        device = self.limits.rates.device
        return DEAR * self._second_per_flop * report.work.flops + report.moved / (
            device.shares.memory * device.memory_bandwidth
        )

    @functools.cached_property
    def _second_per_flop(self) -> float:
        """Of the program's matmuls and convolutions, by their dtypes."""
        device, work, seconds = self.limits.rates.device, 1, 0.0
        for place, times in self.place.all():
            for number, kernel in enumerate(place.program.kernels):
                if kernel.flops and number not in place.scans:
                    rate = device.flops_per_second(kernel.dtype or "float32", "highest")
                    work += times * kernel.flops
                    seconds += times * kernel.flops / (device.shares.matmul * rate)
        return seconds / work

    def _start(self, one: NamedChoice | str) -> Begun:
        if isinstance(one, str):
            policy, said = getattr(jax.checkpoint_policies, one), one
        else:
            policy = self._policy_of(one)
            said = f"{format_bytes(self._projected(one))} projected"
        made = self._begin(policy)
        made.start()
        return Begun(said, functools.partial(self._finish, one, made), made.stop)

    def _finish(self, one: NamedChoice | str, made: Compiling) -> Outcome:
        try:
            report = made.report()
        except JaxmemError as error:
            refused = not isinstance(one, str) and one.offloaded and isinstance(error, OffloadError)
            if not (refused or isinstance(one, str)):
                raise
            return self._refused(one, str(error))
        if not isinstance(one, str) and 2 * report.host < one.host:
            names = ", ".join(self.names[at] for at in sorted(one.offloaded))
            return self._refused(one, f"XLA keeps {names} on the device")
        self.reports[one] = report
        total, target = report.device + self.limits.reserved, self.limits.target
        said = f" {one if isinstance(one, str) else 'names'} for {target and target.name}: "
        said += format_bytes(total)
        if isinstance(one, str):
            return Outcome(said, math.inf, total, total, one)
        seconds = one.seconds - float(self.found.tables.seconds[self._number(one)])
        price = self._price(report) + DEAR * seconds
        return Outcome(said, price, self._projected(one), total, "names")

    def _refused(self, one: NamedChoice | str, why: str) -> Outcome:
        if not isinstance(one, str):
            self.notes.append(f"not offloaded: {why}")
        return Outcome(f": {why}", math.inf, 1, None, one)

    def _number(self, one: NamedChoice) -> int:
        return sum(1 << at for at in one.saved | one.offloaded)

    def _begin(self, policy: Any) -> Compiling:
        """The function with another policy in its regions, traced and lowered."""
        traced, target, limits = self.traced, self.limits.target, self.limits
        assert target is not None
        call = jaxpr_as_fun(jaxprs.with_policy(traced.closed, policy))

        def fun(*leaves):
            return traced.value(jax.tree.unflatten(traced.out_tree, call(*leaves)))

        limit = None if limits.budget is None else limits.budget - limits.reserved
        return begin(
            jax.jit(traced.differentiated(fun)),
            *traced.leaves,
            target=target,
            compiler_options=family_of(target).limit_options(limit) | dict(limits.options or {}),
            timeline=False,
        )

    def _policy_of(self, choice: NamedChoice) -> jaxprs.NamePolicy:
        named = (frozenset(self.names[at] for at in s) for s in (choice.saved, choice.offloaded))
        return jaxprs.NamePolicy(*named)

    def _written(self, choice: NamedChoice) -> NamedPolicy:
        policy, target = self._policy_of(choice), self.limits.target
        report = self.reports.get(choice)
        recompute = 1 + choice.flops / max(3 * self.place.program.flops, 1)
        if report:
            recompute = report.work.flops / self._plain_flops
            self._note_pass(report)
        projected = self._projected(choice)
        seconds = 3 * self.limits.rates.forward(self.place.program)
        return NamedPolicy(
            policy.saveable_names,
            policy.offloaded,
            self.order,
            report.device + self.limits.reserved if report else projected,
            recompute,
            projected,
            choice.host,
            choice.seconds / max(seconds, 1e-30),
            report is not None,
            len(self.search.outcomes) if report else 0,
            self.limits.budget,
            self.limits.reserved,
            target.name if target else "",
            target.time_error if target else None,
            tuple(self._built_ins()) if report else (),
            tuple(dict.fromkeys(self.notes)),
        )

    @functools.cached_property
    def _plain_flops(self) -> int:
        """FLOPs of a step without recomputation: where XLA's own pass acts on that program, those
        of another less what it recomputes."""
        plain, target = self.reports.get("everything_saveable"), self.limits.target
        assert target is not None
        if plain and plain.device <= family_of(target).pass_acts * target.memory_bytes:
            return max(plain.work.flops, 1)
        chosen = ((one, of) for one, of in self.reports.items() if isinstance(one, NamedChoice))
        one, report = min(chosen, key=lambda pair: pair[1].device)
        return max(report.work.flops - one.flops, 1)

    def _note_pass(self, report: MemoryReport) -> None:
        target = self.limits.target
        if target and report.device > family_of(target).pass_acts * target.memory_bytes:
            self.notes.append(
                "near the device's memory XLA's own rematerialization pass acts too: what it "
                "recomputes is among these FLOPs"
            )

    def _built_ins(self) -> Iterator[BuiltIn]:
        for name in BUILT_INS:
            report = self.reports.get(name)
            if name in self.search.outcomes:
                yield BuiltIn(
                    name,
                    report.device + self.limits.reserved if report else None,
                    report.work.flops / self._plain_flops if report else math.nan,
                    kept_by(name, self.place)[1],
                    self._better(name),
                )

    def _too_small(self, total: int, choice: NamedChoice, word: str) -> BudgetError:
        saved = ", ".join(self.names[at] for at in sorted(choice.saved)) or "no name"
        return BudgetError(
            f"No policy over the {len(self.order)} names fits the budget of "
            f"{format_bytes(self.limits.budget or 0)} with {format_bytes(self.limits.reserved)} of "
            f"it reserved; the lowest one that does is {format_bytes(total)} ({total} bytes "
            f"{word}), which saves {saved}. Raise the budget, shrink the batch, or let "
            "jaxmem.remat place regions of its own.",
            total,
        )


def _check(
    found: Sequence[str], outside: Sequence[str], fixed: Mapping[str, str], regions: bool
) -> None:
    if not found and outside:
        raise PlanError(
            f"The names of the function ({', '.join(outside)}) are in no region, and a policy "
            "decides inside regions alone. Put the layers under jax.checkpoint, nn.remat or "
            "nnx.remat, with any policy; Plan.as_policy finds the one to put there."
        )
    if not found:
        missing = "" if regions else ", and no regions either (jax.checkpoint, nn.remat)"
        raise PlanError(
            f"The function has no names that a policy could save{missing}. Give the values that "
            "are worth saving names with jax.ad_checkpoint.checkpoint_name(x, 'name') inside its "
            f"regions; {_SAYS}."
        )
    unknown = [name for name in fixed if name not in found]
    if unknown:
        raise PlanError(
            f"fixed= has {', '.join(map(repr, unknown))}, and the regions of the function have no "
            f"such name; they have {', '.join(found)}."
        )
    for name, how in fixed.items():
        if how not in ("save", "offload", "recompute"):
            raise PlanError(
                f"fixed={{{name!r}: {how!r}}} is none of 'save', 'offload' and 'recompute'."
            )
