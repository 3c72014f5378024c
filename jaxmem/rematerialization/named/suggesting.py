"""Which values are worth a name, and on which lines they are made."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxmem import jaxprs
from jaxmem.ground.budget import Budget
from jaxmem.ground.checks import check_call, is_count
from jaxmem.ground.errors import PlanError
from jaxmem.ground.words import pluralize
from jaxmem.planning import (
    MOST,
    NamedChoice,
    Names,
    Rates,
    RegionProgram,
    marginal_savings,
    spans_of_blocks,
)
from jaxmem.planning.blocks import TINY
from jaxmem.program import NAMED, Kernel, Operation, Program
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.places import marked, place_of_stretch
from jaxmem.rematerialization.named.suggestions import LINE, Suggestion, Suggestions
from jaxmem.rematerialization.traced import TracedFunction, check_function
from jaxmem.reports.drawn.grouping import common_path, without_numbers
from jaxmem.targets import LocalDevice, Target

# Rows whose choices are weighed together: a sixteenth of what would be exact, and of its seconds.
_WEIGHED = MOST - 4
# Of the most bytes and seconds of a row: less is left out. So is what is tiny beside the largest
# value of the program, as plans save it in any case. Chosen: at half and at twice
# tests/test_names.py passes.
_SMALL = 1e-3


def suggest_names(
    fun: Callable,
    *args: Any,
    target: str | Target | LocalDevice | None = None,
    budget: int | str | None = None,
    reserved: int | str = 0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    offload: bool = False,
    most: int = 16,  # chosen: below the 20 whose sets are all weighed
    **kwargs: Any,
) -> Suggestions:
    """The values of a function that are worth a `jax.ad_checkpoint.checkpoint_name`, with the lines
    that make them.

    A policy saves by name, and what has none is recomputed. This looks into the function's regions;
    where it has none, each scan's body counts as one, and without a scan each block that repeats.
    Equal values, of a line in all layers, are one row. What XLA fuses anyway, and what a derivative
    needs again whatever is saved, is not among them.

    Args:
        fun: a differentiable function, usually the loss.
        *args, **kwargs: its arguments, real or abstract; nothing is allocated, nothing compiled.
        target: the accelerator whose rates decide; None: the default target.
        budget: device bytes as for `jaxmem.plan`: what it would choose is in the rows. None: no
            choice.
        reserved, argnums, has_aux: as for `jaxmem.plan`.
        offload: whether names in the bodies of scans may wait in host memory.
        most: how many rows at most, 1 to 16.

    Raises:
        PlanError: the function has side effects other than prints, or there is nothing in it that
            a name would save.
        BudgetError: the budget does not parse.
        JaxmemError: the target is not known.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> layer = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None))
    >>> def loss(ws, x):
    ...     return jnp.sum(jax.lax.scan(layer, x, ws)[0])
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(8, 512, 512), (8192, 512)]]
    >>> found = jaxmem.suggest_names(loss, *shapes, budget="380MiB")
    >>> [(row.operation, row.type, row.count, row.action) for row in found.rows]
    [('dot_general', 'float32[8192, 512]', 8, 'save')]
    """
    check_function(fun, "jaxmem.suggest_names")
    check_call(fun, args, kwargs, "jaxmem.suggest_names")
    if not is_count(most) or most > _WEIGHED:
        raise PlanError(f"most= is a number of rows, 1 to {_WEIGHED}; got {most!r}.")
    limits = Limits.parse(budget, reserved, target, offload)
    known, rates = limits.target, limits.rates
    traced = TracedFunction(fun, args, kwargs, argnums, has_aux, target=known)
    traced.check_loss("jaxmem.suggest_names", scalar=False)
    collected, regions = _collected(traced, known, rates)
    return _suggestions(collected, regions, rates, limits.budget, known, most)


@dataclasses.dataclass
class _Rows:
    """Values by what they have in common, of all places of a program."""

    rates: Rates
    keys: dict[tuple, int] = dataclasses.field(default_factory=dict)
    made: list[list[tuple[Program, Kernel, int]]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)

    def groups(
        self, program: Program, stretch: jaxprs.RegionStructure, spans: Sequence[tuple[int, int]]
    ) -> tuple[frozenset[int], ...]:
        """Puts the values of a place into rows; which of them are in which."""
        known = {name: at for at, name in enumerate(dict.fromkeys(n for _, n in stretch.names))}
        named = dict(zip(known, marked(program, stretch, spans, known), strict=True))
        name_of = {value: name for name, values in named.items() for value in values}
        found: dict[int, set[int]] = {}
        hidden = _hidden(stretch)
        for start, stop in spans:
            for kernel in program.kernels[start:stop]:
                inner = kernel.fused and operation_at(program, kernel) in hidden
                for value in kernel.reusable_results:
                    name = name_of.get(value, "")
                    if inner and not name:
                        continue
                    row = self._row(program, kernel, value, name)
                    found.setdefault(row, set()).add(value)
        return tuple(frozenset(found.get(row, ())) for row in range(len(self.made)))

    def _row(self, program: Program, kernel: Kernel, value: int, name: str) -> int:
        maker = operation_of(program, kernel)
        where = (without_numbers(maker.path), maker.line, maker.name, program.types[value])
        row = self.keys.setdefault(("named", name) if name else where, len(self.keys))
        if row == len(self.made):
            self.made.append([])
            self.names.append(name)
        self.made[row].append((program, kernel, value))
        return row


def operation_at(program: Program, kernel: Kernel) -> int:
    """The number of the operation that completes a kernel, names apart."""
    made = kernel.operations
    return next((at for at in reversed(made) if program.operations[at].name != NAMED), made[-1])


def operation_of(program: Program, kernel: Kernel) -> Operation:
    """What completes a kernel, names apart."""
    return program.operations[operation_at(program, kernel)]


def _hidden(stretch: jaxprs.RegionStructure) -> set[int]:
    """Steps inside of a call of the user's: of those that one expression makes, as of
    `jax.nn.softmax`, the user has the last in hand."""
    places = [jaxprs.expression_of(step.equation) for step in stretch.flat.steps]
    ends = {stop - 1 for _, stop in stretch.regions}
    return {
        at
        for at, (place, after) in enumerate(itertools.pairwise(places))
        if place is not None and place == after and at not in ends
    }


def _collected(
    traced: TracedFunction, target: Target | None, rates: Rates
) -> tuple[tuple[_Rows, RegionProgram], str]:
    rows = _Rows(rates)
    opened = traced.program.inlined_checkpoints
    stretch = jaxprs.region_structure(traced.closed, without_regions=not opened)
    place = place_of_stretch(traced, stretch, target, rows.groups)
    if opened:
        return (rows, place), f"in {pluralize(opened, 'region')} of its own"
    if place.scans:
        return (rows, place), "it has no regions: the body of each scan counts as one"
    spans = spans_of_blocks(place.program, rates) or ((0, len(place.program.kernels)),)
    rows = _Rows(rates)
    groups = rows.groups(place.program, stretch, spans)
    place = dataclasses.replace(place, spans=spans, groups=groups)
    each = f"each of {len(spans)} blocks" if len(spans) > 1 else "the whole"
    return (rows, place), f"it has no regions: {each} counts as one"


def _suggestions(
    collected: tuple[_Rows, RegionProgram],
    regions: str,
    rates: Rates,
    budget: Budget,
    target: Target | None,
    most: int,
) -> Suggestions:
    rows, place = collected
    counts = [0] * len(rows.made)
    for one, times in place.all():
        for row, values in enumerate(one.groups):
            counts[row] += times * len(values)
    spared = marginal_savings(place, len(counts), rates)
    tiny = TINY * max(max(one.program.sizes, default=0) for one, _ in place.all())
    every = {
        row: _suggestion(rows, row, count, spared[row] / count)
        for row, count in enumerate(counts)
        if count and (spared[row] or rows.names[row])
    }
    every = {row: one for row, one in every.items() if one.named or one.bytes >= tiny}
    if not every:
        raise PlanError(
            "There is no value in the function that a name would save: its regions make nothing "
            "but what XLA fuses, or what their derivatives need again. Let jaxmem.remat place "
            "regions of its own."
        )
    sizes = {row: one.count * one.bytes for row, one in every.items()}
    large, long = _SMALL * max(sizes.values()), _SMALL * max(map(spared.__getitem__, every))
    worthy = [
        row for row in every if rows.names[row] or (sizes[row] >= large and spared[row] >= long)
    ]
    picked = sorted(worthy, key=lambda row: -spared[row])[:most]
    chosen = [every[row] for row in picked]
    found = Names(_of_rows(place, picked), len(picked), rates)
    total = budget.reserve(place.program.boundary_bytes)
    size = total.total(found.projected(frozenset()))
    if budget.allowed is not None:
        choice = found.best_for(total.available)
        size = total.total(found.projected_of(choice))
        chosen = [
            dataclasses.replace(one, action=_action(at, choice)) for at, one in enumerate(chosen)
        ]
    ordered = sorted(_distinct(chosen), key=lambda one: -one.worth)
    return Suggestions(
        tuple(ordered),
        regions,
        size,
        budget.allowed,
        target.name if target else "",
        target.time_error if target else None,
    )


def _action(at: int, choice: NamedChoice) -> str:
    if at in choice.offloaded:
        return "offload"
    return "save" if at in choice.saved else "recompute"


def _of_rows(place: RegionProgram, rows: Sequence[int]) -> RegionProgram:
    """A place with some of its groups."""
    groups = tuple(place.groups[row] if row < len(place.groups) else frozenset() for row in rows)
    scans = {number: _of_rows(scan, rows) for number, scan in place.scans.items()}
    return dataclasses.replace(place, groups=groups, scans=scans)


def _suggestion(rows: _Rows, row: int, count: int, seconds: float) -> Suggestion:
    program, kernel, value = rows.made[row][0]
    maker = operation_of(program, kernel)
    paths = [operation_of(program, one).path for program, one, *_ in rows.made[row]]
    return Suggestion(
        rows.names[row] or _identifier(maker.line),
        bool(rows.names[row]),
        maker.line,
        common_path(paths),
        "name" if maker.name == NAMED else maker.name,
        program.types[value],
        count,
        program.sizes[value],
        seconds,
    )


def _identifier(line: str) -> str:
    """A name for what a line makes: its function and its number."""
    match = LINE.fullmatch(line)
    if match is None:
        return "value"
    function = re.sub(r"\W+", "_", (match[3] or "line").rpartition(".")[2]).strip("_") or "line"
    return f"{function}_{match[2]}"


def _distinct(rows: Iterable[Suggestion]) -> list[Suggestion]:
    """The rows with a name of its own each."""
    rows = list(rows)
    taken = {row.name for row in rows if row.named}
    found = []
    for row in rows:
        name, number = row.name, 0
        while not row.named and name in taken:
            number += 1
            name = f"{row.name}_{number}"
        taken.add(name)
        found.append(dataclasses.replace(row, name=name))
    return found
