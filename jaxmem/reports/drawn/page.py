"""Reports as self-contained pages: no network, no other file."""

import html
import importlib.resources
import json
from typing import Any

import numpy as np

from jaxmem.reports.drawn.plot import COLORS, check_timeline

_POINTS = 4000  # at most, in a timeline; each of more then stands for its worst
_BUFFERS = 1500  # rows of the table of buffers; the rest is one row


def page(about: dict[str, Any]) -> str:
    """HTML of a report's plain data (`MemoryReport.to_json`).

    Raises:
        JaxmemError: the report has no timeline.
    """
    check_timeline(about)
    shown = about | {
        "timeline": _thinned(about["timeline"]),
        "buffers": _shortened(about["buffers"]),
        "colors": COLORS,
    }
    return _filled("report.html", f"Memory on {about['target']}", shown)


def diff_page(before: dict[str, Any], after: dict[str, Any], more: dict[str, Any]) -> str:
    """HTML of two reports' plain data beside each other, with what a diff says of them.

    Raises:
        JaxmemError: a report has no timeline.
    """
    shown: dict[str, Any] = {"colors": COLORS, **more}
    for name, about in (("before", before), ("after", after)):
        check_timeline(about)
        kept = {key: value for key, value in about.items() if key != "buffers"}
        shown[name] = kept | {"timeline": _thinned(about["timeline"])}
    return _filled("diff.html", f"Memory on {before['target']} and {after['target']}", shown)


def _filled(name: str, title: str, shown: dict[str, Any]) -> str:
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
