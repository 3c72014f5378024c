"""The arrays among the operands of a call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.jaxprs import internals


def split_arrays(fun: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Callable]:
    """The array leaves of a call, and the call as a function of them alone."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def call(*filled):
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return fun(*inner_args, **inner_kwargs)

    return [leaves[index] for index in at], restrict_to(at, call, leaves)


def restrict_to(at: Sequence[int], fun: Callable, operands: Sequence[Any]) -> Callable:
    """A function as one of those of its operands that stand at some places."""

    def restricted(*chosen):
        filled = list(operands)
        for place, value in zip(at, chosen, strict=True):
            filled[place] = value
        return fun(*filled)

    return restricted


def inputs_read(fun: Callable, *args: Any) -> list[bool]:
    """For each array leaf of a function's arguments, whether its results depend on it."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    every = [True] * len(jaxpr.outvars)
    return list(internals.partial_eval.dce_jaxpr(jaxpr, every)[1])


def differentiable(avals: Sequence[Any], constant: Sequence[bool] = ()) -> list[int]:
    """The places of abstract values that have a derivative, but for those that are ``constant``."""
    return [
        at
        for at, aval in enumerate(avals)
        if has_derivative(aval) and not (constant and constant[at])
    ]


def has_derivative(aval: Any) -> bool:
    """Whether an abstract value is of numbers that a derivative is taken of; a token is not."""
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_opaque(value) -> bool:
    """Whether the elements of a constant cannot be looked at: a tracer, or random keys."""
    return isinstance(value, jax.core.Tracer) or is_extended(value)


def is_extended(value) -> bool:
    """Whether it is of a type that has no zeros, nor just the axes that JAX shows: random keys."""
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    return jnp.issubdtype(dtype, jax.dtypes.extended)
