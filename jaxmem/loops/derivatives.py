"""A function with a derivative that is written by hand, as JAX wants it."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.operands import of_some
from jaxmem.loops.linear import Linear
from jaxmem.loops.tapes import no_cotangent


def with_backward(
    plain: Callable, forward: Callable, backward: Callable, moving: Sequence[bool]
) -> Callable:
    """``plain(*operands)``, a tuple of arrays, whose derivative in reverse mode is another.

    ``forward(operands)`` returns the same results and a tree of residuals, and
    ``backward(operands, residuals, cotangents, wanted)`` the cotangents of the operands, any of
    those that are not ``wanted``; ``cotangents`` are those of the results, by their places.
    Forward mode, and what differentiates the derivative again, goes by ``plain``. Operands that are
    ``moving`` have cotangents.
    """

    @jax.custom_jvp
    def function(*operands):
        return plain(*operands)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def of_function(operands, tangents):
        results, residuals = kept(*operands)
        return results, tangents_of(operands, tangents, results, residuals)

    @jax.custom_jvp
    def kept(*operands):
        return forward(operands)

    @functools.partial(kept.defjvp, symbolic_zeros=True)
    def of_kept(operands, tangents):
        results, residuals = kept(*operands)
        moved = tangents_of(operands, tangents, results, residuals)
        return (results, residuals), (moved, jax.tree.map(_no_tangent, residuals))

    def tangents_of(operands, tangents, results, residuals) -> tuple:
        """The tangents of the results, by those of the operands that have one."""
        zero = jax.custom_derivatives.SymbolicZero
        at = [
            place for place, tangent in enumerate(tangents)
            if moving[place] and type(tangent) is not zero
        ]  # fmt: skip
        real = [place for place, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        leaves, tree = jax.tree.flatten(residuals)
        count = len(operands)

        def chosen(values):
            def of_real(*operands):
                made = plain(*operands)
                return [made[place] for place in real]

            return of_some(at, of_real, values[:count])

        def forwards(values, moved):
            return jax.jvp(chosen(values), [values[place] for place in at], list(moved))[1]

        def backwards_again(values, moved):
            return list(jax.vjp(chosen(values), *(values[place] for place in at))[1](list(moved)))

        def backwards(values, moved):
            residuals = jax.tree.unflatten(tree, values[count:])
            cotangents = dict(zip(real, moved, strict=True))
            made = backward(values[:count], residuals, cotangents, set(at))
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


def _no_tangent(value):
    real = jnp.issubdtype(value.dtype, jnp.inexact)
    return jnp.zeros_like(value) if real else no_cotangent(value)
