"""The page of a fit: every step that was considered, and what each does with each value."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jaxmem.rematerialization import Plan
from jaxmem.rematerialization.choice_page import Point, page_of_points
from jaxmem.rematerialization.timelines import UNKNOWN, PlanTimeline

if TYPE_CHECKING:
    from jaxmem.fitting.search import LeverSearch
    from jaxmem.fitting.table import Candidate, Fitting

# Steps of a page that were not considered. Chosen: half and twice change what is shown alone.
_SHOWN = 10


def page_of_fitting(fitting: "Fitting", more: "Iterable[Candidate]" = (), name: str = "") -> str:
    """HTML of what a fit considered, of the policies of `jax.checkpoint`, and of ``more`` steps
    that it did not consider."""
    seen = {(one.levers, one.projected) for one in fitting.considered}
    others = [one for one in more if (one.levers, one.projected) not in seen]
    points = [_point(one) for one in (*fitting.considered, *others) if one.plan]
    plain = fitting.plain
    seconds = plain.seconds if plain else min((point.seconds for point in points), default=0.0)
    # The timeline of the step as it is, is that of the first point.
    points.sort(key=lambda point: plain is None or point.plan is not plain.plan)
    points += [
        Point(label, size, time, "one-liner") for label, size, time in fitting.baseline_policies
    ]
    known = fitting.target.known
    error = known.time_error if known else None
    return page_of_points(points, seconds, fitting.budget, fitting.target.name, error, name)


def frontier_of(
    search: "LeverSearch", fitting: "Fitting", count: int = _SHOWN
) -> "Iterator[Candidate]":
    """Plans from no recomputation to the least memory, of the step as it is and with the levers of
    the chosen one; bytes are projected."""
    costs, chosen = search.costs, fitting.chosen
    settings = [search.workload.as_is, *([chosen.levers] if chosen else [])]
    for levers in dict.fromkeys(settings):
        plain = costs.without_recomputation(levers)
        yield plain
        low, high = costs.plan(levers, 1), plain.projected or 0
        if isinstance(low, Plan):
            continue
        for part in range(count):
            found = costs.plan(levers, int(low + (high - low) * (part / count) ** 2))
            if isinstance(found, Plan):
                yield costs.candidate_of(levers, found)


def _point(one: "Candidate") -> Point:
    assert one.plan and one.projected is not None
    size, how = one.projected, "projected"
    if one.compiled is not None:
        size, how = one.compiled, "compiled"
    parts = [one.name] if one.levers.used() or not one.plan.recomputes else []
    label = ", ".join(parts + [f"recompute {one.remat}"] * one.plan.recomputes)
    outside = one.projected - one.plan.projected_bytes
    return Point(label, size, one.seconds, how, one.plan, outside, one.verdict, _compiled(one))


def _compiled(one: "Candidate") -> PlanTimeline:
    """Bytes along what was compiled. Its backward pass begins where the last of the forward pass
    that is no recomputation ends."""
    report = one.report
    if report is None or not report.has_timeline:
        return UNKNOWN
    forward = [at for at, phase in enumerate(report.phases) if phase == "forward"]
    first = forward[-1] + 1 if forward else 0
    return PlanTimeline.of(report.timeline.live.tolist(), first, int)
