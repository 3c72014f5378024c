"""Plans for a function: within a budget that the compiler confirms, and the frontier of all."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_call
from jaxmem.ground.errors import JaxmemError, OffloadError
from jaxmem.planning import COMPILER_OPTIONS, Layout, Plan, checked, one_liners
from jaxmem.rematerialization.traced import Allowed, Problem, check_function
from jaxmem.reports import MemoryReport, memory
from jaxmem.targets import LocalDevice, Target, resolve

_WORTH = 0.01  # of the step's time: the price that one more compilation should be able to save
_MORE = 1.06  # times the projected bytes that fit: how far projections of two plans may differ
# Times the budget: what may yet fit where nothing below did; ever closer to one another.
_ABOVE = (1.01, 1.02, 1.04, 1.03, 1.015, 1.025, 1.035)
_SAME = 1.002  # projected bytes this near are one plan
_MARGIN = 1.003  # between what is expected of a plan and its budget
_PASS_ACTS = 0.75  # of the device's memory: XLA's own pass acts at some 80 %


def plan(
    fun: Callable,
    *args: Any,
    budget: int | str | None = None,
    planner: str = "dp",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    offload: bool = False,
    compilations: int = 5,
    **kwargs: Any,
) -> Plan:
    """What ``fun`` should save and recompute in its backward pass.

    Args:
        fun: a differentiable function, usually the loss.
        *args, **kwargs: its arguments, real or abstract (`jax.ShapeDtypeStruct`); nothing is
            allocated. Leaves that are not arrays are taken as constants.
        budget: device bytes allowed for ``value_and_grad(fun)`` (arguments, gradients and
            residuals) and for what is reserved, an int or text such as ``"11GiB"`` or ``"80%"`` (of
            the target): the least recomputation that fits, in predicted time, of which FLOPs count
            most. None: the least memory that one more forward pass buys.
        planner: ``"dp"``: the optimum over nested regions and what they save, for any program that
            is about a chain; ``"dots"``: no matmul and no convolution is done twice, only what is
            between them; ``"sqrt"`` (Chen et al. 2016): one row of regions, each keeping what
            crosses its end, about sqrt(N) of them on N equal layers.
        target: the GPU to plan for, present or not. The plan is compiled for it, compared with its
            budget and corrected. None: bytes are projected only.
        reserved: bytes of the budget spoken for outside of ``fun``: optimizer state, say.
        argnums, has_aux: as for `jax.value_and_grad`.
        offload: whether residuals of a `scan` may wait for the backward pass in host memory, where
            that takes less predicted time than to recompute them. (Elsewhere XLA drops it.)
        compilations: how many at most; 0: none.

    Returns:
        A `Plan`: ``plan.apply(fun)`` is the planned function.

    Raises:
        BudgetError: the budget does not parse, or nothing fits; names the lowest budget that works
            and the operation that sets it.
        PlanError: the function has side effects, returns nothing that can be differentiated (with a
            target: no floating-point scalar), or the planner is not known.
        OffloadError: XLA keeps residuals on the device that the plan has in host memory.
        JaxmemError: the target has no GPU's compiler.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, x):
    ...     for _ in range(16):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (1024, 64)]]
    >>> chosen = jaxmem.plan(loss, *shapes)
    >>> chosen.projected_bytes < 0.6 * chosen.plain_bytes
    True
    """
    check_function(fun, "jaxmem.plan")
    check_call(fun, args, kwargs, "jaxmem.plan")
    allowed = Allowed.parse(budget, reserved, target, planner, offload)
    problem = Problem(fun, args, kwargs, argnums, has_aux)
    problem.check_loss("jaxmem.plan", scalar=target is not None and compilations > 0)
    if target is None or not compilations:
        return allowed.plan(problem.program)
    return _Compiled(problem, allowed, resolve(target)).plan(compilations)


class _Compiled:
    """Planning with the compiler in the loop: what it says of one plan corrects the next."""

    def __init__(self, problem: Problem, allowed: Allowed, target: Target | LocalDevice):
        if isinstance(target, LocalDevice) and target.platform == "cpu":
            raise JaxmemError(
                "The attached device is a CPU, whose bytes say nothing about rematerialization on "
                "a GPU. Name the GPU to plan for (target='h200'), or leave target out to have "
                "projected bytes."
            )
        self.problem, self.target, self.allowed = problem, target, allowed
        self.planner = allowed.planner(problem.program)
        self.around = problem.program.boundary_bytes + self.allowed.reserved
        self.tried: dict[Layout, Plan] = {}
        # Compiled bytes over projected ones, by the place where the plan peaks.
        self.ratios: dict[tuple[int, ...], float] = {}

    def plan(self, compilations: int) -> Plan:
        planner, budget = self.planner, self.allowed.budget
        if budget is None:
            return self.compile(planner.frugal(), compilations)
        goal: float = budget * self.target.count
        fits, fails = 0.0, float("inf")  # projected bytes that did, and did not
        best: Layout | None = None
        while len(self.tried) < compilations and fits * _SAME < fails:
            layout = planner.within(int(goal) - self.around)
            if layout is None or (0 < len(self.tried) == compilations - 1 and not best):
                layout = planner.least()
            found = self.tried.get(layout)
            if not found:
                forward = self.tried[best].seconds if best else 0.0
                if best and layout.price > best.price - 3 * _WORTH * forward:
                    break
                found = self.compile(layout, compilations)
            elif layout == planner.least() and not best:
                best = self.above(compilations)
                break
            assert found.compiled_bytes is not None
            ratio = max(found.compiled_bytes, 1) / max(found.projected_bytes, 1)
            if found.compiled_bytes > budget:
                fails = min(fails, goal)
                goal = self.aim(budget / ratio / _MARGIN, fails)
            else:
                fits = max(fits, goal)
                if best is None or layout.price < best.price:
                    best = layout
                if layout == planner.plain:
                    break
                # Another plan may well compile to less of what is projected than this one.
                goal = max(budget / ratio, fits * _MORE)
            if not fits < goal < fails:
                goal = (fits + fails) / 2 if fits else 0.97 * fails
        if best:
            return self.tried[best]
        lowest = min(self.tried, key=lambda layout: self.tried[layout].compiled_bytes or 0)
        raise self.allowed.too_small(
            self.problem.program, lowest, self.tried[lowest].compiled_bytes or 0, "compiled"
        )

    def expected(self, layout: Layout) -> float:
        """Projected bytes, corrected where another plan was compiled that peaks at the same place:
        how far a projection is off depends on what is there. Of a partitioned program every GPU has
        its share."""
        return (layout.peak + self.around) * self.ratios.get(layout.place, 1 / self.target.count)

    def aim(self, low: float, high: float) -> float:
        """Projected bytes to plan for next, where a plan for ``high`` did not fit and ``low`` would
        do if all plans peaked at the same place: half way, if that is expected to fit."""
        assert self.allowed.budget is not None
        middle = max((low + high) / 2, low)
        layout = self.planner.within(int(middle) - self.around)
        if layout is None or layout in self.tried:
            return low
        return middle if self.expected(layout) <= self.allowed.budget / _MARGIN else low

    def above(self, compilations: int) -> Layout | None:
        """A plan that is projected not to fit, by little, and does."""
        assert self.allowed.budget is not None
        for share in _ABOVE:
            goal = int(share * self.allowed.budget * self.target.count)
            layout = self.planner.within(goal - self.around)
            if layout and layout not in self.tried and len(self.tried) < compilations:
                found = self.compile(layout, compilations).compiled_bytes
                if found is not None and found <= self.allowed.budget:
                    return layout
        return None

    def compile(self, layout: Layout, compilations: int) -> Plan:
        """The plan of a layout with the compiler's bytes and FLOPs."""
        chosen = self.allowed.write(self.problem.program, layout, self.planner)
        report = self.report(chosen, chosen.compiler_options)
        total = report.device + self.allowed.reserved
        # A value that goes from turn to turn may be there once for two that the plan counts.
        if 2 * report.host < chosen.host_bytes:
            raise OffloadError(
                f"The plan has {format_bytes(chosen.host_bytes)} of residuals in host memory, and "
                f"XLA's program for {self.target.name} keeps {format_bytes(report.host)} there. "
                "Plan without offload=True."
            )
        fields: dict[str, Any] = {
            "compiled_bytes": total,
            "compiled_flops": report.work.flops,
            "compiled_moved": report.moved,
        }
        if total > _PASS_ACTS * self.target.memory_bytes:
            options = chosen.compiler_options.items()
            with_pass = {name: value for name, value in options if name not in COMPILER_OPTIONS}
            fields["xla_pass_bytes"] = self.report(chosen, with_pass).device + self.allowed.reserved
        self.tried[layout] = dataclasses.replace(chosen, **fields)
        self.ratios[layout.place] = max(total, 1) / max(chosen.projected_bytes, 1)
        print(
            f"jaxmem: compiled {len(self.tried)} of at most {compilations} plans for "
            f"{self.target.name}: {format_bytes(total)} (projected "
            f"{format_bytes(chosen.projected_bytes)})",
            file=sys.stderr,
        )
        return self.tried[layout]

    def report(self, plan: Plan, options: dict[str, Any]) -> MemoryReport:
        step = jax.jit(self.problem.step(plan))
        return memory(
            step,
            *self.problem.leaves,
            target=self.target,
            compiler_options=options,
            timeline=False,
        )


