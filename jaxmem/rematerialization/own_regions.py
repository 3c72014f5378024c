"""What a function costs as it is written, with the regions that its author has placed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from jaxmem import jaxprs
from jaxmem.planning import of_each, simulate_block
from jaxmem.program import Kernel, Program
from jaxmem.rematerialization.compiled_plans import CompiledPlans
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_facts import OwnRegions, Written
from jaxmem.rematerialization.timelines import PlanTimeline
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets import LocalDevice, Target


def own_regions_cost(traced: TracedFunction, constraints: Constraints) -> Written | None:
    """The cost of a traced function with its own regions; None: it has none."""
    return WithOwnRegions(traced, constraints).cost if traced.program.inlined_checkpoints else None


class WithOwnRegions:
    """A traced function whose own regions stay."""

    def __init__(self, traced: TracedFunction, constraints: Constraints):
        self.opened, self.constraints = traced, constraints
        self.traced = traced.with_own_regions()

    @functools.cached_property
    def cost(self) -> Written:
        """Its bytes, and what its regions run again."""
        rates, program = self.constraints.rates, self.traced.program
        return Written(
            self.constraints.budget_for(program).total(self.constraints.plain_layout(program).peak),
            int(self._recomputed(lambda kernel: kernel.flops)),
            self._recomputed(rates.seconds),
            rates.forward(self.constraints.as_run(self.opened.program)),
        )

    @property
    def price(self) -> float:
        """The price of what its regions run again, as that of a plan (`Rates.price`)."""
        return self._recomputed(self.constraints.rates.price)

    def plan(self, device: Target | LocalDevice) -> Plan | None:
        """The function as it is, compiled; None: it does not fit."""
        found = CompiledPlans(self.traced, self._constraints, device).plain_plan()
        return found and self._with_own_regions_cost(found)

    def projected(self) -> Plan:
        """The function as it is, with projected bytes."""
        constraints, program = self._constraints, self.traced.program
        planner = constraints.planner(program)
        return self._with_own_regions_cost(
            constraints.write(program, planner.plain, constraints.plain_layout(program))
        )

    @property
    def _constraints(self) -> Constraints:
        return self.constraints.with_own_regions()

    def _with_own_regions_cost(self, plan: Plan) -> Plan:
        """With what the regions cost, which to the planner are operations like others."""
        cost, opened = self.cost, self.opened.program
        plain = self.constraints.plain_layout(opened)
        total = self.constraints.budget_for(opened).total
        predicted = dataclasses.replace(
            plan.predicted,
            plain_bytes=total(plain.peak),
            plain_timeline=PlanTimeline.of(*plain.live, total),
            recompute_flops=cost.recompute_flops,
            recompute_seconds=cost.recompute_seconds,
            seconds=cost.seconds,
        )
        own = OwnRegions(opened.inlined_checkpoints, plan.own_regions.kept)
        return dataclasses.replace(plan, predicted=predicted, own_regions=own)

    def _recomputed(self, rate: Callable[[Kernel], float]) -> float:
        return sum(_recomputed(self.traced.flat, self.traced.program, rate))


def _recomputed(
    flat: jaxprs.FlatJaxpr, program: Program, rate: Callable[[Kernel], float]
) -> Iterator[float]:
    """What the kernels take that the regions run again in the backward pass."""
    for step, operation in zip(flat.steps, program.operations, strict=True):
        body = operation.body
        if body is None:
            continue
        if not operation.is_region:
            inside = _recomputed(jaxprs.loop_of(step.equation).body, body, rate)
            yield from (operation.length * each for each in inside)
            continue
        runs = simulate_block(body, 0, len(body.kernels), body.policy_saves).runs
        each = of_each(body, rate)
        yield from (times * each[number] for number, times in runs.items())
