"""What a program calls that is planned as if it were written in place, and what that is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Sharding

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import (
    CUSTOM_VJPS,
    all_equations,
    called_by_rule,
    closed_of,
    in_place_of,
    is_region,
    operation_of,
    parameters_of,
)
from jaxmem.jaxprs.operands import has_derivative
from jaxmem.jaxprs.primitives import function_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

# Calls that are only a boundary for tracing; what is in them is planned as if written in place.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
_MATMULS = frozenset({"dot_general", "conv_general_dilated"})
# What is a platform to JAX, and no device's.
_KERNEL_LANGUAGES = frozenset({"mosaic"})


def _stack(*operands, axis: int) -> list[Any]:
    return [jax.lax.concatenate([jax.lax.expand_dims(one, [axis]) for one in operands], axis)]


def _unstack(operand, *, axis: int) -> list[Any]:
    count = operand.shape[axis]
    return [jax.lax.index_in_dim(operand, at, axis, keepdims=False) for at in range(count)]


def _tile(operand, *, reps: Sequence[int]) -> list[Any]:
    if any(jax.typeof(operand).sharding.spec):  # axes of a mesh go on through no reshape
        for axis, count in enumerate(reps):
            if count == 0:
                operand = jax.lax.slice_in_dim(operand, 0, 0, axis=axis)
            elif count > 1:
                operand = jax.lax.concatenate([operand] * count, axis)
        return [operand]
    axes = range(1, 2 * operand.ndim, 2)
    lengths = [n for pair in zip(reps, operand.shape, strict=True) for n in pair]
    repeated = jax.lax.broadcast_in_dim(operand, lengths, axes)
    shape = [count * n for count, n in zip(reps, operand.shape, strict=True)]
    return [jax.lax.reshape(repeated, shape)]


# Operations that are several simpler ones to XLA, as JAX lowers them.
_MADE_OF: dict[str, Callable] = {"stack": _stack, "tile": _tile, "unstack": _unstack}


def inlinable(equation: JaxprEqn, differentiated: bool = True):
    """The jaxpr of a call that can be written in place, or None. What is not ``differentiated``
    needs no rule of a derivative, and no primitive that has one: XLA has the function in place. (A
    `jax.custom_jvp` that multiplies no matrices is one operation, in a derivative as elsewhere.)"""
    parameters = equation.params
    if equation.primitive.name in CUSTOM_VJPS:
        return None if differentiated else called_by_rule(equation)
    if not differentiated:
        if run := function_of(equation):
            return in_place_of(equation, run, [operand.aval for operand in equation.invars])
        if is_region(equation):
            return _region_in_place(equation)
        if (called := called_by_rule(equation)) and _multiplies_matrices(called.jaxpr):
            return called
    if equation.primitive.name == "call_hi_primitive":
        return _class_written_out(equation)
    if equation.primitive.name in _MADE_OF:
        made_of = functools.partial(_MADE_OF[equation.primitive.name], **parameters)
        return in_place_of(equation, made_of, [operand.aval for operand in equation.invars])
    if equation.primitive.name not in _INLINED:
        return None
    for placed in ("in_shardings", "out_shardings"):
        if any(isinstance(sharding, Sharding) for sharding in parameters.get(placed, ())):
            return None
    inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return inner if hasattr(inner, "consts") else None


def _region_in_place(equation: JaxprEqn) -> ClosedJaxpr:
    """A region of the user's own as JAX lowers it: in a backward pass what it reads has passed a
    barrier, so that nothing of it is merged with what it makes again."""
    given = parameters_of(equation)
    called = closed_of(given["jaxpr"])
    if not (given["differentiated"] and given["prevent_cse"]):
        return called

    def behind_barriers(*operands):
        return internals.jaxpr_as_fun(called)(*map(jax.lax.optimization_barrier, operands))

    return in_place_of(equation, behind_barriers, called.in_avals)


def _multiplies_matrices(jaxpr) -> bool:
    return any(one.primitive.name in _MATMULS for one in all_equations(jaxpr))


def _class_written_out(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What an operation of jax 0.12 that is a class (`jnp.searchsorted`, `jnp.nonzero`) is made of,
    where no derivative is taken of its results: else the class may have one of its own."""
    high = equation.params["_prim"]
    results = [variable.aval for variable in equation.outvars]
    if (
        operation_of(equation) != "call_hi_primitive"
        or equation.effects
        or any(map(has_derivative, results))
    ):
        return None

    def expanded(*operands):
        return jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, operands)))

    return in_place_of(equation, expanded, [operand.aval for operand in equation.invars])


def default_branch(equation: JaxprEqn):
    """The jaxpr that a `jax.lax.platform_dependent` runs on all devices, or None: those that have
    another one are languages of kernels (`jnp.diagonal`)."""
    platforms = equation.params.get("branches_platforms")
    if not platforms or platforms[-1] is not None:
        return None
    named = {name for branch in platforms[:-1] for name in branch}
    return equation.params["branches"][-1] if named <= _KERNEL_LANGUAGES else None
