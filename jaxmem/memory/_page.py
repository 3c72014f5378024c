"""The report as one self-contained page."""

import html
import importlib.resources
import json
from typing import Any

import numpy as np

from jaxmem._errors import JaxmemError
from jaxmem.memory._plot import COLORS

_POINTS = 4000  # at most, in the page's timeline; each of more then stands for its worst
_BUFFERS = 1500  # rows of the page's table; the rest is one row


def page(about: dict[str, Any]) -> str:
    """HTML of a report's plain data (`MemoryReport.to_json`): no network, no other file.

    Raises:
        JaxmemError: the report has no timeline.
    """
    if "timeline" not in about:
        raise JaxmemError(
            f"There is no timeline of what was compiled for {about['target']}, and so no page of "
            "it. Name a GPU, as in jaxmem.memory(step, *args, target='h200')."
        )
    template = importlib.resources.files("jaxmem.memory").joinpath("page.html").read_text("utf-8")
    shown = about | {
        "timeline": _thinned(about["timeline"]),
        "buffers": _shortened(about["buffers"]),
        "colors": COLORS,
    }
    data = json.dumps(shown, separators=(",", ":")).replace("</", "<\\/")
    title = html.escape(f"Memory on {about['target']}")
    return template.replace("{{title}}", title).replace("{{data}}", data)


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
