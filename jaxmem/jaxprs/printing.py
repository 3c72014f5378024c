"""What only shows something to people (`jax.debug.print`), set apart from what is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import inlinable, scan_parts
from jaxmem.jaxprs.inline_checkpoints import inlined

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

_SHOWS = (jax.debug.DebugEffect, jax.debug.OrderedDebugEffect)


def only_prints(equation: JaxprEqn) -> bool:
    """Whether an equation has no results, and only shows something to people: a print, or a
    conditional or a loop of prints."""
    return not equation.outvars and shows(equation)


def stack_prints(equation: JaxprEqn) -> tuple[JaxprEqn, JaxprEqn | None]:
    """A scan that stacks what its body prints, and one that prints it; None: nothing is printed.
    One that prints in what is more than that (regions of the user's own, conditionals that have
    results) is left as it is."""
    if equation.primitive.name != "scan" or not (shows(equation) and equation.outvars):
        return equation, None
    body, prints = _apart(equation.params["jaxpr"])
    if not prints or any(map(shows, body.jaxpr.eqns)):
        return equation, None
    printed = list({one: None for show in prints for one in show.invars if _is_variable(one)})
    length, reverse, unroll = (equation.params[name] for name in ("length", "reverse", "unroll"))
    consts, carried = scan_parts(equation)
    jaxpr = body.jaxpr.replace(outvars=[*body.jaxpr.outvars, *printed])
    run = internals.jaxpr_as_fun(internals.ClosedJaxpr(jaxpr, body.consts))

    def quiet(*operands):
        fixed, carry, slices = _split(operands, consts, carried)

        def turn(carry, slices):
            return _split(run(*fixed, *carry, *slices), carried)

        return jax.lax.scan(turn, carry, slices, length, reverse, unroll)

    def show(*stacks):
        def turn(_, slices):
            values = dict(zip(printed, slices, strict=True))
            for one in prints:
                operands = [values[atom] if _is_variable(atom) else atom.val for atom in one.invars]
                one.primitive.bind(*operands, **one.primitive.get_bind_params(one.params))
            return None, None

        jax.lax.scan(turn, None, stacks, length, reverse)

    scan = _equation(quiet, equation.invars, equation)
    stacks = scan.outvars[len(equation.outvars) :]
    scan = scan.replace(outvars=[*equation.outvars, *stacks])
    return scan, _equation(show, stacks, prints[0])


def _equation(fun: Callable, operands: Sequence[Any], like: JaxprEqn) -> JaxprEqn:
    """The one equation that a function is, of other operands, on the line of another one."""
    with like.ctx.manager:
        closed = jax.make_jaxpr(fun)(*(one.aval for one in operands))
    (equation,) = closed.jaxpr.eqns
    known = dict(zip(closed.jaxpr.invars, operands, strict=True))
    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        known[variable] = internals.Literal(value, variable.aval)
    named = [known[atom] if _is_variable(atom) else atom for atom in equation.invars]
    return equation.replace(invars=named, source_info=like.source_info, ctx=like.ctx)


def _split(values: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Values in parts of so many, and the rest."""
    ends = [0, *itertools.accumulate(counts), len(values)]
    return [list(values[start:stop]) for start, stop in itertools.pairwise(ends)]


def _apart(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[JaxprEqn]]:
    """A jaxpr without what it prints, and that in its order."""
    closed = inlined(closed, _call_that_prints)
    equations, prints = [], []
    for equation in closed.jaxpr.eqns:
        if only_prints(equation):
            prints.append(equation)
            continue
        equation, shown = stack_prints(equation)
        equations.append(equation)
        prints.extend([shown] if shown else [])
    return internals.ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts), prints


def _call_that_prints(equation: JaxprEqn) -> ClosedJaxpr | None:
    return inlinable(equation) if shows(equation) else None


def shows(equation: JaxprEqn) -> bool:
    """Whether an equation shows something, and has no other effects."""
    effects = equation.effects
    return bool(effects) and all(isinstance(effect, _SHOWS) for effect in effects)


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, internals.Literal)
