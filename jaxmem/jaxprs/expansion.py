"""Operations that JAX lowers to others, which XLA then has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.flat import FlatJaxpr, evaluate, read
from jaxmem.jaxprs.flattening import flatten_jaxpr

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

EXPANDED = frozenset({"ragged_dot_general"})


def _implementation(equation: JaxprEqn, operands):
    """`jax.lax.ragged_dot` is a matmul of as many copies as there are groups, each with the rows of
    one. (With flags of JAX's it is an operation of XLA's, or a kernel of its own.)"""
    return [internals._ragged_dot_general_impl(*operands, **equation.params)]


def expansion(equation: JaxprEqn) -> ClosedJaxpr:
    """What one of the `EXPANDED` is lowered to."""

    def run(*operands):
        return _implementation(equation, operands)

    return jax.make_jaxpr(run)(*(variable.aval for variable in equation.invars))


def expanded(flat: FlatJaxpr) -> FlatJaxpr:
    """A program as it is lowered."""
    if EXPANDED.isdisjoint(step.primitive for step in flat.steps):
        return flat

    def run(*inputs):
        values = dict(enumerate([*flat.consts, *inputs]))
        for step in flat.steps:
            operands = [read(values, operand) for operand in step.inputs]
            own = step.primitive in EXPANDED
            found = _implementation(step.equation, operands) if own else evaluate(step, operands)
            values.update(zip(step.outputs, found, strict=True))
        return [read(values, output) for output in flat.outputs]

    return flatten_jaxpr(jax.make_jaxpr(run)(*flat.avals[len(flat.consts) : flat.input_count]))
