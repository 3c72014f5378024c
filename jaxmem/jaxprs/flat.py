"""A traced function as one flat list of equations, and how they are evaluated."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import line_of, operation_of
from jaxmem.jaxprs.sources import at_source, no_names, traceback_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class FlatStep:
    """One equation of a flat jaxpr: operands are value numbers or literals; ``callers`` are the
    calls that it was inlined from, the innermost first."""

    equation: JaxprEqn
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    name_stack: Any
    callers: tuple[JaxprEqn, ...] = ()

    @property
    def uses(self) -> Iterator[int]:
        """The numbers of the values it reads."""
        return (value for value in self.inputs if isinstance(value, int))

    @property
    def primitive(self) -> str:
        return operation_of(self.equation)

    @property
    def line(self) -> str:
        """``file:line (function)`` of the user's frame that made it."""
        return line_of(self.located)

    @property
    def located(self) -> JaxprEqn:
        """The equation, or the innermost of its callers, that has a frame of the user's: JAX roots
        the tracebacks inside of a call in the call."""
        equations = (self.equation, *self.callers)
        return next((one for one in equations if line_of(one) != "unknown"), self.equation)


@dataclasses.dataclass(frozen=True)
class FlatJaxpr:
    """A traced function as one list of equations over numbered values.

    Values 0 to ``len(consts) + number of array arguments - 1`` are its inputs, the closed-over
    ones (``consts``, possibly tracers) first. ``regions`` are the bounds of the user's own regions
    that were written in place among the steps, and ``inlined_checkpoints`` is how many there were,
    with those in the bodies of scans. ``scans`` are the scans among the steps that had some in
    their bodies, by number of the step, as they were written. ``merged`` are values that are
    computed several times as they were written. ``prints`` are steps for people to look at, in
    their order, where they were set apart: no value depends on them. ``has_plainer_gathers``:
    whether any was written as what it is (`jaxmem.jaxprs.gathers`).
    """

    steps: tuple[FlatStep, ...]
    avals: tuple[Any, ...]
    consts: tuple[Any, ...]
    input_count: int
    outputs: tuple[int | Literal, ...]
    out_tree: Any
    regions: tuple[tuple[int, int], ...] = ()
    inlined_checkpoints: int = 0
    scans: tuple[tuple[int, JaxprEqn], ...] = ()
    merged: frozenset[int] = frozenset()
    prints: tuple[FlatStep, ...] = ()
    has_plainer_gathers: bool = False

    @property
    def observed(self) -> tuple[int, ...]:
        """Numbers of the values that somebody sees in the end: its results, and what is printed."""
        printed = (value for step in self.prints for value in step.uses)
        return (*(value for value in self.outputs if isinstance(value, int)), *printed)

    @property
    def arrays_closed_over(self) -> set[int]:
        """Numbers of the constants that are arrays, which no derivative is taken of; of a tracer
        one may be."""
        return {at for at, one in enumerate(self.consts) if not isinstance(one, jax.core.Tracer)}

    def aval(self, value: int | Literal) -> Any:
        """The shape and dtype of one of its values."""
        return self.avals[value] if isinstance(value, int) else value.aval

    def makers(self) -> dict[int, FlatStep]:
        """The step that makes each value, but for inputs."""
        return {value: step for step in self.steps for value in step.outputs}

    def made_of(self, results: Iterable[int | Literal]) -> set[int]:
        """The values that some values are made of, and these."""
        found = {value for value in results if isinstance(value, int)}
        for step in reversed(self.steps):
            if not found.isdisjoint(step.outputs):
                found.update(step.uses)
        return found

    def run(self, steps: Iterable[FlatStep], values: dict[int, Any]) -> None:
        """Evaluates equations, reading and writing ``values`` by number."""
        for step in steps:
            results = evaluate(step, [read(values, operand) for operand in step.inputs])
            values.update(zip(step.outputs, results, strict=True))


def evaluate(step: FlatStep, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of one equation on other operands, with parameters changed as given."""
    equation = step.equation
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    with context(step):
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def apply(step: FlatStep, *operands: Any) -> Any:
    """The only result of one equation on other operands."""
    (result,) = evaluate(step, operands)
    return result


@contextlib.contextmanager
def context(step: FlatStep) -> Iterator[None]:
    """What is bound inside belongs to the line and the module of the step."""
    equation = step.equation
    traceback = traceback_of(step.located)
    with at_source(traceback, step.name_stack, inside=True), equation.ctx.manager:
        yield


def inside(step: FlatStep) -> FlatStep:
    """The step as it is in its own `context`, which has its name stack already."""
    return dataclasses.replace(step, name_stack=no_names())


def read(values: dict[int, Any], operand: int | Literal) -> Any:
    """The value of an operand of a step."""
    return values[operand] if isinstance(operand, int) else operand.val


def as_array(value: Any) -> Any:
    """A result as an array, where it is a number of the program's own; None: there is none."""
    return value if value is None or isinstance(value, jax.Array) else jnp.asarray(value)


def side_effects(step: FlatStep) -> list[str]:
    """Names of the effects that must happen exactly once (a collective's axis is not one)."""
    return sorted(
        type(effect).__name__
        for effect in step.equation.effects
        if not isinstance(effect, internals.NamedAxisEffect)
    )
