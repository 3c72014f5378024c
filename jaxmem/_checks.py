"""Arguments checked at the door, before anything is traced or allocated."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._errors import JaxmemError


def check_optimizer(optimizer: Any, name: str) -> None:
    """Raises `JaxmemError` if the argument of ``name`` is not an optax transformation."""
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise JaxmemError(
            f"{name} takes an optax.GradientTransformation, such as optax.adam(1e-3); got "
            f"{optimizer!r} of type {type(optimizer).__name__}."
        )


def check_call(fun: Callable, args: tuple, kwargs: dict, name: str) -> None:
    """Raises `JaxmemError` if ``fun`` cannot be called with these arguments."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return  # built in: what it takes is not known
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        called = getattr(fun, "__qualname__", repr(fun))
        raise JaxmemError(
            f"{name} was given {called}{signature} and arguments that it does not take: {error}. "
            "Pass the arguments of one call, real or abstract."
        ) from error


def check_same(name: tuple[str, str], expected: Any, place: str, found: Any) -> None:
    """Raises `JaxmemError` at the first leaf of two trees that differs in path or shape.

    ``name`` is what the tree is, and where the expected one comes from.
    """
    wanted, given = _shapes(expected), _shapes(found)
    for path in [*wanted, *given]:
        here, there = (shapes.get(path, "absent") for shapes in (given, wanted))
        if here != there:
            raise JaxmemError(
                f"{name[0]}{path} is {here} {place} and {there} {name[1]}. Both must have one "
                "structure and one shape for each array."
            )


def _shapes(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): str(list(jnp.shape(leaf))) for path, leaf in leaves}
