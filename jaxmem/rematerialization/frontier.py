"""All plans of a function, from no recomputation to the least memory."""

import dataclasses
import os
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxmem.ground.bytes import format_bytes, parse_budget
from jaxmem.ground.checks import check_call, check_count
from jaxmem.ground.words import pluralize
from jaxmem.planning import Layout, baseline_policies
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_text import time_error_text
from jaxmem.rematerialization.traced import TracedFunction, check_function
from jaxmem.reports.drawn.plot import LIMIT, check_plot, style, unit_of
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.targets import LocalDevice, Target


@dataclasses.dataclass(frozen=True, repr=False)
class Frontier(Printed):
    """Plans from no recomputation to the least memory, and what the usual one-liners cost.

    Attributes:
        plans: by falling projected bytes.
        baseline_policies: (name, projected bytes, seconds of recomputation): the policies of
            `jax.checkpoint` on every block, a block being what one module path of two parts makes.
    """

    plans: tuple[Plan, ...]
    baseline_policies: tuple[tuple[str, int, float], ...]

    def to_html(
        self, path: str | os.PathLike, *, budget: int | str | None = None, name: str = ""
    ) -> None:
        """Writes one self-contained page: bytes against time of all plans and one-liners. A click
        on a plan, or a budget that is dragged, shows its timeline beside that without regions, and
        what it does with the values of each module and line, and why.

        Args:
            path: of the file.
            budget: bytes or text: where the budget stands at first; None: in the middle.
            name: of the function, for the title.

        Raises:
            BudgetError: the budget does not parse.
        """
        from jaxmem.rematerialization.choice_page import page_of_plans

        allowed = None if budget is None else parse_budget(budget)
        text = page_of_plans(self.plans, self.baseline_policies, allowed, name)
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def plot(
        self, path: str | os.PathLike, *, budget: int | str | None = None, dark: bool = False
    ) -> None:
        """Writes a picture of it (``.png``, ``.svg`` or ``.pdf``). Needs ``jaxmem[viz]``.

        Args:
            path: of the file.
            budget: bytes or text, drawn as a line.
            dark: for a dark page.

        Raises:
            JaxmemError: matplotlib is missing, or it does not know the suffix.
            BudgetError: the budget does not parse.
        """
        check_plot(path)
        from matplotlib.figure import Figure

        unit, one = unit_of(self.plans[0].projected_bytes)
        forward = max(self.plans[0].predicted.seconds * 3, 1e-30)  # a program may do nothing
        with style(dark):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            axes = figure.add_subplot()
            axes.step(  # between two plans there is none
                [plan.projected_bytes / one for plan in self.plans],
                [100 * plan.predicted.recompute_seconds / forward for plan in self.plans],
                where="pre",
                marker="o",
                color="#3a8fd6",
                label=f"jaxmem, {self.plans[0].planner}",
            )
            for (total, seconds), names in self._rivals().items():
                label = textwrap.fill(", ".join(names), 90)
                axes.plot(total / one, 100 * seconds / forward, "x", label=label)
            at_same = self._best_rivals()
            if at_same:
                axes.step(
                    [size / one for size, _ in at_same],
                    [100 * seconds / forward for _, seconds in at_same],
                    where="post",
                    linewidth=1,
                    color="#8c8c8c",
                    label="the best of these policies in the same bytes",
                )
            if budget is not None:
                allowed = parse_budget(budget)
                axes.axvline(allowed / one, color=LIMIT, linestyle="--", linewidth=1.2)
                axes.annotate(
                    f"budget {format_bytes(allowed)}",
                    (allowed / one, 1.0),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    va="bottom",
                    color=LIMIT,
                )
            axes.set(
                xlabel=f"projected bytes of value_and_grad ({unit})",
                ylabel="recomputation, % of the plain step\n"
                f"predicted times {time_error_text(self.plans[0].time_error)}",
            )
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            figure.legend(loc="outside lower center", frameon=False, fontsize="small")
            figure.savefig(path)

    def _rivals(self) -> dict[tuple[int, float], list[str]]:
        """The one-liners by bytes and seconds: several may be one program."""
        found: dict[tuple[int, float], list[str]] = {}
        for name, total, seconds in self.baseline_policies:
            found.setdefault((total, seconds), []).append(name)
        return found

    def _best_rivals(self) -> list[tuple[int, float]]:
        """By bytes the least seconds of a one-liner that takes no more: at those of each plan and
        of each one-liner. Below the smallest of them there is none."""
        liners = [(total, seconds) for _, total, seconds in self.baseline_policies]
        sizes = {plan.projected_bytes for plan in self.plans} | {total for total, _ in liners}
        fitting = {
            size: [seconds for total, seconds in liners if total <= size] for size in sorted(sizes)
        }
        return [(size, min(known)) for size, known in fitting.items() if known]

    def _parts(self) -> Iterable[Part]:
        most, least = self.plans[0], self.plans[-1]
        error = time_error_text(least.time_error)
        if most is least:
            yield f"one plan: {format_bytes(most.projected_bytes)} (projected)"
        else:
            yield (
                f"{len(self.plans)} plans, from {format_bytes(most.projected_bytes)} to "
                f"{format_bytes(least.projected_bytes)} (projected), the last "
                f"{least.predicted.recompute_share:.1%} slower {error}"
            )
        forward = most.predicted.seconds * 3
        rows = [
            (f"{plan.planner}, {pluralize(len(plan.rows), 'region')}", plan.projected_bytes,
             plan.predicted.recompute_seconds, f"{plan.predicted.recompute_flops / 1e9:.4g}")
            for plan in self.plans
        ]  # fmt: skip
        rows += [(name, total, seconds, "") for name, total, seconds in self.baseline_policies]
        cells = [
            (
                format_bytes(total),
                f"{seconds * 1e3:.3g}",
                f"{seconds / forward:.1%}" if forward else "",
                work,
                name,
            )
            for name, total, seconds, work in sorted(rows, key=lambda row: -row[1])
        ]
        heads = ("projected", f"ms more {error}", "slower", "GFLOP more", "plan")
        yield Table(heads, cells, left=(4,), wraps=True)
        yield from self._equally_fast()

    def _equally_fast(self) -> Iterable[str]:
        """How far down one may go before the predicted time differs by more than its error."""
        fastest, error = self.plans[0], self.plans[0].time_error
        if error is None:
            return
        allowed = error * (3 * fastest.predicted.seconds + fastest.predicted.recompute_seconds)
        first = fastest.predicted.recompute_seconds
        alike = [one for one in self.plans if one.predicted.recompute_seconds - first <= allowed]
        if len(alike) > 1:
            least = format_bytes(alike[-1].projected_bytes)
            yield (
                f"{len(alike)} plans, down to {least}, are as fast as the first one within "
                f"{time_error_text(error)}"
            )


