"""Operations in the place of steps of a program, each written once where several are alike.

Layers that a loop of Python makes have one attention each, which compute the same of other values:
JAX traces one of them, and what reads the program finds one and the same in each place.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ops.patterns import UseGraph


class Replacements:
    """What is put in the place of steps of a program, by the number of each step whose result comes
    from it."""

    def __init__(self, graph: UseGraph, by_step: dict[int, Any]):
        self.graph, self.by_step = graph, by_step
        self._calls: dict[Hashable, Any] = {}

    def reads(self, at: int) -> list[int]:
        """What is read for the results of a step."""
        replaced = self.by_step.get(at)
        return [*self.graph.flat.steps[at].uses] if replaced is None else replaced.reads

    def results(self, at: int, values: dict[int, Any]) -> dict[int, Any]:
        """What the replacement of a step makes, by number."""
        one, flat = self.by_step[at], self.graph.flat
        steps = [flat.steps[other] for other in self.by_step if self.by_step[other] is one]
        made = [step.outputs[0] for step in steps]

        def run(*read):
            found = one.results(dict(zip(one.reads, read, strict=True)))
            return [found[number] for number in made]

        run.__name__ = type(one).__name__
        key = form_of(flat, one.reads, made), type(one), one.name
        call = self._calls.setdefault(key, jax.jit(run))
        likes = [flat.avals[number] for number in made]
        given = [values[number] for number in one.reads]
        return dict(zip(made, jaxprs.in_automatic_axes(call, likes)(*given), strict=True))


def form_of(flat: jaxprs.FlatJaxpr, reads: Iterable[int], made: Iterable[int]) -> Hashable:
    """What is the same of two parts of a program that compute the same, from where they start to
    what they make, but for the values that they start from."""
    places = {value: place for place, value in enumerate(dict.fromkeys(reads))}
    start = len(places)
    wanted = set(made) - places.keys()
    inside = []
    for step in reversed(flat.steps):
        if not wanted.isdisjoint(step.outputs):
            inside.append(step)
            wanted.update(value for value in step.uses if value not in places)
    found: list[Hashable] = [(flat.avals[value], place) for value, place in places.items()]
    for step in reversed(inside):
        read = [places[x] if isinstance(x, int) else jaxprs.literal_key(x) for x in step.inputs]
        for value in step.outputs:
            places[value] = len(places)
        found.append((step.primitive, jaxprs.parameters_key(step.equation), *read, step.line))
    return start, tuple(found), tuple(places[value] for value in made)
