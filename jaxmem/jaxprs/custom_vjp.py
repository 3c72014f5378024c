"""The rules of a `jax.custom_vjp`."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxmem.jaxprs.custom_jvp import called_by
from jaxmem.jaxprs.flat import FlatStep
from jaxmem.jaxprs.forward_backward import ForwardBackward, trace_forward_backward
from jaxmem.jaxprs.linearity import is_byte_of_real
from jaxmem.jaxprs.operands import differentiable, has_derivative
from jaxmem.jaxprs.sources import no_names
from jaxmem.jaxprs.zeros import all_among, zeros_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# What is known of an equation's rules is kept by the program of its function, which it has alone.
_traced: weakref.WeakKeyDictionary[Any, ForwardBackward | None] = weakref.WeakKeyDictionary()

# Of one operand: what they make of a sum is the sum of what they make of its parts.
_LINEAR = frozenset(
    """
    broadcast_in_dim conj copy copy_p cumsum expand_dims imag name neg real
    reduce_sum reshape rev slice squeeze transpose
    """.split()
)
# Of several, where each has a cotangent in it or is zero.
_SUMS = frozenset("add add_any concatenate pad sub".split())


def traced_rules(equation: JaxprEqn) -> ForwardBackward | None:
    """What a `jax.custom_vjp` equation computes by its rules, forward and then backward, where all
    of its operands have a derivative that may; None: they cannot be traced, or ask which cotangents
    are there (``symbolic_zeros``)."""
    key = called_by(equation)
    if key not in _traced:
        _traced[key] = _trace(equation)
    return _traced[key]


def _trace(equation: JaxprEqn) -> ForwardBackward | None:
    real = differentiable([variable.aval for variable in equation.invars])
    if not real or equation.params.get("symbolic_zeros"):
        return None
    try:
        return trace_forward_backward(FlatStep(equation, (), (), no_names()), real)
    except Exception:  # a rule may refuse, in its own words, what is not differentiated
        return None


def is_linear(rules: ForwardBackward) -> bool:
    """Whether what runs backward makes of a sum of cotangents the sum of what it makes of each, as
    far as its operations tell. What is rounded to a shorter dtype may only be a gradient: the rest
    that it leaves (compensated sums) is no sum of rests."""
    moved, zeros = set(rules.cotangents), zeros_of(rules.flat)
    read = {value for step in rules.flat.steps for value in step.uses}
    for step in rules.flat.steps:
        if moved.isdisjoint(step.uses):
            continue
        if not _is_linear(step, moved, zeros):
            return False
        if not read.isdisjoint(step.outputs) and _rounds(step):
            return False
        moved.update(step.outputs)
    gradients = rules.flat.outputs[len(rules.results) :]
    return all_among(gradients, moved | zeros)  # what is the same for each cotangent adds up


def form_of(rules: ForwardBackward) -> tuple:
    """What rules have in common of which the same is to be said: their operations, and of what
    types. (Functions that they call print their addresses.)"""

    def literal(one: Any) -> Any:
        return one if isinstance(one, int) else (str(one.aval), str(one.val))

    flat = rules.flat
    steps = ((one.primitive, tuple(map(literal, one.inputs)), one.outputs) for one in flat.steps)
    return tuple(steps), tuple(map(str, flat.avals)), tuple(map(literal, flat.outputs))


def results_of(rules: ForwardBackward) -> list[JaxprEqn]:
    """The equations that make the results: those of the forward pass but for what is kept for the
    backward pass alone, which XLA makes where that reads it."""
    made = rules.flat.made_of(rules.results)
    forward = rules.flat.steps[: rules.boundary]
    return [step.equation for step in forward if not made.isdisjoint(step.outputs)]


def _is_linear(step: FlatStep, moved: Set[int], zeros: Set[int]) -> bool:
    name, inputs = step.primitive, step.inputs
    has_cotangent = [one in moved if isinstance(one, int) else False for one in inputs]
    if name == "convert_element_type":
        made = step.equation.outvars[0].aval
        return has_derivative(made) and not is_byte_of_real(made.dtype)
    if name == "mul":
        return sum(has_cotangent) == 1
    if name == "div":
        return not has_cotangent[1]
    if name == "select_n":
        return not has_cotangent[0] and all_among(inputs[1:], moved | zeros)
    if name in _SUMS:
        return all_among(inputs, moved | zeros)
    return name in _LINEAR


def _rounds(step: FlatStep) -> bool:
    """Whether it casts to a dtype of less precision or of smaller numbers."""
    if step.primitive != "convert_element_type":
        return False
    (before,), (after,) = step.equation.invars, step.equation.outvars
    old, new = jnp.finfo(before.aval.dtype), jnp.finfo(after.aval.dtype)
    return new.nmant < old.nmant or new.maxexp < old.maxexp
