"""A traced function whose regions stay where they are: which values its names mark."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxmem import jaxprs
from jaxmem.planning import RegionProgram
from jaxmem.program import NAMED, Program, apply_compiler_rules, read_program
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets import Target

# What shows a value that something else made.
_VIEWS = frozenset("bitcast_convert_type copy copy_p expand_dims name reshape squeeze".split())

# The values of a program that each group marks, given the stretch that it was read from and the
# kernels of each region.
Groups = Callable[
    [Program, jaxprs.RegionStructure, Sequence[tuple[int, int]]], tuple[frozenset[int], ...]
]


def names_of(traced: TracedFunction) -> tuple[list[str], list[str]]:
    """The names in regions, and those that are in none, both in the order of the program."""
    inside = dict.fromkeys(name for name, is_inside in jaxprs.names_in(traced.closed) if is_inside)
    every = dict.fromkeys(name for name, _ in jaxprs.names_in(traced.closed))
    return list(inside), [name for name in every if name not in inside]


def named_place(
    traced: TracedFunction, target: Target | None, names: Sequence[str]
) -> RegionProgram:
    """The program of a function by its regions, with the values that some names mark."""
    number = {name: at for at, name in enumerate(names)}

    def groups(program, stretch, spans):
        return marked(program, stretch, spans, number)

    return place_of_stretch(traced, jaxprs.region_structure(traced.closed), target, groups)


def place_of_stretch(
    traced: TracedFunction, stretch: jaxprs.RegionStructure, target: Target | None, groups: Groups
) -> RegionProgram:
    """The place of a stretch; ``groups`` says which values are chosen together."""
    spread = traced.shards(stretch.flat)
    return _place(stretch, traced.read(stretch.flat), spread, target, groups)


def _place(
    stretch: jaxprs.RegionStructure,
    program: Program,
    spread: jaxprs.Shardings,
    target: Target | None,
    groups: Groups,
) -> RegionProgram:
    program = program.as_written
    if target is not None:
        program = apply_compiler_rules(program, target.rules)
    program = _with_names(program, stretch)
    of_step = {kernel.operations[-1]: at for at, kernel in enumerate(program.kernels)}
    spans = []
    for start, stop in stretch.regions:
        inside = [at for at, k in enumerate(program.kernels) if start <= k.operations[-1] < stop]
        if inside:
            spans.append((inside[0], inside[-1] + 1))
    return RegionProgram(
        program,
        tuple(spans),
        groups(program, stretch, spans),
        stretch.length,
        stretch.carry,
        {
            of_step[at]: _place_of_body(stretch.flat.steps[at], inner, spread, target, groups)
            for at, inner in stretch.scans
            if at in of_step and program.kernels[of_step[at]].residuals is not None
        },
    )


def _place_of_body(
    scan: jaxprs.FlatStep,
    body: jaxprs.RegionStructure,
    spread: jaxprs.Shardings,
    target: Target | None,
    groups: Groups,
) -> RegionProgram:
    inside = spread.for_iteration(scan, body.flat)
    return _place(body, read_program(body.flat, shards=inside), inside, target, groups)


def _with_names(program: Program, stretch: jaxprs.RegionStructure) -> Program:
    """The program with every named value in memory: what XLA would fuse is written where its name
    is. A name of what is in memory anyway is that value."""
    maker = {value: one for one in program.operations for value in one.outputs}
    operations = list(program.operations)
    for at, _ in stretch.names:
        made_by = maker.get(_shown(maker, operations[at].inputs[0]))
        if made_by is None or made_by.fused:
            operations[at] = dataclasses.replace(operations[at], name=NAMED)
    return dataclasses.replace(program, operations=tuple(operations))


def _shown(maker: Mapping, value: int) -> int:
    """The value that a view, or a view of a view, shows."""
    while value in maker and maker[value].name in _VIEWS and len(maker[value].inputs) == 1:
        (value,) = maker[value].inputs
    return value


def marked(
    program: Program,
    stretch: jaxprs.RegionStructure,
    spans: Sequence[tuple[int, int]],
    number: Mapping[str, int],
) -> tuple[frozenset[int], ...]:
    """For each name the values in memory that it marks, and that need not be made again for it."""
    maker = {value: one for one in program.operations for value in one.outputs}
    spared = {
        v for a, b in spans for kernel in program.kernels[a:b] for v in kernel.reusable_results
    }
    found: list[set[int]] = [set() for _ in number]
    for at, name in stretch.names:
        operation = program.operations[at]
        (value,) = operation.outputs
        if operation.name != NAMED:
            value = _shown(maker, value)
        if name in number and value in spared:
            found[number[name]].add(value)
    return tuple(map(frozenset, found))
