"""Max and min pooling whose derivative writes nothing but the cotangent."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.program.derivatives.derivative import Derivative

POOLINGS = frozenset({"reduce_window_max", "reduce_window_min"})
# Elements, the derivative of which has a slice of the operand for each. Chosen: 8 x 8, more than
# networks pool; places are numbered in int8, which has room for twice of it and no more.
_WINDOW = 64


class Pooling(Derivative):
    """The largest and the smallest elements of windows."""

    def suits(self, rules) -> bool:
        """Whether its slices are fused: some compilers write all of them to memory."""
        return rules.picks_poolings

    def matches(self, step, kernel) -> bool:
        """Whether it is a pooling."""
        return step.primitive in POOLINGS

    def emit(self, step, operands, alone) -> jax.Array:
        """The pooled array."""
        return pool(step, operands[0], alone)


def pool(step: jaxprs.FlatStep, operand: jax.Array, alone: bool) -> jax.Array:
    """The largest (smallest) elements of all windows: a region of its own, since nothing that the
    backward pass makes is needed to find their places, which XLA may do at any time and hold.

    XLA's derivative writes four integers for the place of each, and scatters the cotangent into an
    array of zeros, which are there from the beginning. Here a place is its number in the window,
    and each element picks what arrives at it from the few windows that it is in: kernels that are
    fused. Of several that are largest the first has the cotangent, as in XLA.

    Unless something else reads the operand too: then XLA scatters into the cotangent that this
    leaves, and needs no zeros.

    XLA may fuse the slices with a neighbour that reads the same buffer element by element under
    another shape, and write the result over it: wrong gradients in silence (for CPUs in jaxlib
    0.10, for accelerators in 0.12). So a barrier parts the cotangent from what reads it; where
    barriers do not last, on a CPU, the derivative is JAX's own, whose scatter is never fused.
    """
    fun = _picking if alone and _is_small(step) else jaxprs.apply
    return jax.checkpoint(functools.partial(fun, step))(operand)


def _is_small(step: jaxprs.FlatStep) -> bool:
    parameters = step.equation.params
    return (
        math.prod(parameters["window_dimensions"]) <= _WINDOW
        and set(parameters["base_dilation"]) == {1} == set(parameters["window_dilation"])
        and jnp.issubdtype(step.equation.outvars[0].aval.dtype, jnp.floating)
    )


def _picking(step: jaxprs.FlatStep, operand: jax.Array) -> jax.Array:
    parameters = step.equation.params
    largest = step.primitive == "reduce_window_max"

    @jax.custom_jvp
    def pooled(operand):
        return jaxprs.apply(step, operand)

    def picking(operand, tangent):
        best, *others = _elements(operand, -np.inf if largest else np.inf, **parameters)
        place = jnp.zeros(best.shape, np.int8)
        for number, element in enumerate(others, 1):
            stays = best >= element if largest else best <= element
            best = jnp.where(stays, best, element)
            place = jnp.where(stays, place, np.int8(number))
        along = enumerate(_elements(tangent, 0.0, **parameters))
        picked = [jnp.where(place == number, element, 0) for number, element in along]
        return functools.reduce(jax.lax.add, picked)

    def scattering(operand, tangent):
        return jax.jvp(functools.partial(jaxprs.apply, step), (operand,), (tangent,))[1]

    @pooled.defjvp
    def _(primals, tangents):
        along = jax.lax.platform_dependent(*primals, *tangents, cpu=scattering, default=picking)
        return pooled(*primals), along

    return pooled(*jaxprs.cotangent_barrier([operand]))


def _elements(
    array: jax.Array,
    outside: float,
    *,
    window_dimensions,
    window_strides,
    padding,
    **_: Any,
) -> Iterator[jax.Array]:
    """For each place in a window what all windows have there."""
    fill = np.asarray(outside, array.dtype)
    padded = jax.lax.pad(array, fill, [(low, high, 0) for low, high in padding])
    axes = list(zip(padded.shape, window_dimensions, window_strides, strict=True))
    for place in itertools.product(*map(range, window_dimensions)):
        stops = [
            at + (length - size) // stride * stride + 1
            for at, (length, size, stride) in zip(place, axes, strict=True)
        ]
        yield jax.lax.slice(padded, place, stops, window_strides)
