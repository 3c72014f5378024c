"""Rows of regions, one on each block, and none: what a search compiles beside plans of its own."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxmem.planning import Layout, per_block_layouts
from jaxmem.rematerialization.search import MAX_OVERPROJECTION, MAX_PLAIN_OVERPROJECTION

if TYPE_CHECKING:
    from jaxmem.rematerialization.compiled_plans import CompiledPlans


# Times the budget: what is projected to take no more fits as likely as not. Chosen: with half of
# that hundredth a Mamba is refused within what `dots_saveable` takes on each of its blocks; twice
# as much tries the same rows of it.
_EXACT = 1.01


class PerBlockCheckpoints:
    """Those of a search, in the order in which it tries them."""

    def __init__(self, plans: "CompiledPlans"):
        self.plans = plans

    def last_resort(self, budget: int) -> Iterator[Sequence[Layout]]:
        """One region on each block, by one policy after the other, where nothing else fits: XLA may
        make far less of what is inside a block than is projected, as it does of an
        `associative_scan`. The fewest bytes first, then what costs less."""
        rows = sorted(self.by_price, key=lambda layout: layout.peak)
        if rows and rows[0] not in self.plans.search.outcomes:
            yield [rows[0]]
        yield from self.cheaper(budget)

    def cheaper(self, budget: int, price: float = math.inf) -> Iterator[Sequence[Layout]]:
        """Rows that cost less than a price and than the best plan, and are projected to fit, or not
        to by little: no plan is to lose to what one line does."""
        while layout := next(self.promising(budget, price), None):
            yield [layout]

    def cheapest_safe(self, budget: int, goal: float) -> Iterator[Sequence[Layout]]:
        """The cheapest row that is projected to take no more than that."""
        yield from ([one] for one in itertools.islice(self.safe(budget, goal), 1))

    def safe(self, budget: float, goal: float = math.inf) -> Iterator[Layout]:
        """Rows that are projected to take no more than a goal, and than the budget."""
        least = min(goal, budget)
        return (one for one in self.promising(budget) if self.plans.projected(one) <= least)

    def promising(self, budget: float, price: float = math.inf) -> Iterator[Layout]:
        """Rows that are not compiled yet, cost less than a price and than the best plan, and may
        fit: first those that do if no projection is further off than those of what was compiled,
        the cheapest of them first, then those that would miss the budget by the least. Beside what
        fits, the function without a region is one of them: XLA may make more of regions than of
        it, so that plans for fewer bytes do not fit and it does."""
        search, of_rows = self.plans.search, self.least_ratio
        of_all = search.corrections.least_ratio
        likely: list[Layout] = []
        others: list[Layout] = []
        plain = self.plans.planner.plain
        for layout in [plain, *self.by_price] if search.best else self.by_price:
            if layout.price > price or not self.plans.is_worth_compiling(layout.price):
                break
            projected = self.plans.projected(layout)
            if layout in search.outcomes or search.has_missed(projected, self.by_price):
                continue
            most = MAX_PLAIN_OVERPROJECTION if layout == plain else MAX_OVERPROJECTION
            if of_rows * projected <= self.plans.with_chip(_EXACT * budget):
                likely.append(layout)
            elif of_all * projected <= self.plans.with_chip(most * budget):
                others.append(layout)
        yield from likely
        yield from sorted(others, key=lambda one: (one == plain, self.plans.projected(one)))

    def projected_to_fit(self, budget: int, price: float) -> Iterator[Sequence[Layout]]:
        """The most promising row that costs less than a price, if it is projected to fit."""
        most = self.plans.with_chip(_EXACT * budget)
        row = next(self.promising(budget, price), None)
        if row and self.plans.projected(row) <= most:
            yield [row]

    @property
    def least_ratio(self) -> float:
        """The least of compiled bytes over projected ones that a row may take: of rows that were
        compiled. Plans tell no more of rows than rows of plans, but that less may be taken: a row
        of a Mamba's blocks took 6 % less where plans had taken 11 % more."""
        corrections = self.plans.search.corrections
        compiled = corrections.compiled
        rows = (compiled[one].ratio for one in self.by_price if one in compiled)
        return min(rows, default=min(corrections.least_ratio, 1.0))

    def may_fit(self, budget: int) -> bool:
        """Whether the most promising row fits if it takes what is projected, or as little of that
        as anything that was compiled."""
        row = next(self.promising(budget), None)
        error = min(self.plans.search.corrections.least_ratio, 1.0)
        room = self.plans.with_chip(budget)
        return row is not None and error * self.plans.projected(row) <= room

    @functools.cached_property
    def by_price(self) -> list[Layout]:
        """All rows, the cheapest first."""
        program = self.plans.constraints.as_run(self.plans.traced.program)
        return per_block_layouts(self.plans.planner, program, self.plans.constraints.rates)
