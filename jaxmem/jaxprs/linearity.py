"""Whether derivatives are linear in the cotangent.

What reads a value several times sends it several cotangents, which add up. A plan may have an
operation there once, or in each of its readers, and the rule of its derivative then acts on the sum
or on the parts: the same only where it is linear. JAX's own rules are; a user's need not be
(gradient clipping, quantisation).
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.custom_jvp import called_by, traced_rule
from jaxmem.jaxprs.equations import CUSTOM_VJPS, all_equations, inner_jaxprs, operation_of
from jaxmem.jaxprs.operands import differentiable

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Primitives of JAX whose transpose is the user's own function.
_OWN_TRANSPOSES = frozenset(
    {"custom_lin", "custom_linear_solve", "custom_transpose_call", "linear_call"}
)


_linear_rules: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def has_linear_rule(equation: JaxprEqn) -> bool:
    """Whether the rule of a `jax.custom_jvp` equation is transposed by rules of JAX's own alone,
    which are linear in the cotangent. Rules of the user's own (`linear_call`, primitives that come
    from elsewhere) need not be, and a rule that cannot be traced is not known to be."""
    key = called_by(equation)
    if key not in _linear_rules:
        traced = traced_rule(
            equation, differentiable([variable.aval for variable in equation.invars])
        )
        _linear_rules[key] = traced is not None and all(
            _is_transposed_by_jax(one.primitive) for one in all_equations(traced.jaxpr)
        )
    return _linear_rules[key]


def _is_transposed_by_jax(primitive) -> bool:
    """Or by `jaxprs.named`, as JAX would; whether that has been used yet changes nothing."""
    if primitive.name == "name":
        return True
    own = _is_of_jax(internals.ad.primitive_transposes.get(primitive))
    return own and primitive.name not in _OWN_TRANSPOSES


# Further operations whose derivative is the user's own function, or rounds the cotangent.
_NOT_LINEAR = CUSTOM_VJPS | {"call_hi_primitive", "reduce_precision"}


def has_linear_derivative(equation: JaxprEqn) -> bool:
    """Whether an equation, and what is inside of it, is differentiated by rules that are known to
    be linear in the cotangent. (A cast to a shorter dtype counts as one: the sum of what it rounds
    differs from the rounded sum in the last bits of that dtype. In a byte these are too few.)"""
    name, primitive = operation_of(equation), equation.primitive
    if name == "convert_element_type" and is_byte_of_real(equation.outvars[0].aval.dtype):
        return False
    if name == "custom_jvp_call":
        return has_linear_rule(equation)
    if name in _NOT_LINEAR or not _is_transposed_by_jax(primitive):
        return False
    if not _is_of_jax(internals.ad.primitive_jvps.get(primitive)):
        return False
    inner = (one for jaxpr in inner_jaxprs(equation) for one in jaxpr.eqns)
    return all(map(has_linear_derivative, inner))


def is_byte_of_real(dtype: Any) -> bool:
    """Whether the sum of what is rounded to a dtype differs from the rounded sum in more than the
    last bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


def _is_of_jax(rule: Any) -> bool:
    """Whether a rule is JAX's own, and so is what it is made of; None, where there is nothing to
    differentiate, is."""
    if isinstance(rule, functools.partial):
        return all(map(_is_of_jax, (rule.func, *rule.args, *rule.keywords.values())))
    if isinstance(rule, tuple | list):
        return all(map(_is_of_jax, rule))
    if not callable(rule):
        return True
    module = getattr(rule, "__module__", None) or type(rule).__module__
    return module.partition(".")[0] in ("jax", "jaxlib", "builtins")
