"""A matmul in a narrow dtype whose sums are wide, and so are those of all its derivatives."""

from __future__ import annotations

import functools
import string
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.primitives import computed_by

if TYPE_CHECKING:
    from jax.extend.core import Primitive


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3))
def wide_einsum(spec: str, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """`jax.numpy.einsum` of two float32 (or wider) arrays rounded to ``dtype``; the result, and the
    cotangents in the backward pass, are not rounded.

    The derivative of a plain matmul in bfloat16 is rounded to bfloat16: once where it is one
    matmul, and each part of it where it is a sum over blocks. (With ``preferred_element_type``
    alone, a float32 cotangent is multiplied as such: many times slower.)
    """
    return _compute(left, right, spec=spec, dtype=np.dtype(dtype))


def _jvp(spec, dtype, primals, tangents):
    (left, right), (d_left, d_right) = primals, tangents
    along = []
    if not jaxprs.is_zero(d_left):
        along.append(tangent_einsum(spec, d_left, right, dtype))
    if not jaxprs.is_zero(d_right):
        along.append(tangent_einsum(spec, left, d_right, dtype))
    out = wide_einsum(spec, left, right, dtype)
    return out, sum(along) if along else jnp.zeros_like(out)


wide_einsum.defjvp(_jvp, symbolic_zeros=True)


def tangent_einsum(spec: str, left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """`wide_einsum` where one of the two is a tangent, for rules of derivatives."""
    left, right = jaxprs.match_varying_axes(left, right), jaxprs.match_varying_axes(right, left)
    return _product().bind(left, right, spec=spec, dtype=np.dtype(dtype))


def _compute(left, right, *, spec: str, dtype):
    wide = jnp.result_type(left, right)
    return jnp.einsum(spec, left.astype(dtype), right.astype(dtype), preferred_element_type=wide)


# ---- a primitive, since only a primitive can say how it is transposed


def _abstract(left, right, *, spec: str, dtype):
    of_left, of_right, out = _labels(spec)
    sizes = dict(zip(of_left + of_right, (*left.shape, *right.shape), strict=True))
    return jaxprs.of_shape(left, tuple(sizes[label] for label in out))


def _transpose_left(cotangent, _, right, *, spec: str, dtype):
    own, other, out = _labels(spec)
    return tangent_einsum(f"{out},{other}->{own}", cotangent, right, dtype)


def _transpose_right(cotangent, left, _, *, spec: str, dtype):
    other, own, out = _labels(spec)
    return tangent_einsum(f"{other},{out}->{own}", left, cotangent, dtype)


def _batch(operands, axes, *, spec: str, dtype):
    left, right = operands
    *labels, out = _labels(spec)
    new = next(label for label in string.ascii_letters if label not in spec)
    of_left, of_right = (
        own if axis is None else own[:axis] + new + own[axis:]
        for own, axis in zip(labels, axes, strict=True)
    )
    return tangent_einsum(f"{of_left},{of_right}->{new}{out}", left, right, dtype), 0


def _labels(spec: str) -> list[str]:
    """Of the operands and of the result."""
    return spec.replace("->", ",").split(",")


@functools.cache
def _product() -> Primitive:
    product = computed_by("wide_einsum", _compute, _abstract, _batch)
    product.def_impl(jax.jit(_compute, static_argnames=("spec", "dtype")))
    internals.ad.defbilinear(product, _transpose_left, _transpose_right)
    return product
