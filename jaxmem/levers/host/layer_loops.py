"""The loops over a stack of layers in host memory: the value and the two halves of its derivative.

Why a backward pass of our own: `jax.grad` of a scan stacks the gradients of all layers on the
device first. And why the stacks are carried through the loops and written in place, rather than
scanned over: a scan's results never reuse the memory of what it scans, so a step that donates
its state would need twice the host memory.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.levers.host.one_layer import Layer
from jaxmem.levers.host.stacks import (
    check_on_host,
    empty_like,
    fetch_layer,
    stacked_params,
    store_layer,
)
from jaxmem.levers.host.transfers import to_device, to_host, zeros
from jaxmem.levers.host.trees import inexact_leaves, trainable, with_float0
from jaxmem.levers.host.updating import DifferentiableStack, LayerStack

Update = Callable[[LayerStack, Any, Any], LayerStack]  # of the stack, a gradient, and its layer


class LayerLoops:
    """One use of a stack of ``count`` layers; ``inputs`` is what is done with theirs."""

    def __init__(self, layer: Layer, inputs: str, update: Update, count: int):
        self.layer = layer
        self.inputs = inputs
        self.update = update
        self.count = count
        self.segment = math.isqrt(count) if inputs == "recompute" else count

    # ---- forward

    def value(self, layers: Any, x: Any, extras: tuple) -> Any:
        params = stacked_params(layers)
        return self._forward(params, x, extras, self.layer.fetch(params, 0), 0, self.count)[0]

    def forward(self, layers: Any, x: Any, extras: tuple) -> tuple[Any, tuple]:
        """The value and the residuals: the stack, the extras, the layers' saved inputs, and the
        parameters of the last layer where they are on the device."""
        params = stacked_params(layers)
        check_on_host(
            layers.stack if isinstance(layers, DifferentiableStack) else trainable(params)
        )
        fetched = self.layer.fetch(params, 0)
        if self.count == 1:
            saved = jax.tree.map(to_host, x) if self.inputs == "offload" else x
            return self.layer(fetched, x, extras), (layers, extras, saved, fetched)
        if self.segment < self.count:
            x, saved = self._forward_segments(params, x, extras, fetched)
            return x, (layers, extras, saved, None)
        saved = _no_inputs(x, self.count, self.inputs == "offload")
        y, saved, fetched = self._forward(params, x, extras, fetched, 0, self.count, saved)
        return y, (layers, extras, saved, fetched)

    def _forward(self, params, x, extras, fetched, start, length, saved=None):
        """``length`` layers from ``start`` on; the next layer's parameters come meanwhile."""

        def body(step, carry):
            x, saved, fetched = carry
            following = self.layer.fetch(params, jnp.minimum(start + step + 1, self.count - 1))
            saved = saved if saved is None else store_layer(saved, x, step)
            return self.layer(fetched, x, extras), saved, following

        if self.count == 1:
            return self.layer(fetched, x, extras), saved, fetched
        self.layer.check_chains(fetched, x, extras)
        return jax.lax.fori_loop(0, length, body, (x, saved, fetched))

    def _forward_segments(self, params, x, extras, fetched):
        """All layers, with the input of each segment saved."""
        whole, rest = divmod(self.count, self.segment)

        def segment(number, length, carry):
            x, saved, fetched = carry
            saved = store_layer(saved, x, number)
            start = number * self.segment
            x, _, fetched = self._forward(params, x, extras, fetched, start, length)
            return x, saved, fetched

        carry = x, _no_inputs(x, whole + (rest > 0), False), fetched
        carry = jax.lax.fori_loop(0, whole, lambda k, carry: segment(k, self.segment, carry), carry)
        x, saved, _ = segment(whole, rest, carry) if rest else carry
        return x, saved

    # ---- backward

    def backward(self, residuals: tuple, cotangent: Any) -> tuple[Any, Any, tuple]:
        """The cotangents of the stack (or the stack after its update), of ``x`` and of extras."""
        layers, extras, saved, fetched = residuals
        lent = isinstance(layers, DifferentiableStack)
        target = layers.stack if lent else empty_like(trainable(layers))
        read = stacked_params if lent else lambda _: layers
        total = [jnp.zeros_like(leaf) for leaf in inexact_leaves(extras)]
        carry = inexact_leaves(cotangent), total, target
        if self.count == 1:
            x = jax.tree.map(to_device, saved)
            (dx, total, target), _ = self._backward_layer(0, carry, fetched, fetched, x, extras)
        else:
            x = jax.eval_shape(lambda: fetch_layer(saved, 0))
            if self.segment < self.count:
                carry = self._backward_segments(carry, saved, extras, read)
            else:
                carry = self._backward(0, self.count, carry, fetched, saved, extras, read)
            dx, total, target = carry
        back = layers.wrap_updated(target) if lent else with_float0(layers, jax.tree.leaves(target))
        return back, with_float0(x, dx), tuple(with_float0(extras, total))

    def _backward_segments(self, carry, saved, extras, read):
        whole, rest = divmod(self.count, self.segment)

        def segment(number, length, carry):
            """Runs a segment's layers again, keeping their inputs, and back through them."""
            start = number * self.segment
            params = read(carry[2])
            x = fetch_layer(saved, number)
            inputs = _no_inputs(x, length, False)
            fetched = self.layer.fetch(params, start)
            x, inputs, fetched = self._forward(
                params, x, extras, fetched, start, length - 1, inputs
            )
            inputs = store_layer(inputs, x, length - 1)
            return self._backward(start, length, carry, fetched, inputs, extras, read)

        if rest:
            carry = segment(whole, rest, carry)
        return jax.lax.fori_loop(
            0, whole, lambda k, carry: segment(whole - 1 - k, self.segment, carry), carry
        )

    def _backward(self, start, length, carry, fetched, saved, extras, read):
        """Back through ``length`` layers from ``start`` on; ``read`` gives the stacked parameters
        from the carried target, which may hold them."""

        def body(k, carry):
            carry, fetched = carry
            step = length - 1 - k
            following = self.layer.fetch(read(carry[2]), jnp.maximum(start + step - 1, 0))
            x = fetch_layer(saved, step)
            return self._backward_layer(start + step, carry, fetched, following, x, extras)

        return jax.lax.fori_loop(0, length, body, (carry, fetched))[0]

    def _backward_layer(self, index, carry, fetched, following, x, extras):
        """Back through one layer, and its gradient or its update to where it belongs."""
        dy, total, target = carry
        stacks = jax.tree.leaves(trainable(stacked_params(target)))
        dparams, dx, dextras = self.layer.pull_back(fetched, x, extras, dy, stacks)
        # The next layer must have been read before this one is written in its stack, and the
        # compiler must know it: it would copy the stack otherwise.
        dparams, following = jax.lax.optimization_barrier((dparams, following))
        gradient = jax.tree.unflatten(jax.tree.structure(trainable(fetched)), dparams)
        if isinstance(target, LayerStack):
            target = self.update(target, gradient, index)
        else:
            target = store_layer(target, gradient, index)
        return (dx, [a + b for a, b in zip(total, dextras, strict=True)], target), following


def _no_inputs(x: Any, count: int, on_host: bool) -> Any:
    """Room for the inputs of ``count`` layers."""
    make = zeros if on_host else jnp.zeros
    return jax.tree.map(lambda leaf: make((count, *leaf.shape), leaf.dtype), x)
