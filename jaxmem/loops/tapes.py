"""One step of a loop as a tape: what its derivative needs of it, told apart by where it is from."""

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.jaxprs import internals, original
from jaxmem.jaxprs.placement import filled

# Of constants, carry and slices, a list each, to the next carry and the results, a list each.
Step = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Tape:
    """A step with its residuals, and its derivative by those.

    A residual that is a constant or a slice itself is there already, and one that is made of
    constants alone is made once; only the others (``stacked``) are kept for each step.
    """

    forward: Callable  # of all operands, flat: carry, results and residuals, flat
    tree: Any  # of the residuals: that of the function that JAX made for the derivative
    first: int  # operands are constants up to here
    second: int  # the carry up to here, then slices
    results: tuple[Any, ...]  # abstract values of the next carry and the step's results
    stacked: tuple[Any, ...]  # abstract values of what is kept of each step
    sources: tuple[tuple[str, int], ...]  # of each residual: a kind, and a number of that kind
    differentiable: tuple[bool, ...]  # whether each operand has a cotangent

    @classmethod
    def trace(
        cls, step: Step, constants: Sequence, carry: Sequence, slices: Sequence, wanted: Set[int]
    ) -> "Tape":
        """The tape of a step, by its operands' abstract values, for cotangents of the carry and of
        what stands at the places that are ``wanted``: a `jax.custom_vjp` refuses to be
        differentiated by arrays that it closes over."""
        avals = [*constants, *carry, *slices]
        first, second = len(constants), len(constants) + len(carry)
        differentiable = [
            jnp.issubdtype(aval.dtype, jnp.inexact) and (place in wanted or first <= place < second)
            for place, aval in enumerate(avals)
        ]
        shapes = None

        def forward(*operands):
            def of_moving(chosen):
                left = iter(chosen)
                filled = [
                    next(left) if one else x
                    for one, x in zip(differentiable, operands, strict=True)
                ]
                carry, results = step(filled[:first], filled[first:second], filled[second:])
                return [*carry, *results]

            chosen = [x for one, x in zip(differentiable, operands, strict=True) if one]
            results, derivative = jax.vjp(of_moving, chosen)
            residuals, tree = jax.tree.flatten(derivative)
            nonlocal shapes
            shapes = tree, len(results)
            return [*results, *residuals]

        closed = jax.make_jaxpr(forward)(*avals)
        assert shapes is not None
        tree, made = shapes
        jaxpr = closed.jaxpr
        depends: dict[Any, bool] = {}  # on a carry or a slice
        for number, variable in enumerate(jaxpr.invars):
            depends[variable] = number >= first
        for equation in jaxpr.eqns:
            read = (x for x in equation.invars if not isinstance(x, internals.Literal))
            depends |= dict.fromkeys(equation.outvars, any(depends.get(x, False) for x in read))
        sources: list[tuple[str, int]] = []
        places: dict[Any, tuple[str, int]] = {}
        stacked: list[Any] = []
        makers = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
        for number, variable in enumerate(jaxpr.outvars[made:]):
            # Of a value that is saved in one region and read in another JAX keeps a rounded copy,
            # and some of XLA's compilers a stack of each.
            variable = original(makers, variable)
            if isinstance(variable, internals.Literal) or not depends.get(variable, False):
                place = ("constant", number)
            elif variable in jaxpr.invars[second:]:
                place = ("slice", jaxpr.invars.index(variable) - second)
            elif variable in places:
                place = places[variable]
            else:
                place = ("stacked", len(stacked))
                stacked.append(variable.aval)
            if not isinstance(variable, internals.Literal):
                places[variable] = place
            sources.append(place)
        results = tuple(closed.out_avals[:made])
        function = internals.jaxpr_as_fun(closed)
        return cls(
            function,
            tree,
            first,
            second,
            results,
            tuple(stacked),
            tuple(sources),
            tuple(differentiable),
        )

    def run(self, constants, carry, slices) -> tuple[list[Any], list[Any], list[Any]]:
        """The next carry, the results, and what is kept of the step."""
        made = self.forward(*constants, *carry, *slices)
        kept: dict[int, Any] = {}
        for (kind, number), value in zip(self.sources, made[len(self.results) :], strict=True):
            if kind == "stacked":
                kept.setdefault(number, value)
        carries = self.second - self.first
        return made[:carries], made[carries : len(self.results)], list(kept.values())

    def constant(self, constants, carry, slices) -> dict[int, Any]:
        """The residuals that are made of constants alone, from a step's operands whatever they
        are."""
        residuals = self.forward(*constants, *carry, *slices)[len(self.results) :]
        return {
            number: residuals[number] for kind, number in set(self.sources) if kind == "constant"
        }

    def pullback(self, constant, kept, slices, cotangents) -> tuple[list, list, list]:
        """The cotangents of constants, carry and slices, from those of the next carry and of the
        results (None: it has none); None of what has none."""
        values = {"constant": constant, "slice": slices, "stacked": kept}
        residuals = [values[kind][number] for kind, number in self.sources]
        derivative = jax.tree.unflatten(self.tree, residuals)
        pairs = zip(cotangents, self.results, strict=True)
        (made,) = derivative([zeros(aval) if bar is None else bar for bar, aval in pairs])
        left = iter(made)
        found = [next(left) if one else None for one in self.differentiable]
        return found[: self.first], found[self.first : self.second], found[self.second :]


def zeros(aval) -> Any:
    """The cotangent of what nothing reads, by its abstract value."""
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return no_cotangent(aval)
    return filled(aval)


def no_cotangent(value) -> np.ndarray:
    """The tangent and the cotangent of what has none, as JAX writes them."""
    return np.zeros(np.shape(value), jax.dtypes.float0)  # (a residual may be a number)
