"""How a function becomes one flat list of equations: it is traced, and what it calls is inlined."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import ResultError
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.casts import widened_from, without_unread_casts
from jaxmem.jaxprs.equations import (
    closed_of,
    is_region,
    parameters_of,
)
from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.gathers import Numbers, plainer_gather
from jaxmem.jaxprs.inline_checkpoints import inline_scan
from jaxmem.jaxprs.inlining import default_branch, inlinable
from jaxmem.jaxprs.merging import CommonSubexpressions
from jaxmem.jaxprs.operands import has_derivative
from jaxmem.jaxprs.printing import only_prints, prints_apart
from jaxmem.jaxprs.sources import names_of, no_names
from jaxmem.jaxprs.uniform import part_uniform

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal


def flatten(
    fun: Callable, leaves: Sequence[Any], open_regions: bool = False, merge: bool = False
) -> FlatJaxpr:
    """Traces ``fun(*leaves)`` and inlines its jit-like calls into one flat list; see
    `flatten_jaxpr`."""
    return flatten_jaxpr(*traced_jaxpr(fun, leaves), open_regions, merge)


def traced_jaxpr(fun: Callable, leaves: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``fun(*leaves)`` without what its results do not depend on, which `jax.jit`
    drops (a carry of a loop that no other one reads), and the tree of its results."""
    closed, shape = jax.make_jaxpr(_of_arrays(fun), return_shape=True)(*leaves)
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = internals.partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    variables = itertools.chain(jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))
    read = {one for one in variables if not isinstance(one, internals.Literal)}
    constants = zip(jaxpr.constvars, closed.consts, strict=True)
    made, kept = part_uniform(pair for pair in constants if pair[0] in read)
    jaxpr = jaxpr.replace(constvars=[variable for variable, _ in kept], eqns=[*made, *jaxpr.eqns])
    closed = closed.replace(jaxpr=jaxpr, consts=[value for _, value in kept])
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
    differentiated: bool = True,
) -> FlatJaxpr:
    """A jaxpr (closed, or open and without constants) as one flat list; with ``open_regions`` the
    user's own regions too, those in the bodies of scans among them; with ``merge`` what it computes
    twice of the same values is there once, as XLA has it. Not what no derivative is taken of, such
    as masks: layers that each make their own are alike, and would be no more. With
    ``sets_prints_apart`` what only prints (`jax.debug.print`, and conditionals and loops of them)
    is among no steps. ``differentiated``: whether a derivative is to be taken of it; without one it
    is as XLA has it (see `inlinable` and `widened_from`)."""
    closed = closed_of(closed)
    if out_tree is None:
        out_tree = jax.tree.structure(list(closed.out_avals))
    regions: list[tuple[int, int]] = []
    avals: list[Any] = []
    steps: list[FlatStep] = []
    scans: list[tuple[int, JaxprEqn]] = []
    in_scans = 0
    computed = CommonSubexpressions(differentiated)
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
            if not differentiated and (same := widened_from(equation, inputs, makers)):
                numbers[equation.outvars[0]] = same[0]
                continue
            inner = inlinable(equation, differentiated)
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
                if earlier and not (differentiated and moving.isdisjoint(earlier)):
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
    if not differentiated:
        steps = without_unread_casts(steps, outputs)
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


def output_avals(fun: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Abstract outputs of a function, memory space included, and their tree."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    return list(closed.out_avals), jax.tree.structure(shape)
