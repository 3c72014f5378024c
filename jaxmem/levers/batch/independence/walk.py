"""One program, traced for a batch and for a slice, walked in both traces together."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import (
    DIFFERENT_PROGRAM,
    BatchInvariant,
    BatchReduction,
    Kind,
    NotProved,
    PerExample,
    Sizes,
)
from jaxmem.levers.batch.independence.layout import Shapes, flat, is_consistent, reshape_kind
from jaxmem.levers.batch.independence.numbers import constant
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.plain import results as plain_results
from jaxmem.levers.batch.independence.rules import INSIDE

# Which for one example may be missing, or be there besides.
_SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


@dataclasses.dataclass(frozen=True)
class Walk:
    """A program and what to know of it.

    Attributes:
        flats: its traces, of the batch and of the slice.
        sizes: the numbers of examples of both.
        differentiated: whether custom rules will be used: not in a derivative itself.
    """

    flats: tuple[jaxprs.FlatJaxpr, jaxprs.FlatJaxpr]
    sizes: Sizes
    differentiated: bool = True

    @functools.cached_property
    def consts(self) -> list[Kind]:
        whole, sliced = self.flats
        return [constant(*pair) for pair in zip(whole.consts, sliced.consts, strict=True)]

    @functools.cached_property
    def needed(self) -> list[list[jaxprs.FlatStep]]:
        return [_needed(flat) for flat in self.flats]

    def kinds(self, given: Sequence[Kind]) -> list[Kind]:
        """Of its results, for those of its inputs."""
        whole, sliced = self.flats
        outputs = len(whole.outputs)
        if len(whole.consts) != len(sliced.consts) or outputs != len(sliced.outputs):
            return [DIFFERENT_PROGRAM] * outputs
        inputs = enumerate([*self.consts, *given])
        found: dict[tuple[int, int], Kind] = {(number, number): kind for number, kind in inputs}
        ones, twos = (steps[::-1] for steps in self.needed)
        while ones or twos:
            same = bool(ones and twos) and _same_form(ones[-1], twos[-1])
            if same and _is_known(found, ones[-1], twos[-1]):
                self.step(found, ones.pop(), twos.pop())
            elif ones and ones[-1].primitive in _SHAPES:
                self.shape_alone(found, ones.pop(), 0)
            elif twos and twos[-1].primitive in _SHAPES:
                self.shape_alone(found, twos.pop(), 1)
            else:
                step = (ones or twos)[-1]
                return [
                    NotProved(f"{DIFFERENT_PROGRAM.why} ({step.primitive} at {step.line})")
                ] * outputs
        pairs = zip(whole.outputs, sliced.outputs, strict=True)
        return [_read(found, *pair) for pair in pairs]

    def step(self, found: dict, one: jaxprs.FlatStep, two: jaxprs.FlatStep) -> None:
        """One equation of both programs."""
        kinds = [_read(found, *pair) for pair in zip(one.inputs, two.inputs, strict=True)]
        shapes = self.shapes(one.inputs, two.inputs)
        results = self.shapes(one.outputs, two.outputs)
        operation = BatchOperation((one, two), kinds, shapes, results, self.sizes)
        made = zip(one.outputs, two.outputs, strict=True)
        found.update(zip(made, self.results(operation), strict=True))

    def shape_alone(self, found: dict, step: jaxprs.FlatStep, side: int) -> None:
        """A change of shape that only one of the programs has: for one example it may be none."""
        for pair, kind in list(found.items()):
            if pair[side] != step.inputs[0]:
                continue
            (shapes,) = self.shapes([pair[0]], [pair[1]])
            after = tuple(self.flats[side].avals[step.outputs[0]].shape)
            new = (after, shapes[1]) if side == 0 else (shapes[0], after)
            made: Kind | None = None
            if math.prod(after) == math.prod(shapes[side]) and _keeps_order(step):
                elements = flat(kind, shapes, self.sizes)
                made = elements and reshape_kind(elements, new, self.sizes)
            elif side == 0 and len(after) == len(shapes[1]):  # what widens nothing for one example
                (made,) = plain_results(
                    BatchOperation((step, step), [kind], [shapes], [new], self.sizes)
                )
            if made is not None and not isinstance(made, NotProved):
                number = step.outputs[0]
                found[(number, pair[1]) if side == 0 else (pair[0], number)] = made

    def shapes(self, ones: Sequence[Any], twos: Sequence[Any]) -> list[Shapes]:
        """Of values of both programs."""

        def shape(flat, value):
            return tuple(flat.avals[value].shape if isinstance(value, int) else value.aval.shape)

        whole, sliced = self.flats
        return [
            (shape(whole, one), shape(sliced, two)) for one, two in zip(ones, twos, strict=True)
        ]

    def results(self, operation: BatchOperation) -> list[Kind]:
        """Of one equation; of one with programs inside the results must lie as their shapes say."""
        rule = INSIDE.get(operation.name)
        if rule is None and jaxprs.is_region(operation.steps[0].equation):
            rule = Walk.called
        if rule is None:
            return plain_results(operation)
        found = rule(self, operation)
        for at, kind in enumerate(found):
            if isinstance(kind, PerExample) and not is_consistent(
                kind, operation.results[at], self.sizes
            ):
                found[at] = operation.mixes_examples
            grows = operation.results[at][0] != operation.results[at][1]
            known = isinstance(kind, BatchInvariant) and kind.value is not None
            if grows and not known and isinstance(kind, BatchInvariant | BatchReduction):
                found[at] = operation.mixes_examples
        return found

    def inner(self, flats: Sequence[jaxprs.FlatJaxpr]) -> "Walk":
        """Of a program inside this one."""
        whole, sliced = flats
        return dataclasses.replace(self, flats=(whole, sliced))

    def called(self, operation: BatchOperation) -> list[Kind]:
        """Of a program that is called as it is."""
        flats = [jaxprs.called_jaxpr(step.equation) for step in operation.steps]
        return self.inner(flats).kinds(operation.kinds)


def _keeps_order(step: jaxprs.FlatStep) -> bool:
    """Whether a change of shape leaves the elements in row-major order."""
    params = step.equation.params
    axes = list(params.get("broadcast_dimensions", ()))
    reordered = step.primitive == "reshape" and params.get("dimensions") is not None
    return axes == sorted(axes) and not reordered


def _same_form(one: jaxprs.FlatStep, two: jaxprs.FlatStep) -> bool:
    sizes = (len(one.inputs), len(one.outputs)), (len(two.inputs), len(two.outputs))
    return one.primitive == two.primitive and sizes[0] == sizes[1]


def _is_known(found: dict, one: jaxprs.FlatStep, two: jaxprs.FlatStep) -> bool:
    """Whether the operands of two steps are the same values in both programs."""
    return all(
        pair in found if all(numbers) else not any(numbers)
        for pair in zip(one.inputs, two.inputs, strict=True)
        for numbers in [[isinstance(value, int) for value in pair]]
    )


def _read(found: dict[tuple[int, int], Kind], one: Any, two: Any) -> Kind:
    """The kind of an operand, which is the same value in both programs."""
    if isinstance(one, int) and isinstance(two, int):
        return found.get((one, two), DIFFERENT_PROGRAM)
    if isinstance(one, int) or isinstance(two, int):
        return DIFFERENT_PROGRAM
    return constant(one.val, two.val)


def _needed(flat: jaxprs.FlatJaxpr) -> list[jaxprs.FlatStep]:
    """The steps that the results are made of: metrics beside a loss may be anything."""
    wanted = flat.made_of(flat.outputs)
    return [step for step in flat.steps if not wanted.isdisjoint(step.outputs)]
