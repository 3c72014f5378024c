"""Matmuls and convolutions in bfloat16 on a device that computes them in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from jaxmem import jaxprs
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.primitives import computed_by
from jaxmem.program.derivatives.derivative import Derivative

if TYPE_CHECKING:
    from jax.extend.core import Primitive

_barrier = jax.lax.optimization_barrier


class Widening(Derivative):
    """Matmuls and convolutions that are computed in float32, from copies."""

    def matches(self, step, kernel) -> bool:
        """Whether the device has no bfloat16 units for it."""
        return kernel.widened

    def emit(self, step, operands, alone) -> jax.Array:
        """The product."""
        return widened(step, *operands)


def widened(step: jaxprs.FlatStep, left: jax.Array, right: jax.Array) -> jax.Array:
    """A matmul or convolution, and its derivatives, whose float32 copies are there while it runs.

    XLA copies the operands to float32 and the result back. Without barriers it holds a copy for
    all that reads the same value, to the backward pass even, and computes on in float32.
    """

    @jax.custom_jvp
    def contracted(left, right):
        return _barrier(jaxprs.apply(step, *jaxprs.barrier([left, right])))

    def jvp(primals, tangents):
        linear = [not jaxprs.is_zero(tangent) for tangent in tangents]
        moving = [tangent for tangent, moves in zip(tangents, linear, strict=True) if moves]
        out = contracted(*primals)
        if not moving:
            return out, jax.numpy.zeros_like(out)
        return out, _tangent_product().bind(*primals, *moving, step=step, linear=tuple(linear))

    contracted.defjvp(jvp, symbolic_zeros=True)
    return contracted(left, right)


# ---- the derivative: a primitive, since only a primitive can say how it is transposed


def _tangent(left, right, *tangents, step: jaxprs.FlatStep, linear: tuple[bool, bool]):
    moving = iter(tangents)
    parts = []
    if linear[0]:
        parts.append(jaxprs.apply(step, next(moving), right))
    if linear[1]:
        parts.append(jaxprs.apply(step, left, next(moving)))
    return functools.reduce(jax.lax.add, parts)


def _transpose(cotangent, left, right, *tangents, step: jaxprs.FlatStep, linear: tuple[bool, bool]):
    """One after the other, and none without the other: XLA puts off the gradients of parameters,
    and holds copies of what they are made from until the end of the program."""
    if type(cotangent) is internals.ad.Zero:
        return [None] * (2 + len(tangents))
    found: list[jax.Array] = []
    if linear[1]:
        left, cotangent = _barrier((left, cotangent))
        by_right = jax.linear_transpose(functools.partial(jaxprs.apply, step, left), right)
        found = by_right(cotangent)
    if linear[0]:
        right, cotangent, *found = _barrier((right, cotangent, *found))
        by_left = jax.linear_transpose(lambda left: jaxprs.apply(step, left, right), left)
        found = [*by_left(cotangent), *found]
    return [None, None, *_barrier(found)]


def _jvp(primals: Sequence, tangents: Sequence, **parameters):
    tangents = [internals.ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(functools.partial(_tangent, **parameters), tuple(primals), tuple(tangents))


def _batch(operands: Sequence, axes: Sequence, **parameters):
    return jax.vmap(functools.partial(_tangent, **parameters), axes)(*operands), 0


def _abstract(left, right, *_, step: jaxprs.FlatStep, linear: tuple[bool, bool]):
    return jaxprs.result_of(step.equation.primitive, [left, right], step.equation.params)


@functools.cache
def _tangent_product() -> Primitive:
    product = computed_by("widened_tangent", _tangent, _abstract, _batch)
    internals.ad.primitive_jvps[product] = _jvp
    internals.ad.primitive_transposes[product] = _transpose
    return product