def pareto(
    fun: Callable,
    *args: Any,
    planner: str = "dp",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    argnums: int | Sequence[int] = 0,
    regions: str = "open",
    points: int = 12,  # chosen: a curve; each is one more plan
    **kwargs: Any,
) -> Frontier:
    """The plans of ``fun`` between no recomputation and the least memory.

    Bytes are projected; `plan` with a target compiles one of them.

    Args:
        fun, *args, **kwargs, planner, target, reserved, argnums, regions: as for `plan`.
        points: how many budgets to plan for; those of the one-liners are planned for too.

    Raises:
        PlanError: the function has side effects other than prints, or the planner is not known.

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
    check_count("jaxmem.pareto", "points", points, 2)
    constraints = Constraints.parse(None, reserved, target, planner, regions=regions)
    opens, device = regions == "open", constraints.device
    traced = TracedFunction(fun, args, kwargs, argnums, False, opens, target=device)
    traced.check_loss("jaxmem.pareto", scalar=False)
    program = traced.program
    found = constraints.planner(program)
    high, low = found.plain.peak, found.cheapest_near_minimum().peak
    layouts = {found.plain, found.cheapest_near_minimum()}
    rivals = baseline_policies(constraints.as_run(program), constraints.rates)
    goals = {int(low + (high - low) * (at / (points - 1)) ** 2) for at in range(1, points - 1)}
    goals |= {rival.peak for rival in rivals.values() if low < rival.peak < high}
    for goal in sorted(goals, reverse=True):  # a solution serves smaller budgets too
        layout = found.cheapest_for(goal)
        if layout:
            layouts.add(layout)
    best: list[Layout] = []
    for layout in sorted(layouts, key=lambda layout: (layout.peak, layout.price)):
        if best and _is_same_point(best[-1], layout):
            best[-1] = min(best[-1], layout, key=lambda one: len(one.regions))
        elif not best or layout.price < best[-1].price:
            best.append(layout)
    total, plain = constraints.budget_for(program).total, constraints.plain_layout(program)
    return Frontier(
        tuple(constraints.write(program, layout, plain) for layout in reversed(best)),
        tuple((name, total(layout.peak), layout.seconds) for name, layout in rivals.items()),
    )


def _is_same_point(smaller: Layout, larger: Layout) -> bool:
    """Whether both cost the same and print the same bytes: the regions of one bring nothing."""
    return smaller.price == larger.price and format_bytes(smaller.peak) == format_bytes(larger.peak)
