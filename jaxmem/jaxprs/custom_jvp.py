"""The rule of a `jax.custom_jvp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxmem.jaxprs.equations import called_by_rule
from jaxmem.jaxprs.operands import restrict_to
from jaxmem.jaxprs.sources import at_source, no_names, traceback_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


def called_by(equation: JaxprEqn) -> Any:
    """The program of the function of an equation with rules: what is known of these is kept by it,
    which no other equation has."""
    called = called_by_rule(equation)
    return called and called.jaxpr


def traced_rule(equation: JaxprEqn, real: Sequence[int]) -> ClosedJaxpr | None:
    """What a `jax.custom_jvp` equation computes with its derivative: of operands, and tangents of
    those at the places of ``real``, results and their tangents. None: the rule cannot be traced."""
    avals = [variable.aval for variable in equation.invars]

    def called(*operands):
        parameters = equation.primitive.get_bind_params(equation.params)
        return equation.primitive.bind(*operands, **parameters)

    def along(operands, tangents):
        chosen = [operands[at] for at in real]
        return jax.jvp(restrict_to(real, called, operands), chosen, tangents)

    # JAX keeps what it traces of a rule here for all later calls, with the line that it finds.
    at_its_line = at_source(traceback_of(equation), no_names())
    try:
        with at_its_line, equation.ctx.manager:
            return jax.make_jaxpr(along)(avals, [avals[at] for at in real])
    except Exception:  # a rule may refuse, in its own words, what is not differentiated
        return None
