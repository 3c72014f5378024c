"""Pytrees of which only the inexact leaves have a derivative."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def inexact_leaves(tree: Any) -> list[Any]:
    """The leaves that have a derivative."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]


def trainable(tree: Any) -> Any:
    """The tree with None for what has no derivative."""
    return jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else None, tree)


def with_inexact(tree: Any, inexact: Any) -> Any:
    """The tree with other leaves in place of those that have a derivative."""
    leaves, structure = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(inexact))
    return jax.tree.unflatten(
        structure, [next(new) if _is_inexact(leaf) else leaf for leaf in leaves]
    )


def with_float0(tree: Any, cotangents: list[Any]) -> Any:
    """Cotangents of a whole tree from those of its inexact leaves."""
    leaves, structure = jax.tree.flatten(tree)
    given = iter(cotangents)
    return jax.tree.unflatten(
        structure,
        [
            next(given) if _is_inexact(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            for leaf in leaves
        ],
    )


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
