"""Values that carry a `jax.ad_checkpoint.checkpoint_name`, and the policies that ask for them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import (
    closed_of,
    inner_jaxprs,
    is_region,
    operation_of,
    parameters_of,
)
from jaxmem.jaxprs.flat import FlatJaxpr
from jaxmem.jaxprs.flattening import flatten_jaxpr
from jaxmem.jaxprs.nested import loop_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


def given_name(equation: JaxprEqn) -> str | None:
    """The name that an equation gives to a value; None: it gives none."""
    return parameters_of(equation)["name"] if operation_of(equation) == "name" else None


def names_in(jaxpr: Any) -> Iterator[tuple[str, bool]]:
    """The names in a jaxpr and in all that it calls, and whether each is in a region."""

    def walk(jaxpr, inside: bool) -> Iterator[tuple[str, bool]]:
        for equation in jaxpr.eqns:
            name = given_name(equation)
            if name is not None:
                yield name, inside
            for inner in inner_jaxprs(equation):
                yield from walk(inner, inside or is_region(equation))

    return walk(getattr(jaxpr, "jaxpr", jaxpr), False)


def with_policy(closed: ClosedJaxpr, policy: Callable | None) -> ClosedJaxpr:
    """A program whose regions that hold names have another policy. All regions stay where they are,
    and those without a name inside keep the policy that they have."""
    made: dict[int, Any] = {}  # layers share a jaxpr, and are to share what is made of it

    def renewed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(renewed, value)) if any(map(_is_jaxpr, value)) else value
        if not _is_jaxpr(value):
            return value
        if id(value) not in made:
            made[id(value)] = value, rewritten(value)  # the first keeps its number from reuse
        return made[id(value)][1]

    def rewritten(jaxpr: Any) -> Any:
        if getattr(jaxpr, "jaxpr", jaxpr) is not jaxpr:  # since jax 0.12 the two are one
            inner = rewritten(jaxpr.jaxpr)
            return jaxpr if inner is jaxpr.jaxpr else internals.ClosedJaxpr(inner, jaxpr.consts)
        equations = [changed(equation) for equation in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
            return jaxpr
        return jaxpr.replace(eqns=equations)

    def changed(equation: JaxprEqn) -> JaxprEqn:
        given = parameters_of(equation)
        found = {name: renewed(value) for name, value in given.items()}
        differ = any(found[name] is not given[name] for name in given)
        if is_region(equation) and _has_names(equation):
            found["policy"], differ = policy, True
        if not differ:
            return equation
        if "_prim" not in equation.params:
            return equation.replace(params={**equation.params, **found})
        high = copy.copy(equation.params["_prim"])
        vars(high).update(found)
        return equation.replace(params={**equation.params, "_prim": high})

    return rewritten(closed)


def _has_names(equation: JaxprEqn) -> bool:
    return any(True for inner in inner_jaxprs(equation) for _ in names_in(inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@dataclasses.dataclass(frozen=True)
class RegionStructure:
    """A program with regions of the user's own, which were written in place: the whole, or the body
    of a scan in it.

    Attributes:
        flat: its steps.
        regions: first and last step (which is not in it) of each of the outermost regions.
        names: what steps in those regions name: number of the step, and the name.
        length: how often it runs for once of what is around it.
        carry: the numbers of the inputs that one turn hands to the next.
        scans: those among its steps, outside of all regions, that have regions inside.
    """

    flat: FlatJaxpr
    regions: tuple[tuple[int, int], ...]
    names: tuple[tuple[int, str], ...]
    length: int = 1
    carry: frozenset[int] = frozenset()
    scans: tuple[tuple[int, RegionStructure], ...] = ()


def region_structure(closed: ClosedJaxpr, without_regions: bool = False) -> RegionStructure:
    """A traced function by its regions; of a function ``without_regions`` the body of each scan
    counts as one, and names count wherever they are."""
    return _region_structure(flatten_jaxpr(closed, open_regions=True), without_regions)


def _region_structure(
    flat: FlatJaxpr, whole: bool, length: int = 1, carry: frozenset[int] = frozenset()
) -> RegionStructure:
    outermost = _outermost(flat.regions)
    if whole and length > 1:
        outermost = ((0, len(flat.steps)),)
    written = dict(flat.scans)
    if whole:
        written |= {at: s.equation for at, s in enumerate(flat.steps) if s.primitive == "scan"}
    scans = tuple(
        (at, _of_scan(equation, whole))
        for at, equation in written.items()
        if not any(start <= at < stop for start, stop in outermost)
    )
    names = tuple(
        (at, name)
        for at, step in enumerate(flat.steps)
        if (name := given_name(step.equation)) is not None
        and (whole or any(start <= at < stop for start, stop in outermost))
    )
    return RegionStructure(flat, outermost, names, length, carry, scans)


def _of_scan(equation: JaxprEqn, whole: bool) -> RegionStructure:
    flat = flatten_jaxpr(closed_of(equation.params["jaxpr"]), open_regions=True)
    first = flat.input_count - len(equation.invars)  # the body's own constants come first
    carry = loop_of(equation).carry
    handed = frozenset(range(first + carry.start, first + carry.stop))
    return _region_structure(flat, whole, equation.params["length"], handed)


def _outermost(regions: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(regions, key=lambda one: (one[0], -one[1])):
        if start < stop and not (found and stop <= found[-1][1]):
            found.append((start, stop))
    return tuple(found)
