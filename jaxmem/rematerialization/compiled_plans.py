"""Planning with the compiler in the loop: what it says of one plan corrects the next."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from jaxmem.ground.garbage import uncollected
from jaxmem.planning import Layout
from jaxmem.rematerialization.compiled_per_block import PerBlockCheckpoints
from jaxmem.rematerialization.corrections import FIRST_ERROR
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_compiler import PlanCompiler
from jaxmem.rematerialization.search import ALTERNATIVE, Search
from jaxmem.targets import family_of

# Chosen: what half and twice of these change beside a stand-in for the compiler prints
# benchmarks/planner/sensitivity.py.
_MIN_SAVING = 0.01  # of the step's time: the price that one more compilation should be able to save
# Of two plans of a program, by how much the ratio of compiled to projected bytes may be lower than
# that of the other, which is known: a share of it at least, and times its distance from 1. Measured
# (benchmarks/planner/projected.py, held_out.py; 360 pairs): where the known one is within 1, 2 or
# 4 % of 1, or further off, nine in ten others are at most 2.5, 3.5, 5.2 and 16 % lower.
_LEAST_SPREAD = 0.02
_SPREAD_RATIO = 1.5
# No more than that. Chosen: further off, plans nearer to the first are the better guess.
_MOST_SPREAD = 0.06
# Times the budget: what may yet fit where nothing below did; ever closer to one another. Chosen;
# half and twice: benchmarks/planner/sensitivity.py.
_OVER_BUDGET_STEPS = (1.01, 1.02, 1.04, 1.03, 1.015, 1.025, 1.035)
# Between what is expected of a plan and its budget. Chosen, like the steps.
_SAFETY_MARGIN = 1.003
# A share of the projected bytes. Chosen: projections of the networks that tuned the planner are
# nearer. At half of it more functions are compiled as they are too; forces of atoms are 29 % off.
_RECHECK_ERROR = 0.1
# Times the projected bytes: room for the error of the only plan that is compiled, where more costs
# more than one forward pass (an MLP of 12 layers: 4.6 of them, below 70 % of its bytes). Chosen:
# nine in ten plans of networks that tuned nothing are within it (benchmarks/planner/held_out.py).
# With half and with twice of the room the MLP costs as much below 65 and 75 %.
_SOME_ROOM = 1.1
# Derived: bytes of a plan are counted in steps of a 200th (planning.variants._SLOTS). Of budgets
# that are nearer to each other the plans hardly differ.
_MIN_GOAL_RATIO = 1.002


class CompiledPlans(PlanCompiler):
    """The search for the plan of a function whose compiled bytes fit."""

    def plan(self, compilations: int) -> Plan:
        """The plan of the least price that fits, after so many compilations at most."""
        allowed = self.constraints.budget.allowed
        if allowed is None:
            return self.plan_fewest_bytes(compilations)
        self.search = Search(allowed, compilations)
        self.search.run(self.rounds(allowed), self.start)
        plain = self.planner.plain
        if plain not in self.search.outcomes:
            self.search.try_plain(plain, self.projected(plain), self.start)
        if self.search.best:
            return self.plans[self.search.best]
        lowest = self.search.lowest
        assert lowest is not None
        total = self.plans[lowest].compiled_bytes or 0
        compiled = {
            (layout.regions, layout.loops): outcome.compiled or 0
            for layout, outcome in self.search.corrections.compiled.items()
        }
        hope = self.search.exhausted_note
        if hope and not self.may_still_fit:
            hope = ""
        raise self.constraints.too_small(self.traced.program, lowest, total, compiled, hope)

    def plan_fewest_bytes(self, compilations: int) -> Plan:
        """The plan of the fewest bytes at one more forward pass. Where it compiles to others than
        were projected, the function as it is may take less, and is compiled too."""
        layout, plain = self.planner.minimum_at_one_forward(), self.planner.plain
        self.search = Search(None, compilations)
        self.search.run([[layout]], self.start)
        known = self.search.outcomes
        if (
            self.search.remaining
            and layout != plain
            and abs(known[layout].ratio - 1) > _RECHECK_ERROR
        ):
            self.search.run([[plain]], self.start)
        return self.plans[min(known, key=lambda one: known[one].compiled or math.inf)]

    @functools.cached_property
    def per_block(self) -> PerBlockCheckpoints:
        """One region on each block."""
        return PerBlockCheckpoints(self)

    @property
    def may_still_fit(self) -> bool:
        """Whether something that was not compiled may fit, if it takes as little of what is
        projected as anything that was."""
        error = min(self.search.corrections.least_ratio, 1.0)
        known, allowed = self.search.outcomes, self.with_chip(self.search.allowed)
        others = (
            one
            for one in (self.planner.minimum_peak(), *self.per_block.by_price)
            if one not in known
        )
        return any(error * self.projected(one) <= allowed for one in others)

    def plain_plan(self) -> Plan | None:
        """The function without regions of the plan's; None: it does not fit."""
        allowed = self.constraints.budget.allowed
        assert allowed is not None
        self.search = Search(allowed, 1)
        self.search.run([[self.planner.plain]], self.start)
        return self.plans[self.search.best] if self.search.best else None

    def rounds(self, budget: int) -> Iterator[Sequence[Layout]]:
        """Layouts to compile: corrected ones, then rows of regions that would cost less than the
        best of them."""
        yield from self.corrections(budget)
        yield from self.per_block.cheaper(budget)

    def corrections(self, budget: int) -> Iterator[Sequence[Layout]]:
        """Layouts to compile: the bytes to plan for are corrected by what was compiled, between
        what fitted and what did not."""
        search, planner = self.search, self.planner
        only = search.compilations == 1  # has no other to learn from
        goal = self.only_goal(budget) if only else float(budget)
        if self.may_fit_as_it_is(budget):
            other = self.layout_for(goal) if search.compilations > 2 else None
            yield [planner.plain, other] if other else [planner.plain]
            if search.fits(planner.plain):
                return
        planned_bytes: dict[Layout, float] = {}  # projected bytes that it was planned for
        fits, fails = 0.0, math.inf  # of those, what did, and did not
        while fits * _MIN_GOAL_RATIO < fails:
            best = search.best
            if best and search.remaining == 1 and self.per_block.may_fit(budget):
                return  # the last one is a row's
            if len(search.outcomes) > 1 and search.remaining == 2 and not best:
                # The last one is for what leaves much room.
                goal = self.worst_case_goal(goal) / _SAFETY_MARGIN
                if self.safe_layout(goal) is None:
                    yield from self.per_block.cheapest_safe(budget, goal)
            cautious = search.outcomes and search.remaining == 1 and not search.best
            wanted = self.last_attempt(goal) if cautious else self.layout_for(goal)
            layout = planner.cheapest_near_minimum() if wanted is None else wanted
            planned_bytes[layout] = goal
            if layout not in search.outcomes:
                if search.outcomes and not search.best and search.remaining > 1:
                    yield from self.per_block.projected_to_fit(budget, layout.price)
                if not self.is_worth_compiling(layout.price):
                    return
                lower = (fits + goal) / 2 if fits else self.worst_case_goal(goal) / ALTERNATIVE
                alternatives = self.alternatives(layout, lower)
                planned_bytes |= dict.fromkeys(alternatives, lower)
                yield [layout, *alternatives]
                if not search.best and math.isinf(fails) and search.remaining > 1:  # the first ones
                    yield from itertools.islice(self.per_block.cheaper(budget, layout.price), 1)
            # Where something fits, the fewest bytes are looked for only if they were asked for: it
            # takes as long as to plan.
            elif (
                (wanted is None or not best)
                and not search.fits(layout)
                and layout == planner.cheapest_near_minimum()
            ):
                # The plan without a budget: XLA may make less of it than of the fewest projected.
                fewest = planner.minimum_at_one_forward()
                if not search.best and fewest not in search.outcomes:
                    yield [fewest]
                if not search.best:
                    yield from self.per_block.last_resort(budget)
                if not search.best:
                    yield from self.slightly_above(budget)
                return
            fits, fails = search.bracket(planned_bytes)
            corrected = search.corrections.goal(layout, budget)
            if not search.fits(layout):
                goal = self.next_goal(budget, corrected / _SAFETY_MARGIN, fails)
            else:
                if layout == planner.plain:
                    return
                # Another plan may well compile to less of what is projected than this one.
                goal = max(corrected, fits * _spread(search.outcomes[layout].ratio))
            if not fits < goal < fails:
                goal = (fits + fails) / 2 if fits else fails / ALTERNATIVE

    def may_fit_as_it_is(self, budget: int) -> bool:
        """Whether the function without regions is projected not to fit, and yet may: the memories
        of the chip take the rest, or it is less than a projection may be too high."""
        projected, compilations = self.projected(self.planner.plain), self.search.compilations
        if compilations == 1 or projected <= budget:
            return False
        error = _MOST_SPREAD if compilations > 2 else 0.0  # the last two are for what is sure
        return projected <= max((1 + error) * budget, self.with_chip(budget))

    def only_goal(self, budget: int) -> float:
        """Projected bytes to plan for where nothing else is compiled: with room for the largest
        error, unless that takes more than one forward pass, and with one there is some room."""
        goal, one = budget / FIRST_ERROR, self.planner.minimum_at_one_forward()
        layout, least = self.layout_for(goal), self.projected(one)
        is_dear = layout is None or layout.price > one.price
        return float(least) if is_dear and _SOME_ROOM * least <= budget else goal

    def worst_case_goal(self, goal: float) -> float:
        """Projected bytes that fit if no plan is further off than those that were compiled, no more
        than the goal. Rows tell nothing of plans: XLA may take half as much again of one."""
        rows = self.per_block.by_price if self.search.outcomes else ()
        return min(goal, self.search.corrections.worst_case_goal(self.search.allowed, rows))

    def safe_layout(self, goal: float) -> Layout | None:
        """The layout for bytes that are safe by all that was compiled, if it peaks where another
        one was compiled: for the last compilation, where nothing fits yet."""
        layout = self.layout_for(self.worst_case_goal(goal) / ALTERNATIVE)
        if layout is None or layout.peak_location not in self.search.corrections.ratios:
            return None
        return layout if self.expected(layout) * _SAFETY_MARGIN <= self.search.allowed else None

    def last_attempt(self, goal: float) -> Layout | None:
        """The layout for the last compilation, where nothing fits yet: what is known to fit, or
        leaves as much room as the only one would, or a row that is projected to fit; None: only the
        fewest bytes do, at any price."""
        room = min(self.worst_case_goal(goal), self.search.allowed / FIRST_ERROR)
        # The function without regions tells nothing of how far a plan's projection is off.
        has_plans = any(one.regions or one.loops for one in self.search.outcomes)
        return (
            (self.safe_layout(goal) if has_plans else None)
            or self.layout_for(room)
            or next(self.per_block.safe(self.search.allowed), None)
        )

    def is_worth_compiling(self, price: float) -> bool:
        """Whether that is less than the price of the best plan so far, by what a compilation is
        worth."""
        best = self.search.best
        if best is None:
            return True
        return price <= best.price - 3 * _MIN_SAVING * self.plans[best].predicted.seconds

    def alternatives(self, layout: Layout, lower: float) -> list[Layout]:
        """What to compile beside a layout, in case that it does not fit: one for fewer bytes."""
        if (
            layout == self.planner.plain
            and self.expected(layout) * ALTERNATIVE < self.search.allowed
        ):
            return []  # nothing is expected to keep it from fitting
        other = self.layout_for(lower)
        if other is None or other == layout or other in self.search.outcomes:
            return []
        return [other] if self.is_worth_compiling(other.price) else []

    @uncollected()
    def layout_for(self, goal: float) -> Layout | None:
        """The layout that is projected to take so many bytes in all."""
        left = self.constraints.budget_for(self.traced.program, int(goal)).available
        assert left is not None
        return self._cheapest_for(left)

    @functools.cached_property
    def _cheapest_for(self) -> Callable[[int], Layout | None]:
        """That of the planner: one goal is asked for again and again."""
        return functools.cache(self.planner.cheapest_for)

    def with_chip(self, budget: float) -> float:
        """Projected bytes that may fit a budget: what waits in the memories of the chip is in
        none."""
        return budget + family_of(self.target.known).chip_bytes

    def projected(self, layout: Layout) -> int:
        """Projected bytes of a layout, in all."""
        return self.constraints.budget_for(self.traced.program).total(layout.peak)

    def expected(self, layout: Layout) -> float:
        """Projected bytes, corrected where another plan was compiled that peaks at the same place:
        how far a projection is off depends on what is there."""
        return self.projected(layout) * self.search.corrections.ratio(layout.peak_location)

    def next_goal(self, budget: int, low: float, high: float) -> float:
        """Projected bytes to plan for next, where a plan for ``high`` did not fit and ``low`` would
        do if all plans peaked at the same place: half way, if that is expected to fit."""
        middle = max((low + high) / 2, low)
        layout = self.layout_for(middle)
        if layout is None or layout in self.search.outcomes:
            return low
        return middle if self.expected(layout) <= budget / _SAFETY_MARGIN else low

    def slightly_above(self, budget: int) -> Iterator[Sequence[Layout]]:
        """Plans that are projected not to fit, by little, until one does."""
        for share in _OVER_BUDGET_STEPS:
            layout = self.layout_for(share * budget)
            if layout and layout not in self.search.outcomes:
                yield [layout]
                if self.search.fits(layout):
                    return


def _spread(ratio: float) -> float:
    """Times what fits, the projected bytes of which another plan may yet fit, by the ratio of
    compiled to projected bytes of what was compiled."""
    return 1 + min(max(_LEAST_SPREAD, _SPREAD_RATIO * abs(ratio - 1)), _MOST_SPREAD)
