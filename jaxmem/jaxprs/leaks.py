"""Rules of the user's own that read an array of the function around them, which they are not given.

JAX differentiates such a function as it runs it. Once it is traced (`jax.checkpoint`, `jax.jit`, a
plan) that array is none any more where the rule runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxmem.ground.errors import PlanError
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import all_equations, closed_inner_jaxprs, custom_function, line_of
from jaxmem.jaxprs.operands import differentiable, restrict_to

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Where functions and rules are that read nothing but what they are given: JAX's, and jaxmem.ops.
_KNOWN = (
    os.path.join(os.path.dirname(jax.__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "ops", ""),
)


def check_rules(closed: ClosedJaxpr, differentiated: Sequence[int]) -> None:
    """Traces the derivative of what was traced, by the inputs at some places, where it has rules of
    the user's own.

    Raises:
        PlanError: one that the derivative needs reads what it is not given.
    """
    avals = [variable.aval for variable in closed.jaxpr.invars]
    real = [at for at in differentiable(avals) if at in {*differentiated}]
    if not real or not any(map(_has_rules_of_the_user, all_equations(closed.jaxpr))):
        return

    def derivative(leaves, cotangents):
        run = restrict_to(real, internals.jaxpr_as_fun(closed), leaves)
        results, back = jax.vjp(run, *(leaves[at] for at in real))
        found = [np.zeros(np.shape(one), jax.dtypes.float0) for one in results]
        for at, one in zip(differentiable(closed.out_avals), cotangents, strict=True):
            found[at] = one
        return results, back(found)  # a rule computes the results too

    results = closed.out_avals
    given = [results[at] for at in differentiable(results)]
    try:
        traced = jax.make_jaxpr(derivative)(avals, given)
    except jax.errors.UnexpectedTracerError as error:
        raise PlanError(_message("")) from error
    except Exception:  # a rule refuses in its own words, which who differentiates is told
        return
    needed, _ = internals.partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    reads = _read_of_ended(needed, traced.consts)
    if reads is not None:
        raise PlanError(_message(f" at {line_of(reads)}"))


def _read_of_ended(jaxpr: Jaxpr, consts: Sequence[Any]) -> JaxprEqn | None:
    """The first equation that reads a constant that is an array of a function whose trace has
    ended."""
    constants = zip(jaxpr.constvars, consts, strict=True)
    ended = {variable for variable, one in constants if _has_ended(one)}
    for equation in jaxpr.eqns:
        variables = (one for one in equation.invars if isinstance(one, internals.Var))
        if not ended.isdisjoint(variables):
            return equation
        for inner in closed_inner_jaxprs(equation):
            if found := _read_of_ended(inner.jaxpr, inner.consts):
                return found
    return None


def taken_derivatives(leaves: Sequence[Any]) -> list[int]:
    """The places of arrays that a derivative is being taken of where a function is called: neither
    those that are there nor those of `jax.jit`."""
    return [
        at
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, jax.core.Tracer) and _frame(leaf) is None
    ]


def _message(where: str) -> str:
    return (
        f"A derivative rule{where} reads an array of the function around it, which it is not "
        "given. Where a plan runs the function again that array is another one (jax.checkpoint "
        "refuses such rules too). Pass the array to the rule's function as an argument, or use "
        "jax.closure_convert."
    )


def _has_rules_of_the_user(equation: JaxprEqn) -> bool:
    """Whether it has rules, and not a function and a `jax.custom_jvp` that are both JAX's
    (`jax.nn.relu`) or jaxmem's."""
    if not equation.primitive.name.startswith("custom_"):
        return False
    rule = getattr(equation.params.get("jvp_jaxpr_fun"), "debug_info", None)
    sources = (custom_function(equation), getattr(rule, "func_src_info", ""))
    return not all(any(f" at {folder}" in str(one) for folder in _KNOWN) for one in sources)


def _frame(tracer: jax.core.Tracer) -> Any:
    """What JAX knows of the function that an array is traced of; None: it is traced of none."""
    return getattr(getattr(tracer, "_trace", None), "frame", None)


def _has_ended(value: Any) -> bool:
    """Whether an array is of a function that is traced no longer: JAX has put an empty dict in the
    place of what it knew of its constants. (What an outer function traces may be read.)"""
    if not isinstance(value, jax.core.Tracer) or _frame(value) is None:
        return False
    known = internals.attribute(value, "tracer._trace.frame.constid_to_tracer")
    return type(known) is dict and not known
