"""What a plan may cost, and on what: the budget, the target, the planner."""

import copy
from collections.abc import Mapping

from jaxmem.ground.budget import Budget
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.ground.errors import BudgetError, PlanError
from jaxmem.ground.garbage import uncollected
from jaxmem.planning import (
    PLANNERS,
    Layout,
    Planner,
    Variant,
    as_emitted,
    baseline_policies,
    loops_as_emitted,
    lowest,
)
from jaxmem.program import Program, apply_compiler_rules
from jaxmem.rematerialization.choices import choices_of, rows_of
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_facts import OwnRegions, PlannedFor, Predicted
from jaxmem.rematerialization.timelines import PlanTimeline
from jaxmem.targets import Rules, family_of


class Constraints:
    """What a plan may cost, and on what; the planner that makes it; and whether the user's own
    regions stay."""

    def __init__(self, limits: Limits, name: str, keeps_regions: bool = False):
        self.budget, self.device, self.rates = limits.budget, limits.target, limits.rates
        self.name, self.keeps_regions = name, keeps_regions

    @classmethod
    def parse(
        cls, budget, reserved, target, planner: str, offload: bool = False, regions: str = "open"
    ) -> "Constraints":
        """From what a user writes."""
        if regions not in ("open", "keep"):
            raise PlanError(
                "regions= is 'open' (plan in place of the function's own regions) or 'keep' "
                f"(beside them); got {regions!r}."
            )
        if planner not in PLANNERS:
            known = ", ".join(map(repr, PLANNERS))
            raise PlanError(f"There is no planner named {planner!r}; the known ones are {known}.")
        limits = Limits.parse(budget, reserved, target, offload)
        return cls(limits, planner, regions == "keep")

    def with_own_regions(self) -> "Constraints":
        """The same, of a function whose own regions stay."""
        kept = copy.copy(self)
        kept.keeps_regions = True
        return kept

    def as_run(self, program: Program) -> Program:
        """A program as the device runs it."""
        return apply_compiler_rules(program, self.rules)

    @property
    def rules(self) -> Rules:
        """How the device's compiler fuses and lays out."""
        return self.device.rules if self.device else family_of(None).rules

    @uncollected()
    def planner(self, program: Program) -> Planner:
        """The plans that there are for a program."""
        return PLANNERS[self.name](self.as_run(program), self.rates)

    def budget_for(self, program: Program, budget: int | None = None) -> Budget:
        """The budget (or another one) of a program, whose arguments and gradients are reserved."""
        of = self.budget if budget is None else Budget(budget, self.budget.reserved)
        return of.reserve(self.as_run(program).boundary_bytes)

    @uncollected()
    def plan(
        self, program: Program, planner: Planner | None = None, plain: Layout | None = None
    ) -> Plan:
        """The plan of a program by projected bytes; its own ``planner``, and ``plain``, as it is
        (`plain_layout`), may have been made before.

        Raises:
            BudgetError: none is projected to fit.
        """
        planner, budget = planner or self.planner(program), self.budget_for(program)
        layout = (
            planner.minimum_at_one_forward()
            if budget.available is None
            else planner.cheapest_for(budget.available)
        )
        if layout is None:
            least = planner.minimum_peak()
            raise self.too_small(program, least, budget.total(least.peak))
        return self.write(program, layout, plain or self.plain_layout(program))

    @uncollected()
    def plan_without_recomputation(self, program: Program, plain: Layout | None = None) -> Plan:
        """The plan of a program that keeps everything, whatever it takes; ``plain`` as in `plan`.
        Only what is inside of a `jax.shard_map` needs a planner for it."""
        run = self.as_run(program)
        planned = self.planner(program).plain if run.maps else None
        layout = planned or Variant.plain(run, self.rates).layout(())
        return self.write(program, layout, plain or self.plain_layout(program))

    @uncollected()
    def plain_layout(self, program: Program) -> Layout:
        """A program as JAX differentiates it: a plan has derivatives of its own, without regions
        too."""
        return Variant.plain(self.as_run(program).as_written, self.rates).layout(())

    def write(self, program: Program, layout: Layout, plain: Layout) -> Plan:
        """A layout as a plan, beside the program as it is: with the bytes of everything, and in
        words."""
        total, fingerprint = self.budget_for(program).total, program.fingerprint
        program, wanted = self.as_run(program), program.differentiated
        program = program.as_written if layout.segments else program
        return Plan(
            self.name,
            fingerprint,
            as_emitted(program, layout.regions),
            loops_as_emitted(program, layout.loops),
            Predicted(
                plain_bytes=total(plain.peak),
                bytes=total(layout.peak),
                flops=program.flops,
                recompute_flops=layout.flops,
                recompute_moved=layout.moved,
                seconds=self.rates.forward(program),
                recompute_seconds=layout.seconds,
                host_bytes=layout.host_bytes,
                host_peak=layout.host_peak,
                timeline=PlanTimeline.of(*layout.live, total),
                plain_timeline=PlanTimeline.of(*plain.live, total),
            ),
            rows=tuple(rows_of(program, layout)),
            choices=tuple(choices_of(program, self.rates, layout)),
            reserved=self.budget.reserved,
            budget=self.budget.allowed,
            planned_for=self._planned_for,
            widens_bfloat16=program.widens_bfloat16,
            segments=layout.segments,
            inputs=program.unsharded.types[: program.input_count],
            differentiated=None if wanted is None else tuple(sorted(wanted)),
            own_regions=OwnRegions(program.inlined_checkpoints, self.keeps_regions),
            has_plainer_gathers=program.has_plainer_gathers,
        )

    @property
    def _planned_for(self) -> PlannedFor:
        device = self.device
        if device is None:
            return PlannedFor(rules=self.rules)
        return PlannedFor(device.family, self.rules, device.name, device.time_error)

    def _baseline_note(self, program: Program, compiled: Mapping[tuple, int]) -> str:
        """What regions on every block would take, in words."""
        total = self.budget_for(program).total
        found = baseline_policies(self.as_run(program), self.rates)
        found.pop("everything_saveable")
        if not found:
            return ""
        known = {name: compiled.get((row.regions, row.loops)) for name, row in found.items()}
        name = min(found, key=lambda name: (found[name].peak, known[name] is None))
        projected = total(found[name].peak)
        takes = format_against(known[name] or projected, self.budget.allowed or 0)
        return f" {name} takes {takes} ({'compiled' if known[name] else 'projected'})."

    def too_small(
        self,
        program: Program,
        least: Layout,
        total: int,
        compiled: Mapping[tuple, int] | None = None,
        hope: str = "",
    ) -> BudgetError:
        """The error of a budget that nothing fits, when the least takes ``total`` bytes.
        ``compiled``: the bytes of regions and loops that were; ``hope``: a sentence that says what
        may yet find one."""
        allowed, word = self.budget.allowed or 0, "compiled" if compiled else "projected"
        less = " reserve less," if self.budget.reserved else ""
        return BudgetError(
            f"No {self.name} plan fits the budget of {self.budget}; the lowest found takes "
            f"{format_against(total, allowed)} ({total} bytes {word}, "
            f"{format_bytes(program.boundary_bytes)} of them arguments and gradients), set by "
            f"{lowest(self.as_run(program), least)}."
            f"{self._baseline_note(program, compiled or {})}{hope} Raise the budget,{less} shrink "
            "the batch, or accumulate gradients over microbatches.",
            total,
        )
