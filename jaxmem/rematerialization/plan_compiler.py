"""Plans of a function, each compiled for a target."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import CompileError, JaxmemError, OffloadError
from jaxmem.ground.garbage import uncollected
from jaxmem.planning import Layout
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.corrections import Outcome
from jaxmem.rematerialization.emission import emit
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_facts import Compiled
from jaxmem.rematerialization.search import PendingCompilation, Search
from jaxmem.rematerialization.timelines import PlanTimeline
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.reports import Compiling, MemoryReport, begin
from jaxmem.targets import LocalDevice, Target, example, family_of


class PlanCompiler:
    """Compiles the plans of layouts; ``plans`` has those that were compiled, ``search`` says what
    they are for."""

    search: Search[Layout]

    def __init__(
        self, traced: TracedFunction, constraints: Constraints, target: Target | LocalDevice
    ):
        if isinstance(target, LocalDevice) and target.platform == "cpu":
            raise JaxmemError(
                "The attached device is a CPU, whose bytes say nothing about rematerialization on "
                f"an accelerator. Name the one to plan for ({example()}), or leave target out to "
                "have projected bytes."
            )
        self.traced, self.target, self.constraints = traced, target, constraints
        self.planner = constraints.planner(traced.program)
        self.plain = constraints.plain_layout(traced.program)
        self.plans: dict[Layout, Plan] = {}

    @uncollected()
    def start(self, layout: Layout) -> PendingCompilation:
        """Begins to compile the plan of a layout."""
        chosen = self.constraints.write(self.traced.program, layout, self.plain)
        made = self.begin(chosen, self.options(chosen))
        made.start()
        said = f"{format_bytes(chosen.projected_bytes)} projected"
        return PendingCompilation(
            said, functools.partial(self.finish, layout, chosen, made), made.stop
        )

    def finish(self, layout: Layout, chosen: Plan, made: Compiling) -> Outcome:
        """Waits for the plan of a layout.

        Raises:
            OffloadError: XLA keeps residuals on the device that the plan has in host memory.
        """
        made, report, options = self.compiled(chosen, made)
        pass_bytes = self.bytes_with_pass(chosen, report, options)
        return self.read(layout, chosen, made, report, options, pass_bytes)

    def bytes_with_pass(
        self, chosen: Plan, report: MemoryReport, options: Mapping[str, Any]
    ) -> int | None:
        """Bytes with XLA's own rematerialization pass on, where it would act."""
        family, total = family_of(self.target.known), self.constraints.budget.total
        if total(report.device) <= family.remat_pass_threshold * self.target.memory_bytes:
            return None
        with_pass = {**self.options(chosen), **family.pass_options, **options}
        return total(self.begin(chosen, with_pass).report().device)

    @uncollected()
    def read(
        self,
        layout: Layout,
        chosen: Plan,
        made: Compiling,
        report: MemoryReport,
        options: Mapping[str, Any],
        pass_bytes: int | None,
    ) -> Outcome:
        """What the compiler says of the plan of a layout."""
        offloaded = chosen.predicted.host_peak
        if not is_offloaded(chosen, report.host):
            raise OffloadError(
                f"The plan has {format_bytes(offloaded)} of residuals in host memory, and "
                f"XLA's program for {self.target.name} keeps {format_bytes(report.host)} there. "
                "Plan without offload=True."
            )
        budget = self.constraints.budget
        total = budget.total(report.device)
        live = made.live() if total <= self.search.allowed else ()
        timeline = PlanTimeline.of(live, 0, budget.total)
        compiled = Compiled(
            total,
            report.work.flops,
            report.moved,
            pass_bytes,
            timeline,
            tuple(options.items()),
            report.host,
        )
        self.plans[layout] = dataclasses.replace(chosen, compiled=compiled)
        said = (
            f" plans for {self.target.name}: {format_bytes(total)} (projected "
            f"{format_bytes(chosen.projected_bytes)})"
        )
        return Outcome(said, layout.price, chosen.projected_bytes, total, layout.peak_location)

    def compiled(
        self, chosen: Plan, made: Compiling
    ) -> tuple[Compiling, MemoryReport, Mapping[str, Any]]:
        """A plan that is being compiled, once it is; where XLA refuses, with options that it may
        compile with, which are returned too."""
        try:
            return made, made.report(), {}
        except CompileError:
            options = family_of(self.target.known).fallback_options
            if not options:
                raise
        again = self.begin(chosen, {**self.options(chosen), **options})
        return again, again.report(), options

    def options(self, plan: Plan) -> dict[str, Any]:
        """XLA flags of a plan, without what is reserved for the rest of the step."""
        return plan.options_for(plan.allowance.available)

    def begin(self, plan: Plan, options: dict[str, Any]) -> Compiling:
        """A plan, traced and lowered."""
        traced = self.traced

        def planned(*leaves):
            return traced.value(emit(traced.flat, traced.program.unsharded, plan, leaves))

        return begin(
            jax.jit(traced.differentiated(planned)),
            *traced.leaves,
            target=self.target,
            compiler_options=options,
            timeline=False,
        )


def is_offloaded(chosen: Plan, host: int) -> bool:
    """Whether what a plan has in host memory is there, by the bytes that XLA has there for it. A
    value that goes from turn to turn may be there once for two that the plan counts, and so may
    those that are equal (angles of queries and of keys)."""
    return not chosen.predicted.host_peak or 2 * host >= chosen.predicted.host_peak
