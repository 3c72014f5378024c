"""The user's own regions, written in place: `jax.checkpoint` says what to recompute, and nothing
of what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import closed_of, inner_jaxprs, is_region, parameters_of
from jaxmem.jaxprs.inlining import inlinable
from jaxmem.jaxprs.sources import names_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Var


def inline_scan(equation: JaxprEqn) -> tuple[JaxprEqn, int]:
    """A scan whose body has no regions of the user's own, and how many it had. Scans in the body
    keep theirs, as what is in branches and custom rules does: no plan decides there."""
    body = equation.params["jaxpr"]
    count = _count(body.jaxpr)
    if not count:
        return equation, 0
    return equation.replace(params={**equation.params, "jaxpr": inlined(body, _inlinable)}), count


def _count(jaxpr: Any) -> int:
    """Regions in a jaxpr and in the jit-like calls of it."""
    found = 0
    for equation in jaxpr.eqns:
        if is_region(equation):
            found += 1 + sum(map(_count, inner_jaxprs(equation)))
        elif inlinable(equation) is not None:
            found += sum(map(_count, inner_jaxprs(equation)))
    return found


def inlined(closed: ClosedJaxpr, inner_of: Callable[[JaxprEqn], ClosedJaxpr | None]) -> ClosedJaxpr:
    """A jaxpr with others written in the place of the equations that ``inner_of`` has one for."""
    equations: list[JaxprEqn] = []
    constants: list[tuple[Var, Any]] = []

    def walk(jaxpr, names: dict[Var, Any], stack, inside: bool) -> list[Any]:
        def named(atom):
            return atom if isinstance(atom, internals.Literal) else names.get(atom, atom)

        for equation in jaxpr.eqns:
            inputs = [named(atom) for atom in equation.invars]
            source = equation.source_info
            if stack is not None:
                source = source.replace(name_stack=stack + names_of(equation))
            inner = inner_of(equation)
            if inner is None:
                made = list(equation.outvars)
                if inside:  # it may be called several times
                    made = [internals.Var(variable.aval) for variable in made]
                    names.update(zip(equation.outvars, made, strict=True))
                equations.append(equation.replace(invars=inputs, outvars=made, source_info=source))
                continue
            fixed = [internals.Var(variable.aval) for variable in inner.jaxpr.constvars]
            constants.extend(zip(fixed, inner.consts, strict=True))
            variables = [*inner.jaxpr.constvars, *inner.jaxpr.invars]
            values = dict(zip(variables, [*fixed, *inputs], strict=True))
            results = walk(inner.jaxpr, values, source.name_stack, True)
            names.update(zip(equation.outvars, results, strict=True))
        return [named(atom) for atom in jaxpr.outvars]

    outputs = walk(closed.jaxpr, {}, None, False)
    jaxpr = closed.jaxpr.replace(
        eqns=equations,
        outvars=outputs,
        constvars=[*closed.jaxpr.constvars, *(variable for variable, _ in constants)],
    )
    return internals.ClosedJaxpr(jaxpr, [*closed.consts, *(value for _, value in constants)])


def _inlinable(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What is to be written in place of an equation: a region, or a call that has some."""
    if is_region(equation):
        return closed_of(parameters_of(equation)["jaxpr"])
    inner = inlinable(equation)
    return inner if inner is not None and _count(inner.jaxpr) else None
