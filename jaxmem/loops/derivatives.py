"""A function with a derivative that is written by hand, as JAX wants it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.operands import restrict_to
from jaxmem.loops.axes import in_front
from jaxmem.loops.linear import Linear
from jaxmem.loops.tapes import no_cotangent, zeros

Passes = tuple[Callable[..., Any], Callable[..., Any]]


def with_backward(plain: Callable, passes: Callable[[frozenset[int]], Passes]) -> Callable:
    """``plain(*operands)``, a tuple of arrays, whose derivative in reverse mode is another.

    ``passes(wanted)`` are two functions for the places of operands whose cotangents are asked for:
    ``forward(operands)`` returns the same results and a tree of residuals, and
    ``backward(operands, residuals, cotangents)`` the cotangents of all operands, any of those that
    are not ``wanted``; ``cotangents`` are those of the results that have one, by their places.
    Forward mode, and what differentiates the derivative again, goes by ``plain``.
    """
    passes = functools.cache(passes)

    @jax.custom_jvp
    def function(*operands):
        return tuple(in_front(plain(*operands), operands))

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def of_function(operands, tangents):
        wanted = _moving(operands, tangents)
        results, residuals = kept(wanted)(*operands)
        return results, tangents_of(operands, tangents, results, residuals, wanted, wanted)

    @functools.cache
    def kept(wanted):
        @jax.custom_jvp
        def kept_of(*operands):
            forward, _ = passes(wanted)
            results, residuals = forward(operands)
            return tuple(in_front(results, operands)), residuals

        @functools.partial(kept_of.defjvp, symbolic_zeros=True)
        def of_kept(operands, tangents):
            moved = _moving(operands, tangents)
            results, residuals = kept(wanted | moved)(*operands)
            made = tangents_of(operands, tangents, results, residuals, moved, wanted | moved)
            _, residuals = kept_of(*operands)
            return (results, residuals), (made, jax.tree.map(_no_tangent, residuals))

        return kept_of

    def tangents_of(operands, tangents, results, residuals, moving, kept_for) -> tuple:
        """The tangents of the results, by those of the operands that are ``moving``."""
        at = sorted(moving)
        real = [place for place, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        leaves, tree = jax.tree.flatten(residuals)
        count = len(operands)

        def chosen(values):
            def of_real(*operands):
                made = plain(*operands)
                return [made[place] for place in real]

            return restrict_to(at, of_real, values[:count])

        def forwards(values, moved):
            return jax.jvp(chosen(values), [values[place] for place in at], list(moved))[1]

        def backwards_again(values, moved):
            shapes = (jax.typeof(results[place]) for place in real)
            moved = [zeros(x) if y is None else y for x, y in zip(shapes, moved, strict=True)]
            return list(jax.vjp(chosen(values), *(values[place] for place in at))[1](moved))

        def backwards(values, moved):
            residuals = jax.tree.unflatten(tree, values[count:])
            pairs = zip(real, moved, strict=True)
            cotangents = {place: one for place, one in pairs if one is not None}
            _, backward = passes(kept_for)
            made = backward(values[:count], residuals, cotangents)
            return [made[place] for place in at]

        rule = Linear(
            forwards,
            forwards,
            backwards,
            backwards_again,
            tuple(jax.typeof(operands[place]) for place in at),
            tuple(jax.typeof(results[place]) for place in real),
        )
        moved = iter(rule([*operands, *leaves], [tangents[place] for place in at]))
        return tuple(
            next(moved) if place in real else no_cotangent(x) for place, x in enumerate(results)
        )

    return function


def _moving(operands, tangents) -> frozenset[int]:
    """The places of operands that have a tangent."""
    zero = internals.SymbolicZero
    return frozenset(
        place for place, (value, tangent) in enumerate(zip(operands, tangents, strict=True))
        if jnp.issubdtype(value.dtype, jnp.inexact) and type(tangent) is not zero
    )  # fmt: skip


def _no_tangent(value):
    real = jnp.issubdtype(value.dtype, jnp.inexact)
    return jnp.zeros_like(value) if real else no_cotangent(value)
