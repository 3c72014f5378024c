"""A traced function as one flat list of equations, and how it is evaluated."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import ResultError
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import (
    closed_of,
    default_branch,
    inlinable,
    is_region,
    line_of,
    operation_of,
    parameters_of,
)
from jaxmem.jaxprs.gathers import Numbers, plainer_gather
from jaxmem.jaxprs.inline_checkpoints import inline_scan
from jaxmem.jaxprs.merging import CommonSubexpressions
from jaxmem.jaxprs.operands import has_derivative
from jaxmem.jaxprs.printing import only_prints, prints_apart
from jaxmem.jaxprs.sources import at_source, names_of, no_names, traceback_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal


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


def flatten(
    fun: Callable, leaves: Sequence[Any], open_regions: bool = False, merge: bool = False
) -> FlatJaxpr:
    """Traces ``fun(*leaves)`` and inlines its jit-like calls into one flat list; see
    `flatten_jaxpr`."""
    return flatten_jaxpr(*traced_jaxpr(fun, leaves), open_regions, merge)


def traced_jaxpr(fun: Callable, leaves: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``fun(*leaves)``, and the tree of its results."""
    closed, shape = jax.make_jaxpr(_of_arrays(fun), return_shape=True)(*leaves)
    return closed, jax.tree.structure(shape)


def _of_arrays(fun: Callable) -> Callable:
    """The function, which is told where it returns what is no array: JAX names a function of ours
    then."""

    def checked(*leaves):
        result = fun(*leaves)
        for leaf in jax.tree.leaves(result):
            known = hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")
            if not (known or isinstance(leaf, numbers.Number)):
                raise ResultError(
                    "What jaxmem traces returns arrays and numbers, as under jax.jit; the function "
                    f"returned {leaf!r} of type {type(leaf).__name__}, which is not a valid JAX "
                    "type."
                )
        return result

    return checked


def flatten_jaxpr(
    closed,
    out_tree: Any = None,
    open_regions: bool = False,
    merge: bool = False,
    sets_prints_apart: bool = False,
) -> FlatJaxpr:
    """A jaxpr (closed, or open and without constants) as one flat list; with ``open_regions`` the
    user's own regions too, those in the bodies of scans among them; with ``merge`` what it computes
    twice of the same values is there once, as XLA has it. Not what no derivative is taken of, such
    as masks: layers that each make their own are alike, and would be no more. With
    ``sets_prints_apart`` what only prints (`jax.debug.print`, and conditionals and loops of them)
    is among no steps."""
    closed = closed_of(closed)
    if out_tree is None:
        out_tree = jax.tree.structure(list(closed.out_avals))
    regions: list[tuple[int, int]] = []
    avals: list[Any] = []
    steps: list[FlatStep] = []
    scans: list[tuple[int, JaxprEqn]] = []
    in_scans = 0
    computed = CommonSubexpressions()
    merged: set[int] = set()
    prints: list[FlatStep] = []
    makers: dict[int, FlatStep] = {}
    found_plainer = False
    known = Numbers(tuple(map(_as_jax, closed.consts)), avals, makers)
    moving: set[int] = set()  # numbers of what a derivative may be taken of

    def new(variable) -> int:
        avals.append(variable.aval)
        return len(avals) - 1

    def have_derivative(values: Iterable[int]) -> Iterator[int]:
        return (value for value in values if has_derivative(avals[value]))

    def count_in(step: FlatStep, earlier: tuple[int, ...] | None) -> None:
        """For what is merged with a step, that may have the results of an earlier one."""
        if earlier:
            computed.alias(step.outputs, earlier)
        else:
            computed.insert(step.equation, step.inputs, step.outputs)
        if not moving.isdisjoint(step.uses):
            moving.update(have_derivative(step.outputs))

    def walk(jaxpr, numbers: dict, stack, callers=()) -> list[int | Literal]:
        nonlocal in_scans, found_plainer

        def number(atom):
            return atom if isinstance(atom, internals.Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            if open_regions and equation.primitive.name == "scan":
                written = equation
                equation, count = inline_scan(equation)
                in_scans += count
                if count:
                    scans.append((len(steps), written))
            inputs = tuple(map(number, equation.invars))
            inner = inlinable(equation)
            default = default_branch(equation)
            if default is not None:  # its first operand is the branch's number
                inner, inputs = default, inputs[1:]
            elif merge and (plainer := plainer_gather(equation, inputs, known)):
                inner, inputs, found_plainer = plainer[0], tuple(plainer[1]), True
            opened = open_regions and is_region(equation)
            if opened:
                inner = closed_of(parameters_of(equation)["jaxpr"])
            elif sets_prints_apart and inner is None:
                inner = prints_apart(equation)
            names = stack + names_of(equation)
            if sets_prints_apart and inner is None and only_prints(equation):
                prints.append(FlatStep(equation, inputs, (), names, callers))
            elif inner is None:
                earlier = computed.lookup(equation, inputs) if merge else None
                if earlier and not moving.isdisjoint(earlier):
                    made = earlier
                    merged.update(earlier)
                else:
                    made = tuple(map(new, equation.outvars))
                    steps.append(FlatStep(equation, inputs, made, names, callers))
                    makers.update(dict.fromkeys(made, steps[-1]))
                    if merge:
                        count_in(steps[-1], earlier)
                numbers.update(zip(equation.outvars, made, strict=True))
            else:
                variables = [*inner.jaxpr.constvars, *inner.jaxpr.invars]
                constants = [new_const(value) for value in inner.consts]
                start = len(steps)
                values = dict(zip(variables, [*constants, *inputs], strict=True))
                results = walk(inner.jaxpr, values, names, (equation, *callers))
                if opened:
                    regions.append((start, len(steps)))
                numbers.update(zip(equation.outvars, results, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def new_const(value) -> Literal:
        value = _as_jax(value)
        return internals.Literal(value, jax.typeof(value))

    variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    numbers = {variable: new(variable) for variable in variables}
    input_count = len(avals)
    moving.update(have_derivative(range(input_count)))
    outputs = walk(closed.jaxpr, numbers, no_names())
    return FlatJaxpr(
        tuple(steps),
        tuple(avals),
        known.consts,
        input_count,
        tuple(outputs),
        out_tree,
        tuple(regions),
        len(regions) + in_scans,
        tuple(scans),
        frozenset(merged),
        tuple(prints),
        found_plainer,
    )


def _as_jax(value) -> Any:
    """A constant of a jaxpr as a JAX array: custom rules may index it with a tracer. An array of
    NumPy becomes no tracer of a trace around: the program is the same one in any of them. (A
    reference stays: that it is written to is told where effects are looked for.)"""
    if isinstance(value, jax.Array | jax.Ref):
        return value
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value)


def side_effects(step: FlatStep) -> list[str]:
    """Names of the effects that must happen exactly once (a collective's axis is not one)."""
    return sorted(
        type(effect).__name__
        for effect in step.equation.effects
        if not isinstance(effect, internals.NamedAxisEffect)
    )


def output_avals(fun: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Abstract outputs of a function, memory space included, and their tree."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    return list(closed.out_avals), jax.tree.structure(shape)
