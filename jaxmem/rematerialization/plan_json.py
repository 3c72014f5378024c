"""Reads a plan from its JSON."""

import json
from typing import Any, TypeVar

from jaxmem.ground.errors import PlanError
from jaxmem.loops import Schedule
from jaxmem.planning import LeadingIterations, Loop, Region, Segment
from jaxmem.rematerialization.choices import Choice, Row
from jaxmem.rematerialization.plan_facts import Compiled, OwnRegions, PlannedFor, Predicted
from jaxmem.rematerialization.timelines import PlanTimeline

T = TypeVar("T")


def read_plan(cls: type[T], text: str) -> T:
    """The plan whose JSON it is.

    Raises:
        PlanError: the text is not a plan.
    """
    try:
        fields = json.loads(text)
        fields["regions"] = _regions(fields["regions"])
        fields["loops"] = tuple(map(_loop, fields["loops"]))
        fields["segments"] = tuple(Segment(**one) for one in fields["segments"])
        predicted = fields["predicted"]
        for name in ("timeline", "plain_timeline"):
            predicted[name] = PlanTimeline.read(predicted[name])
        fields["predicted"] = Predicted(**predicted)
        if compiled := fields["compiled"]:
            compiled["timeline"] = PlanTimeline.read(compiled["timeline"])
            compiled["options"] = tuple(map(tuple, compiled["options"]))
            fields["compiled"] = Compiled(**compiled)
        fields["own_regions"] = OwnRegions.read(fields["own_regions"])
        fields["planned_for"] = PlannedFor.read(fields["planned_for"])
        fields["inputs"] = tuple(fields["inputs"])
        if fields["differentiated"] is not None:
            fields["differentiated"] = tuple(fields["differentiated"])
        fields["rows"] = tuple(Row(**row) for row in fields["rows"])
        fields["choices"] = tuple(Choice(**choice) for choice in fields["choices"])
        return cls(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(
            f"This is not the JSON of a plan ({error}); pass text that Plan.to_json() wrote."
        ) from error


def _loop(row: dict[str, Any]) -> Loop:
    regions, schedule, head = _regions(row["regions"]), row["schedule"], row["head"]
    return Loop(
        row["kernel"],
        tuple(row["saved"]),
        regions,
        tuple(row["offloaded"]),
        schedule and Schedule(**schedule),
        row["whole"],
        tuple(map(_loop, row["loops"])),
        head and LeadingIterations(head["count"], _loop(head["loop"])),
        row["parted"],
    )


def _regions(rows: list[dict[str, Any]]) -> tuple[Region, ...]:
    return tuple(
        Region(row["start"], row["stop"], tuple(row["saved"]), _regions(row["regions"]))
        for row in rows
    )
