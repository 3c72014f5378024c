"""A plan as it is printed."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.words import pluralize
from jaxmem.rematerialization.choices import Choice, Row
from jaxmem.reports.drawn.grouping import common_path, grouped, without_numbers
from jaxmem.reports.drawn.tables import Part, Table
from jaxmem.reports.drawn.text import columns, truncate
from jaxmem.reports.drawn.verdict import short_verdict
from jaxmem.targets import example_target

_FUNCTION = re.compile(r" \([\w.<>]+\)(?=\))")  # that of a line, as in "(model.py:3 (Net.call))"
_SCAN = re.compile(r"(\d+ x scan.*?): ")  # what stands before the region of a scan's body
_FILE = re.compile(r"\(([^():]+):\d+")
_NEVER_AGAIN = (  # of a value in a region that is not among those that the region saves
    "it is not recomputed: either the next region starts from it, so it is kept, or nothing in the "
    "backward pass reads it"
)
_TIMES = {1: "once", 2: "twice"}
_LINE = re.compile(r" \([^():]+:(\d+)\)")


def time_error_text(error: float | None) -> str:
    """What stands beside a predicted time: how far off it may be, if that has been measured."""
    return "(unchecked)" if error is None else f"±{error:.0%}"


def answer(plan: Any) -> str:
    """Whether it fits, and what it costs: ``"fits: 72.00 MiB of 80.00 MiB (compiled), 17.7% slower
    than without regions (unchecked)"``."""
    known = plan.compiled_bytes
    size, how = (plan.projected_bytes, "projected") if known is None else (known, "compiled")
    predicted = plan.predicted
    error = time_error_text(plan.time_error)
    more = f"{predicted.recompute_share:.1%} slower than without regions {error}"
    if not plan.recomputes:
        more = "nothing is recomputed"
    return f"{short_verdict(size, plan.budget)} ({how}), {more}"


def plan_parts(plan: Any) -> Iterator[Part]:
    """The answer, what it rests on, and the regions, equal ones as one row."""
    predicted, share = plan.predicted, ""
    if predicted.flops:  # a program may have no matmul
        share = f" ({predicted.recompute_flops / predicted.flops:.1%} of a forward pass)"
    yield answer(plan)
    regions = pluralize(len(plan.rows), "region")
    if plan.segments:  # all have one policy
        regions += f", jax.checkpoint by {plan.segments[0].policy} on each"
    if plan.keeps_own_regions:
        regions = "none better than the function's own regions, which stay"
    yield f"{plan.planner} plan, {regions} (program {plan.fingerprint})"
    yield (
        f"  projected {format_bytes(plan.projected_bytes)}, without regions "
        f"{format_bytes(plan.plain_bytes)}"
    )
    if plan.own_regions.written:
        yield (
            f"  as written, with {pluralize(plan.own_regions.count, 'region')} of its own: "
            f"projected {format_bytes(plan.own_regions.written.bytes)}, recomputes "
            f"{plan.own_regions.written.recompute_flops / 1e9:.4g} GFLOP "
            f"({plan.own_regions.written.recompute_share:.1%} of a step)"
        )
    if plan.compiled:
        work = ""
        if plan.compiled.flops is not None and plan.compiled.moved is not None:
            work = f": {plan.compiled.flops / 1e9:.4g} GFLOP, moves "
            work += format_bytes(plan.compiled.moved)
        by = " with plan.compiler_options" if plan.compiler_options else ""
        yield f"  compiled  {format_bytes(plan.compiled.bytes)} for {plan.target}{by}{work}"
    if plan.compiled and plan.compiled.options:
        options = ", ".join(f"{name}={value}" for name, value in plan.compiled.options)
        yield f"  with {options}, as XLA refuses it without; plan.compiler_options has it"
    if plan.widens_bfloat16:
        yield f"  {plan.target} computes bfloat16 in float32, from copies"
    if predicted.host_peak:
        yield f"  in host memory {format_bytes(plan.host_peak)}"
    if plan.compiled and plan.compiled.xla_pass_bytes is not None:
        yield (
            f"  XLA's own rematerialization pass would make it "
            f"{format_bytes(plan.compiled.xla_pass_bytes)}; plan.compiler_options turns it off"
        )
    if plan.budget is not None:
        reserved = f", of which {format_bytes(plan.reserved)} reserved" if plan.reserved else ""
        yield f"  budget    {format_bytes(plan.budget)}{reserved}"
    if plan.recomputes:
        yield (
            f"  recomputes {predicted.recompute_flops / 1e9:.4g} GFLOP{share}, moves "
            f"{format_bytes(predicted.recompute_moved)}"
        )
    if bound := vars(plan).get("bound"):  # where it was asked for
        yield f"  {bound}"
    where = f"on {plan.target}"
    if not plan.target:
        where = f"at the rates of {example_target().name}, as no target is given"
    yield (
        f"  about {predicted.recompute_seconds * 1e3:.3g} ms beside "
        f"{predicted.seconds * 3e3:.3g} ms {time_error_text(plan.time_error)} {where}"
    )
    if plan.rows:
        yield _regions(plan.rows)


