"""What JAX keeps for a derivative."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.barriers import BARRIERS
from jaxmem.jaxprs.equations import (
    inner_jaxprs,
    is_region,
    operation_of,
    parameters_of,
)
from jaxmem.jaxprs.flat import FlatStep, evaluate
from jaxmem.jaxprs.inlining import inlinable
from jaxmem.jaxprs.mapped import automatic_axes
from jaxmem.jaxprs.nested import loop_of
from jaxmem.jaxprs.operands import differentiable, inputs_read, restrict_to
from jaxmem.jaxprs.placement import HOST, memory_space
from jaxmem.jaxprs.sources import names_of, traceback_of

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

_RESHAPES = frozenset({"convert_element_type", "copy", "reshape", "squeeze", "transpose"})


@dataclasses.dataclass(frozen=True, slots=True)
class ScanResiduals:
    """What a scan keeps on the device for its derivative.

    Attributes:
        kept: the values that JAX saves of each iteration, but for slices and constants, and what is
            made of constants alone, which are there anyway, or once.
        results: those beside them that the scan stacks as a result.
        operands_read: the numbers of the operands, but for what is carried, that the derivative
            reads.
        results_read: those of the results.
        read_again: those of the operands where it makes all again, from what is carried.
    """

    kept: list[SavedResidual]
    results: list[SavedResidual]
    operands_read: frozenset[int]
    results_read: frozenset[int]
    read_again: frozenset[int]


def scan_residuals(
    equation: JaxprEqn, constant: Sequence[bool], wanted: Sequence[bool]
) -> ScanResiduals:
    """What a scan keeps of which some results are ``wanted``. Operands that are ``constant`` are
    not differentiated: a `jax.custom_vjp` refuses that of arrays that it closes over."""
    closed = equation.params["jaxpr"]
    avals = closed.in_avals  # themselves: inside `jax.shard_map` they vary over axes of the mesh
    loop = loop_of(equation)
    carry, constants = (range(len(avals))[part] for part in (loop.carry, loop.body_consts))
    body, count = internals.jaxpr_as_fun(closed), len(carry)
    read = [at for at, one in enumerate(wanted) if one or at < count]

    def read_results(*operands):  # of a result that nobody reads no derivative is taken
        results = body(*operands)
        return [results[at] for at in read]

    kept: list[SavedResidual] = []
    results: list[SavedResidual] = []
    operands: set[int] = set()
    for one in saved_residuals(read_results, avals, differentiable(avals, constant), read=True):
        if memory_space(one.aval) is HOST:
            continue
        if one.argument in carry:
            kept.append(one)
        elif one.argument is not None:
            operands.add(one.argument)
        elif one.made_of - {*constants}:
            (results if one.result >= count else kept).append(one)
        else:
            operands |= one.made_of
    again = operands.union(*(one.made_of for one in (*kept, *results) if one.equation))
    return ScanResiduals(
        kept,
        results,
        frozenset(operands),
        frozenset(read[one.result] for one in results),
        frozenset(again.difference(carry)),
    )


def region_residuals(step: FlatStep, constant: Sequence[bool]) -> list[SavedResidual]:
    """What a user's own region keeps on the device for its derivative by the operands that are not
    ``constant``, as its policy says, beside operands and results."""
    avals = [variable.aval for variable in step.equation.invars]
    kept = saved_residuals(
        lambda *operands: evaluate(step, operands),
        avals,
        differentiable(avals, constant),
        read=True,
    )
    return [
        one
        for one in kept
        if one.equation and one.result < 0 and memory_space(one.aval) is not HOST
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedResidual:
    """A value that a vjp keeps: the number of the argument that it is, or the equation that made
    it, of what arguments; neither: a constant. ``result``: the number of the last result that it
    is, or -1; ``piece``: bytes that one device has of it, where a `jax.shard_map` made it."""

    aval: Any
    argument: int | None = None
    equation: JaxprEqn | None = None
    made_of: frozenset[int] = frozenset()
    result: int = -1
    piece: float | None = None

    @property
    def operation(self) -> str:
        return self.equation.primitive.name if self.equation else ""

    @property
    def sharding(self) -> Any:
        """That which the program asks for where it makes the value, or None."""
        return self.equation.params.get("sharding") if self.equation else None

    @property
    def name_stack(self) -> str:
        return str(names_of(self.equation)) if self.equation else ""

    @property
    def frames(self) -> list[tuple[str, str, int]]:
        """File, function and line of the Python stack, innermost first."""
        traceback = traceback_of(self.equation) if self.equation else None
        frames = traceback.frames if traceback else ()
        return [(frame.file_name, frame.function_name, frame.line_num) for frame in frames]


def saved_residuals(
    fun: Callable,
    leaves: Sequence[Any],
    differentiated: Sequence[int] | None = None,
    read: bool = False,
) -> list[SavedResidual]:
    """What the forward pass of ``fun(*leaves)`` keeps for its backward pass, each value once, by
    all arguments or those that stand at some places; with ``read`` only what that reads. JAX keeps
    factors of tangents that are zero too (one of the two of a `softplus`), which XLA drops."""
    at = range(len(leaves)) if differentiated is None else differentiated

    def forward(*xs):
        return jax.vjp(restrict_to(at, fun, xs), *(xs[place] for place in at))

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*leaves)
    jaxpr = getattr(closed, "jaxpr", closed)
    made_of = _made_of(jaxpr, [frozenset([number]) for number in range(len(jaxpr.invars))])
    count = jax.tree.structure(shapes[1]).num_leaves
    made = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    found: dict[Any, SavedResidual] = {}
    results = jaxpr.outvars[: len(jaxpr.outvars) - count]
    saved = jaxpr.outvars[len(results) :]
    for variable in itertools.compress(saved, _reads(*shapes)) if read else saved:
        variable = original(made, variable)
        if isinstance(variable, internals.Literal):
            continue
        equation = made.get(variable)
        number = jaxpr.invars.index(variable) if variable in jaxpr.invars else None
        sources = made_of.get(variable, frozenset())
        result = max((at for at, one in enumerate(results) if one is variable), default=-1)
        piece = _piece(equation, variable)
        found[variable] = SavedResidual(variable.aval, number, equation, sources, result, piece)
    return list(found.values())


def _reads(results: Any, back: Any) -> Sequence[bool]:
    """Which of the values that a vjp keeps its backward pass reads; all of them, where a rule of
    the user's own refuses."""
    leaves, tree = jax.tree.flatten(results)
    floating = differentiable(leaves)

    def backward(back, cotangents):
        found = [np.zeros(one.shape, jax.dtypes.float0) for one in leaves]
        for at, one in zip(floating, cotangents, strict=True):
            found[at] = one
        return back(jax.tree.unflatten(tree, found))

    count = jax.tree.structure(back).num_leaves
    try:
        return inputs_read(backward, back, [leaves[at] for at in floating])[:count]
    except Exception:
        return [True] * count