# ---- the frontier


@dataclasses.dataclass(frozen=True, repr=False)
class Frontier:
    """Plans from no recomputation to the least memory, and what the usual one-liners cost.

    Attributes:
        plans: by falling projected bytes.
        one_liners: (name, projected bytes, seconds of recomputation): the policies of
            `jax.checkpoint` on every block, a block being what one module path of two parts makes.
    """

    plans: tuple[Plan, ...]
    one_liners: tuple[tuple[str, int, float], ...]

    def plot(self, path: str) -> None:
        """Writes a picture of it (PNG, SVG or PDF by the name). Needs ``jaxmem[viz]``."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise JaxmemError("Plots need matplotlib: pip install 'jaxmem[viz]'.") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        forward = max(self.plans[0].seconds * 3, 1e-30)  # a program may do nothing
        axes.step(
            [plan.projected_bytes / 2**30 for plan in self.plans],
            [100 * plan.recompute_seconds / forward for plan in self.plans],
            where="pre",
            marker="o",
            label=f"jaxmem, {self.plans[0].planner}",
        )
        for name, total, seconds in self.one_liners:
            axes.plot(total / 2**30, 100 * seconds / forward, "x", label=name)
        axes.set(
            xlabel="projected bytes of value_and_grad, GiB",
            ylabel="predicted recomputation, % of the plain step\n"
            f"times {checked(self.plans[0].time_error)}",
        )
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)

    def __str__(self):
        forward = self.plans[0].seconds * 3
        rows = [
            (f"{plan.planner}, {len(plan.rows)} regions", plan.projected_bytes,
             plan.recompute_seconds, f"{plan.recompute_flops / 1e9:.4g}")
            for plan in self.plans
        ]  # fmt: skip
        rows += [(name, total, seconds, "") for name, total, seconds in self.one_liners]
        width = max(len(row[0]) for row in rows)
        head = f"{'':{width}}  {'projected':>11}  {'ms more':>19}  {'of a step':>9}"
        lines = [f"{head}  {'GFLOP again':>11}"]
        for name, total, seconds, work in sorted(rows, key=lambda row: -row[1]):
            more = f"{seconds * 1e3:.3g} {checked(self.plans[0].time_error)}"
            share = f"{seconds / forward:.1%}" if forward else ""
            lines.append(
                f"{name:{width}}  {format_bytes(total):>11}  {more:>19}  {share:>9}  {work:>11}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def pareto(
    fun: Callable,
    *args: Any,
    planner: str = "dp",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    argnums: int | Sequence[int] = 0,
    points: int = 12,
    **kwargs: Any,
) -> Frontier:
    """The plans of ``fun`` between no recomputation and the least memory.

    Bytes are projected; `plan` with a target compiles one of them.

    Args:
        fun, *args, **kwargs, planner, target, reserved, argnums: as for `plan`.
        points: how many budgets to plan for.

    Raises:
        PlanError: the function has side effects, or the planner is not known.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, x):
    ...     for _ in range(16):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (1024, 64)]]
    >>> frontier = jaxmem.pareto(loss, *shapes)
    >>> frontier.plans[-1].projected_bytes < 0.6 * frontier.plans[0].projected_bytes
    True
    """
    check_function(fun, "jaxmem.pareto")
    check_call(fun, args, kwargs, "jaxmem.pareto")
    allowed = Allowed.parse(None, reserved, target, planner)
    problem = Problem(fun, args, kwargs, argnums)
    problem.check_loss("jaxmem.pareto", scalar=False)
    program = problem.program
    found = allowed.planner(program)
    high, low = found.plain.peak, found.least().peak
    layouts = {found.plain, found.least()}
    for share in range(1, points - 1):
        layout = found.within(int(low + (high - low) * (share / (points - 1)) ** 2))
        if layout:
            layouts.add(layout)
    best: list[Layout] = []
    for layout in sorted(layouts, key=lambda layout: (layout.peak, layout.price)):
        if not best or layout.price < best[-1].price:
            best.append(layout)
    around = program.boundary_bytes + allowed.reserved
    return Frontier(
        tuple(allowed.write(program, layout, found) for layout in reversed(best)),
        tuple(
            (name, layout.peak + around, layout.seconds)
            for name, layout in one_liners(allowed.on_gpu(program), allowed.rates).items()
        ),
    )
