"""The choices over a function's names, in bytes on one device."""

import functools
from collections.abc import Mapping, Sequence

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_against
from jaxmem.ground.errors import BudgetError, PlanError
from jaxmem.ground.words import pluralize
from jaxmem.planning import MOST, NamedChoice, Names, of_each, worth_most
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.places import named_place, names_of
from jaxmem.rematerialization.traced import TracedFunction

_SAYS = "jaxmem.suggest_names(fun, *args) says which values are worth one, and on which lines"


class NamedChoices:
    """The choices over the names of a traced function.

    Attributes:
        order: the names in its regions.
        names: those that are weighed; choices have their numbers.
        notes: what to know of the others, a sentence each.
        found: the choices.

    Raises:
        PlanError: it has no names, no regions, or not those that are ``fixed``.
    """

    def __init__(self, traced: TracedFunction, limits: Limits, fixed: Mapping[str, str]):
        self.traced, self.limits = traced, limits
        found, outside = names_of(traced)
        check_names(found, outside, fixed, bool(traced.program.inlined_checkpoints))
        self.notes = []
        if outside:
            self.notes.append(f"in no region, where no policy decides: {', '.join(outside)}")
        self.order = tuple(found)
        place_of = functools.partial(named_place, traced, limits.target)
        self.names = worth_most(found, place_of, limits.rates, fixed)
        if len(self.names) < len(found):
            self.notes.append(
                f"of {len(found)} names the {MOST} that spare the most time are weighed; the "
                "others are recomputed"
            )
        self.place = place_of(self.names)
        sizes = [
            sum(len(one.groups[at]) for one, _ in self.place.all()) for at in range(len(self.names))
        ]
        unread = [name for name, size in zip(self.names, sizes, strict=True) if not size]
        if unread:
            self.notes.append(
                f"not weighed: {', '.join(unread)} (in a loop inside of a region, or what makes it "
                "runs again in any case)"
            )
        given = {at: fixed[name] for at, name in enumerate(self.names) if name in fixed}
        self.found = Names(self.place, len(self.names), limits.rates, given)
        self.budget = limits.budget.reserve(self.place.program.boundary_bytes)

    def projected(self, choice: NamedChoice) -> int:
        """Projected bytes of everything on one device."""
        return self.budget.total(self.found.projected_of(choice))

    def best(self) -> NamedChoice:
        """The least recomputation that is projected to fit.

        Raises:
            BudgetError: nothing is.
        """
        best = self.found.best_for(self.budget.available)
        if not self.budget.fits(self.projected(best)):
            raise self.too_small(self.projected(best), best, "projected")
        return best

    def policy_of(self, choice: NamedChoice) -> jaxprs.NamePolicy:
        """A choice as a policy."""
        named = (frozenset(self.names[at] for at in s) for s in (choice.saved, choice.offloaded))
        return jaxprs.NamePolicy(*named)

    @functools.cached_property
    def forward(self) -> float:
        """The price of one forward pass."""
        return sum(of_each(self.place.program, self.limits.rates.price))

    def too_small(self, total: int, choice: NamedChoice, word: str) -> BudgetError:
        """The error of a budget that nothing fits, where the least takes ``total`` bytes."""
        saved = ", ".join(self.names[at] for at in sorted(choice.saved)) or "no name"
        budget = self.limits.budget.allowed or 0
        return BudgetError(
            f"No policy over {pluralize(len(self.order), 'name')} fits the budget of "
            f"{self.limits.budget}; the lowest found takes "
            f"{format_against(total, budget)} ({total} bytes {word}), which saves {saved}. "
            "Raise the budget, shrink the batch, or let jaxmem.remat place regions of its own.",
            total,
        )


def check_names(
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