def _piece(equation: JaxprEqn | None, variable: Any) -> float | None:
    """Axes that are left to the compiler are taken to cut it too."""
    if equation is None or operation_of(equation) != "shard_map":
        return None
    (inner,) = inner_jaxprs(equation)
    aval = inner.outvars[equation.outvars.index(variable)].aval
    return aval.size * aval.dtype.itemsize / math.prod(automatic_axes(equation).values())


def _made_of(jaxpr, inputs: Sequence[frozenset[int]]) -> dict[Any, frozenset[int]]:
    """The arguments that each value of a jaxpr is made of, given those of its inputs. Of what a
    call returns, each is made of what it reads (a mask of constants of none)."""
    made_of = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        read = [
            frozenset() if isinstance(x, internals.Literal) else made_of.get(x, frozenset())
            for x in equation.invars
        ]
        inner = inlinable(equation)
        if inner is None:
            made_of |= dict.fromkeys(equation.outvars, frozenset().union(*read))
            continue
        inside = _made_of(inner.jaxpr, read)
        for variable, result in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
            own = isinstance(result, internals.Literal)
            made_of[variable] = frozenset() if own else inside.get(result, frozenset())
    return made_of


def original(made: Mapping[Any, JaxprEqn], variable: Any) -> Any:
    """The variable, or literal, that has the values of one already, given what makes each."""
    while not isinstance(variable, internals.Literal):
        equation = made.get(variable)
        source = None if equation is None else _forwarded_operand(equation, variable)
        if source is None:
            break
        variable = source
    return variable


def _forwarded_operand(equation: JaxprEqn, variable: Any) -> Any:
    """The operand that a result only marks or waits for, or is rounded to what it is already (as
    JAX does with the residuals of regions), or that a region or a call returns as it is, or an
    earlier result that it is once more; None: the equation made it."""
    name = operation_of(equation)
    if name == "name" or (name == "reduce_precision" and not _rounds(equation)):
        return equation.invars[0]
    if operation_of(equation) in BARRIERS:
        return equation.invars[equation.outvars.index(variable)]
    if is_region(equation) or equation.primitive.name in ("jit", "pjit"):
        (inner,) = inner_jaxprs(equation)
        results = _original_results(inner)
        at = equation.outvars.index(variable)
        if isinstance(results[at], internals.Literal):
            return None
        if results[at] in inner.invars:
            return equation.invars[inner.invars.index(results[at])]
        first = results.index(results[at])
        return equation.outvars[first] if first < at else None
    return None


@functools.lru_cache(maxsize=64)  # asked once for each result of a region
def _original_results(jaxpr: Jaxpr) -> tuple[Any, ...]:
    made = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    return tuple(original(made, variable) for variable in jaxpr.outvars)


def _rounds(equation: JaxprEqn) -> bool:
    """Whether a ``reduce_precision`` leaves fewer bits than its operand's dtype has."""
    has = jnp.finfo(equation.invars[0].aval.dtype)
    left = parameters_of(equation)
    return left["exponent_bits"] < has.nexp or left["mantissa_bits"] < has.nmant


def making_order(values: Sequence[Any]) -> list[int]:
    """For each of some tracers the number of the equation that makes it, casts and changes of shape
    apart (those of all gradients come at the end); 0 where it is not known."""
    if not values:
        return []
    frame = getattr(getattr(values[0], "_trace", None), "frame", None)
    equations = [one() if callable(one) else one for one in getattr(frame, "tracing_eqns", ())]
    number = {id(equation): at for at, equation in enumerate(equations) if equation is not None}

    def made_at(value) -> int:
        maker = getattr(value, "parent", None)
        while maker is not None and maker.primitive.name in _RESHAPES:
            above = getattr(maker.in_tracers[0], "parent", None)
            if above is None:
                break
            maker = above
        return number.get(id(maker), 0)

    return [made_at(value) for value in values]
