"""What only shows something to people (`jax.debug.print`), set apart from what is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import closed_of, in_place_of, is_region, scan_parts
from jaxmem.jaxprs.inline_checkpoints import inlined
from jaxmem.jaxprs.inlining import inlinable

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

_SHOWS = (jax.debug.DebugEffect, jax.debug.OrderedDebugEffect)


def shows(equation: JaxprEqn) -> bool:
    """Whether an equation shows something, and has no other effects."""
    effects = equation.effects
    return bool(effects) and all(isinstance(effect, _SHOWS) for effect in effects)


def only_prints(equation: JaxprEqn) -> bool:
    """Whether an equation has no results, and only shows something to people: a print, or a
    conditional or a loop of prints."""
    return not equation.outvars and shows(equation)


def prints_apart(equation: JaxprEqn) -> ClosedJaxpr | None:
    """A scan or a region of the user's own that prints, as one that returns what it would, and the
    prints of that; None: it is something else, or prints in what is more than that (a conditional
    that has results)."""
    parameters, is_scan = equation.params, equation.primitive.name == "scan"
    if not (equation.outvars and shows(equation) and "jaxpr" in parameters):
        return None
    if not is_scan and not is_region(equation):
        return None
    body = inlined(closed_of(parameters["jaxpr"]), _inner_of)
    prints = [one for one in body.jaxpr.eqns if only_prints(one)]
    others = [one for one in body.jaxpr.eqns if not only_prints(one)]
    if not prints or any(map(shows, others)):
        return None
    atoms = itertools.chain.from_iterable(one.invars for one in prints)
    printed = list(dict.fromkeys(atom for atom in atoms if _is_variable(atom)))
    count = len(body.jaxpr.outvars)
    jaxpr = body.jaxpr.replace(eqns=others, outvars=[*body.jaxpr.outvars, *printed])
    run = internals.jaxpr_as_fun(internals.ClosedJaxpr(jaxpr, body.consts))

    def show(*values):
        known = dict(zip(printed, values, strict=True))
        for one in prints:
            operands = [known[atom] if _is_variable(atom) else atom.val for atom in one.invars]
            one.primitive.bind(*operands, **one.primitive.get_bind_params(one.params))

    if is_scan:
        quiet, show = _scanned(equation, run), _each(equation, show)
    else:
        how = {name: parameters[name] for name in ("prevent_cse", "policy")}
        quiet = jax.checkpoint(run, **how)

    def apart(*operands):
        results = quiet(*operands)
        show(*results[count:])
        return results[:count]

    return in_place_of(equation, apart, [atom.aval for atom in equation.invars])


def _inner_of(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What is to be written in the place of an equation that prints."""
    return inlinable(equation) or prints_apart(equation) if shows(equation) else None


def _scanned(equation: JaxprEqn, run: Callable) -> Callable:
    """A scan as the equation has it, of another body."""
    consts, carried = scan_parts(equation)
    options = [equation.params[name] for name in ("length", "reverse", "unroll")]

    def scan(*operands):
        fixed, carry, slices = _split(operands, consts, carried)

        def turn(carry, slices):
            return _split(run(*fixed, *carry, *slices), carried)

        carry, stacked = jax.lax.scan(turn, carry, slices, *options)
        return [*carry, *stacked]

    return scan


def _each(equation: JaxprEqn, show: Callable) -> Callable:
    """What shows something of each iteration of a scan, of stacks."""

    def loop(*stacks):
        def turn(_, slices):
            show(*slices)
            return None, None

        jax.lax.scan(turn, None, stacks, *(equation.params[name] for name in ("length", "reverse")))

    return loop


def _split(values: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Values in parts of so many, and the rest."""
    ends = [0, *itertools.accumulate(counts), len(values)]
    return [list(values[start:stop]) for start, stop in itertools.pairwise(ends)]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, internals.Literal)
