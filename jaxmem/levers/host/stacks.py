"""Stacks of layers in host memory: arrays with the layers along their first axis."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import JaxmemError, OffloadError
from jaxmem.levers.host.transfers import fetch, on_host, store, zeros
from jaxmem.levers.host.updating import DifferentiableStack, LayerStack


def stacked_params(layers: Any) -> Any:
    """Stacked parameters, of whatever a stack of layers is called with."""
    layers = layers.stack if isinstance(layers, DifferentiableStack) else layers
    return layers.params if isinstance(layers, LayerStack) else layers


def layer_count(stack: Any) -> int:
    """The number of layers of a stack."""
    lengths = {
        jax.tree_util.keystr(path): leaf.shape[0] if leaf.ndim else 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(stack)
    }
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise JaxmemError(
            "Every array of a stack of layers has the layers along its first axis; the lengths of "
            f"that axis are {lengths or 'those of no array at all'}."
        )
    return next(iter(lengths.values()))


def fetch_layer(stack: Any, index: Any) -> Any:
    """One layer of a stack, on the device."""
    return jax.tree.map(lambda leaf: fetch(leaf, index), stack)


def store_layer(stack: Any, layer: Any, index: Any) -> Any:
    """The stack with one layer replaced."""
    return jax.tree.map(lambda leaf, value: store(leaf, value, index), stack, layer)


def empty_stack(layer: Any, count: int) -> Any:
    """Room for as many layers like one: arrays on the host, a scalar of each on the device."""
    return jax.tree.map(
        lambda leaf: (
            zeros((count, *leaf.shape), leaf.dtype) if leaf.ndim else jnp.zeros(count, leaf.dtype)
        ),
        layer,
    )


def empty_like(stack: Any) -> Any:
    """Room for the gradients of a stack, where their parameters are."""

    return jax.tree.map(
        lambda leaf: (zeros if on_host(leaf) else jnp.zeros)(leaf.shape, leaf.dtype), stack
    )


def check_on_host(stack: Any) -> None:
    """Raises `OffloadError` at the first array of a stack that is not where `empty_stack` has
    it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(stack):
        if leaf.ndim > 1 and leaf.size and not on_host(leaf):
            raise OffloadError(
                f"jaxmem.layers keeps its stack in host memory, and stack"
                f"{jax.tree_util.keystr(path)} is on the device. Make the stack with the init of "
                "these layers, abstract it with jaxmem.eval_shape, and put a restored one back "
                "with jaxmem.place."
            )