def other_program(plan: Any, fingerprint: str, inputs: Sequence[tuple[str, str]]) -> str:
    """Why a plan is not one of the program with this fingerprint and these inputs."""
    found = [kind for _, kind in inputs]
    differing = [
        f"{name} is {kind}, and the plan was made for {planned}"
        for (name, kind), planned in zip(inputs, plan.inputs, strict=False)
        if kind != planned
    ]
    if len(found) != len(plan.inputs):
        said = (
            f"it takes {pluralize(len(found), 'array')}, and the plan was made for "
            f"{len(plan.inputs)}{_numbers(plan, inputs)}"
        )
    elif differing:
        said = "; ".join(differing[:3]) + (" ..." if len(differing) > 3 else "")
    else:
        said = (
            "its arrays are the same, and its operations are others (a step with sharding= "
            "gathers its parameters at stage 3, and one with precision= casts: plan step.loss)"
        )
    return (
        f"This plan belongs to another program: {said}. A plan holds for one function at one "
        "set of shapes and dtypes. Make another with jaxmem.plan(), or leave it to "
        "jaxmem.remat(fun, budget=...), which plans at each new shape; where it is the last "
        "batch of an epoch that is smaller, leave it out or pad it. (Programs "
        f"{plan.fingerprint} and {fingerprint}.)"
    )


def _numbers(plan: Any, inputs: Sequence[tuple[str, str]]) -> str:
    """What may be in the way where a program takes more arrays than a plan, or fewer: numbers."""
    scalars = [name for name, kind in inputs if kind.endswith("[]")]
    if len(inputs) > len(plan.inputs) and scalars:
        which = " or ".join(scalars[:3]) + (" or another scalar" if len(scalars) > 3 else "")
        return (
            " (a Python number is none where the plan is made, and one under jax.jit: if "
            f"{which} is one, make it an array, such as jnp.float32(0.1), for both)"
        )
    if len(inputs) < len(plan.inputs) and any(kind.endswith("[]") for kind in plan.inputs):
        return (
            " (a Python number is no array outside of jax.jit: if the call has one where the plan "
            "was made with an array, make it an array too, such as jnp.float32(0.1))"
        )
    return ""


def explanation(plan: Any, choices: Sequence[Choice]) -> str:
    """Why a plan saves some of its values or not: a sentence for each, one for those of layers that
    differ by their numbers alone."""
    told = [(choice, _made(choice), _why(plan, choice)) for choice in choices]
    groups = grouped(told, lambda one: (without_numbers(one[1]), one[2]))
    lines = []
    for group in groups:
        made = common_path([made for _, made, _ in group])
        if len(group) > 1:
            made += f", {len(group)} values"
        lines.append(f"{made}: {group[0][2]}")
    return "\n".join(lines)


def _made(choice: Choice) -> str:
    return f"{choice.operation} in {choice.path or 'the function'} ({choice.line})"


