"""Reports as self-contained pages: no network, no other file."""

import html
import importlib.resources
import json
from typing import Any

import numpy as np

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.drawn.grouping import common_path, group_numbers, without_numbers
from jaxmem.reports.drawn.plot import COLORS, check_timeline
from jaxmem.reports.drawn.verdict import fits, verdict
from jaxmem.reports.where.padding import WORTH_A_LOOK

_POINTS = 4000  # at most, in a timeline; each of more then stands for its worst
_PADDED = 20  # rows of the table of what is padded
_BUFFERS = 1500  # rows of the table of buffers; the rest is one row


def page(about: dict[str, Any], budget: int | None = None, name: str = "") -> str:
    """HTML of a report's plain data (`MemoryReport.to_json`).

    Args:
        about: the data.
        budget: bytes that are allowed; None: what is usable on the target.
        name: of the step; otherwise its function's.

    Raises:
        JaxmemError: the report has no timeline.
    """
    check_timeline(about)
    shown = about | {
        "timeline": _thinned(about["timeline"]),
        "padding": _padding(about),
        "colors": COLORS,
        **_grouped(_shortened(about["buffers"])),
        **_answer(about, budget, name),
    }
    return filled("report.html", _title(shown), shown)


def diff_page(
    before: dict[str, Any],
    after: dict[str, Any],
    more: dict[str, Any],
    budget: int | None = None,
) -> str:
    """HTML of two reports' plain data beside each other, with what a diff says of them; the budget
    in bytes is that of the second one.

    Raises:
        JaxmemError: a report has no timeline.
    """
    shown: dict[str, Any] = {"colors": COLORS, **more, **_answer(after, budget, "")}
    shown["answer"] = "after: " + verdict(after["device"], budget, after.get("usable") or 0)
    for name, about in (("before", before), ("after", after)):
        check_timeline(about)
        kept = {key: value for key, value in about.items() if key != "buffers"}
        shown[name] = kept | {"timeline": _thinned(about["timeline"])}
    return filled("diff.html", f"What changed in {_title(shown)}", shown)


def _answer(about: dict[str, Any], budget: int | None, name: str) -> dict[str, Any]:
    """What a page says first: of which step, and whether it fits."""
    device, usable = about["device"], about.get("usable") or 0
    return {
        "name": name or about.get("name") or "a step",
        "budget": budget,
        "usable": usable,
        "fits": fits(device, budget, usable),
        "verdict": verdict(device, budget, usable),
    }


def _padding(about: dict[str, Any]) -> list[dict[str, Any]]:
    """What tiles pad, where that is worth a look."""
    rows = about.get("padding", [])
    total = sum(one["bytes"] - one["logical"] for one in rows)
    return rows[:_PADDED] if total >= WORTH_A_LOOK * about["device"] else []


def _title(shown: dict[str, Any]) -> str:
    about = shown.get("after", shown)
    target = about["target"].partition(":")[0]
    return f"{shown['name']} on {target}: {format_bytes(about['device'])}"


def filled(name: str, title: str, shown: dict[str, Any]) -> str:
    """A page of the folder ``pages`` with its style, its scripts and its data in it."""
    folder = importlib.resources.files("jaxmem.reports.drawn").joinpath("pages")
    parts = {
        "title": html.escape(title),
        "style": folder.joinpath("style.css").read_text("utf-8"),
        "common": folder.joinpath("common.js").read_text("utf-8"),
        "data": json.dumps(shown, separators=(",", ":")).replace("</", "<\\/"),
    }
    text = folder.joinpath(name).read_text("utf-8")
    for part, value in parts.items():  # the data last: what it holds is not looked at again
        text = text.replace(f"{{{{{part}}}}}", value)
    return text


def _thinned(timeline: dict[str, Any]) -> dict[str, Any]:
    """At most `_POINTS` points: of each stretch of the schedule the one with the most bytes."""
    live = np.asarray(timeline["live"])
    step = -(-len(live) // _POINTS)
    kept = [
        start + int(np.argmax(live[start : start + step])) for start in range(0, len(live), step)
    ]
    return {
        "points": kept,
        "total_points": len(live),
        "schedule": [timeline["schedule"][at] for at in kept],
        "phases": [timeline["phases"][at] for at in kept],
        "live": live[kept].tolist(),
        "live_by_kind": {
            kind: [row[at] for at in kept]
            for kind, row in timeline["live_by_kind"].items()
            if any(row)
        },
        **_origins(timeline, kept),
    }


def _origins(timeline: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """Lines and modules of those points; none in what an earlier version wrote."""
    if "origin" not in timeline:
        return {}
    fields = ("operation", "source", "module")
    return {
        "origins": [{name: one[name] for name in fields} for one in timeline["origins"]],
        "origin": [timeline["origin"][at] for at in kept],
    }


def _grouped(buffers: list[dict[str, Any]]) -> dict[str, Any]:
    """The buffers with the number of their group, and what each group's modules are called."""
    alike = "bytes shape dtype operation source phase kind".split()
    keys = [
        (without_numbers(one["module"]), *(str(one[name]) for name in alike)) for one in buffers
    ]
    numbers = group_numbers(keys)
    modules: dict[int, list[str]] = {}
    for number, one in zip(numbers, buffers, strict=True):
        modules.setdefault(number, []).append(one["module"])
    return {
        "buffers": [one | {"group": number} for number, one in zip(numbers, buffers, strict=True)],
        "groups": [common_path(paths) for paths in modules.values()],
    }


def _shortened(buffers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    fields = "name bytes shape dtype operation source module phase kind offset first last".split()
    fields.append("shared_with")
    shown = [{name: buffer[name] for name in fields} for buffer in buffers[:_BUFFERS]]
    rest = sum(buffer["bytes"] for buffer in buffers[_BUFFERS:])
    if rest:
        some = dict.fromkeys(fields, "") | {"shape": [], "shared_with": [], "bytes": rest}
        name = f"({len(buffers) - _BUFFERS} smaller)"
        shown.append(some | {"name": name, "module": name, "phase": name, "kind": name})
    return shown
