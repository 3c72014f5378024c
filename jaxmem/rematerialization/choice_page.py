"""The page of a choice: every plan there is, and what each does with each value."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.rematerialization.plan_text import time_error_text
from jaxmem.rematerialization.timelines import UNKNOWN, PlanTimeline
from jaxmem.reports.drawn.page import filled
from jaxmem.targets import known_targets

if TYPE_CHECKING:
    from jaxmem.rematerialization.plan import Plan

_ACTIONS = ("keep", "save", "recompute", "offload")


@dataclasses.dataclass(frozen=True)
class Point:
    """A step in the picture of bytes against time.

    Attributes:
        label: what it is, in a few words.
        bytes: of the device, compiled or projected as ``how`` says.
        seconds: predicted, of one step.
        how: ``"compiled"``, ``"projected"`` or ``"one-liner"``.
        plan: what it does with each value; None: that is not known.
        outside: bytes of the step that the plan does not count.
        said: a verdict.
        compiled: bytes along the compiled schedule.
        projected: bytes along the step where there is no plan.
    """

    label: str
    bytes: int
    seconds: float
    how: str
    plan: "Plan | None" = None
    outside: int = 0
    said: str = ""
    compiled: PlanTimeline = UNKNOWN
    projected: PlanTimeline = UNKNOWN


def page_of_plans(
    plans: "Sequence[Plan]",
    baseline_policies: Iterable[tuple[str, int, float]] = (),
    budget: int | None = None,
    name: str = "",
) -> str:
    """HTML of plans of one program, the policies of `jax.checkpoint` beside them."""
    first = plans[0]
    plain = 3 * first.predicted.seconds
    timeline = first.predicted.plain_timeline
    points = [
        Point("without regions", first.plain_bytes, plain, "projected", projected=timeline),
    ]
    for plan in plans:
        if not plan.recomputes and plan.compiled is None:
            points[0] = dataclasses.replace(points[0], plan=plan)
            continue
        seconds, known = plain + plan.predicted.recompute_seconds, plan.compiled_bytes
        size = plan.projected_bytes if known is None else known
        how = "projected" if known is None else "compiled"
        label = f"{plan.planner}, {pluralize(len(plan.rows), 'region')}"
        timeline = plan.compiled.timeline if plan.compiled else UNKNOWN
        points.append(Point(label, size, seconds, how, plan, compiled=timeline))
    points += [
        Point(label, size, plain + more, "one-liner") for label, size, more in baseline_policies
    ]
    budget = first.budget if budget is None else budget
    return page_of_points(points, plain, budget, first.target, first.time_error, name)


def page_of_points(
    points: Sequence[Point],
    plain: float,
    budget: int | None,
    target: str,
    time_error: float | None,
    name: str,
) -> str:
    """HTML of steps to choose from; ``plain`` are the seconds of the step as it is.

    Raises:
        JaxmemError: there is none.
    """
    if all(point.how == "one-liner" for point in points):
        raise JaxmemError("There is no step to choose from: nothing was considered.")
    strings: dict[str, int] = {}
    values: dict[tuple, int] = {}
    known = known_targets().get(target)
    usable = known.usable_bytes if known else 0
    shown = [_point(point, plain, strings, values) for point in points]
    about = {
        "name": name or "a step",
        "target": f"{target}: {known.description}" if known else target or "no target",
        "budget": budget,
        "usable": usable,
        "error": time_error_text(time_error),
        "plain": plain,
        "actions": _ACTIONS,
        "points": shown,
        "strings": list(strings),
        "values": list(values),
        "timeline": _timeline(points, plain),
    }
    title = f"{about['name']} on {target}" if target else about["name"]
    return filled("choice.html", f"What to save and what to recompute: {title}", about)


def _point(
    point: Point, plain: float, strings: dict[str, int], values: dict[tuple, int]
) -> dict[str, Any]:
    about: dict[str, Any] = {
        "label": point.label,
        "bytes": point.bytes,
        "ms": point.seconds * 1e3,
        "slower": point.seconds / plain - 1 if plain else 0.0,
        "how": point.how,
        "said": point.said,
    }
    if point.compiled.live:
        about["compiled"] = dataclasses.asdict(point.compiled)
    plan = point.plan
    if point.projected.live and plan is None:
        about["timeline"] = dataclasses.asdict(point.projected)
    if plan is None:
        return about
    rows = []
    for one in plan.choices:
        texts = (one.path, one.line, one.operation)
        numbers = [strings.setdefault(text, len(strings)) for text in texts]
        value = (*numbers, one.bytes, round(one.seconds * 1e9))
        number = values.setdefault(value, len(values))
        rows.append((number, _ACTIONS.index(one.action), one.times))
    live = [size + point.outside for size in plan.predicted.timeline.live]
    about["timeline"] = {"live": live, "backward": plan.predicted.timeline.backward}
    return about | {"choices": rows, "host": plan.host_peak}


def _timeline(points: Sequence[Point], plain: float) -> dict[str, Any] | None:
    """That of the step as it is, which is the first point where it was compiled; else projected, by
    the first point that knows it."""
    first = points[0]
    if first.compiled.live and first.seconds == plain:
        return dataclasses.asdict(first.compiled) | {"how": "compiled"}
    for point in points:
        if point.plan and point.plan.predicted.plain_timeline.live:
            found = point.plan.predicted.plain_timeline
            live = [size + point.outside for size in found.live]
            return {"live": live, "backward": found.backward, "how": "projected"}
    return None