def _why(plan: Any, choice: Choice) -> str:
    rate = choice.seconds / max(choice.bytes, 1) * 2**30
    cost = (
        f"{format_bytes(choice.bytes)}; making it again takes {choice.seconds * 1e6:.0f} us, "
        f"{rate * 1e3:.2f} ms per GiB {time_error_text(plan.time_error)}"
    )
    saved = [c for c in plan.choices if c.action == "save"]
    again = [c for c in plan.choices if c.action == "recompute"]

    def average(choices: list[Choice]) -> str:
        size = max(sum(c.bytes for c in choices), 1)
        rate = sum(c.seconds for c in choices) / size * 2**30
        return f"{rate * 1e3:.2f} ms per GiB {time_error_text(plan.time_error)}"

    why = {
        "keep": "it is outside of all regions, so nothing of it is recomputed",
        "offload": "it waits in host memory for the backward pass, beside which it is fetched",
        "save": "it is saved, and what is recomputed instead averages "
        + (average(again) if again else "nothing"),
        "recompute": f"it is recomputed {_TIMES.get(choice.times, f'{choice.times} times')} in the "
        "backward pass, and what is saved instead averages "
        + (average(saved) if saved else "nothing"),
    }[choice.action]
    if choice.action == "recompute" and not choice.times:
        why = _NEVER_AGAIN
    return f"{cost}. In this plan {why}."


def _regions(rows: tuple[Row, ...]) -> Table:
    found = list(_grouped(_tree(rows)))
    files = {name for row in rows for end in (row.first, row.last) for name in _FILE.findall(end)}
    numbers = [
        (
            format_bytes(one.saved_bytes) if one.saved_bytes else "",
            format_bytes(one.kept_bytes) if one.kept_bytes else "",
            f"{one.flops / 1e9:.4g}" if one.flops else "",
            f"x {count}" if count > 1 else "",
        )
        for one, count in ((alike[0], len(alike)) for _, alike in found)
    ]
    heads = ("saves", "keeps", "GFLOP more", "times")
    shown = [at for at in range(len(heads)) if any(row[at] for row in numbers)]
    room = columns() - 2 - sum(2 + max(len(heads[at]), 10) for at in shown)
    cells = []
    for row, (depth, alike) in zip(numbers, found, strict=True):
        if scan := _SCAN.match(alike[0].first):
            cells.append((*[""] * (len(shown) + 1), scan[1]))
        place = _place(alike, depth + bool(scan), room, len(files) == 1)
        cells.append(("", *(row[at] for at in shown), place))
    where = f"region (lines of {files.pop()})" if len(files) == 1 else "region"
    return Table(["", *(heads[at] for at in shown), where], cells, left=(len(shown) + 1,))


def _place(alike: list[Row], depth: int, room: int, one_file: bool) -> str:
    """Where a region begins and ends, or regions that differ by numbers alone."""
    room -= 2 * depth
    first, last = (
        _FUNCTION.sub("", common_path([_SCAN.sub("", getattr(row, name)) for row in alike]))
        for name in ("first", "last")
    )
    if one_file:
        first, last = (_LINE.sub(r":\1", name) for name in (first, last))
    if first == last:
        return "  " * depth + first
    first = truncate(first, max(room - len(last) - 4, room // 2 - 2))
    return f"{'  ' * depth}{first} .. {truncate(last, room - len(first) - 4)}"


_Node = tuple[Row, tuple]  # a region and those inside it


def _tree(rows: tuple[Row, ...]) -> tuple[_Node, ...]:
    found: list[_Node] = []
    starts = [at for at, row in enumerate(rows) if row.depth == rows[0].depth]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        inside = rows[start + 1 : stop]
        found.append((rows[start], _tree(inside) if inside else ()))
    return tuple(found)


def _alike(node: _Node) -> tuple:
    """What equal regions have in common: all but the numbers of their modules."""
    row, inside = node
    names = without_numbers(row.first), without_numbers(row.last)
    return *names, row.saved_bytes, row.kept_bytes, row.flops, tuple(map(_alike, inside))


def _grouped(*trees: tuple[_Node, ...], depth: int = 0) -> Iterator[tuple[int, list[Row]]]:
    """Equal regions together, each with its depth; ``trees`` are equal but for numbers."""
    for places in grouped(range(len(trees[0])), lambda at: _alike(trees[0][at])):
        nodes = [tree[at] for tree in trees for at in places]
        yield depth, [row for row, _ in nodes]
        if nodes[0][1]:
            yield from _grouped(*(inside for _, inside in nodes), depth=depth + 1)
