"""A stack of equal layers whose parameters live in host memory.

The heart of PatrickStar and ZeRO-Infinity, as one XLA program: each layer's parameters come to the
device for as long as the layer computes, and its gradient, or the layer after its optimizer
update, goes back at once. Device memory is that of about three layers, whatever the depth.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.ground.checks import (
    check_alike,
    check_optimizer,
    check_same,
    is_count,
    shown,
)
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.host.layer_loops import LayerLoops
from jaxmem.levers.host.one_layer import Layer
from jaxmem.levers.host.stacks import (
    check_on_host,
    empty_stack,
    fetch_layer,
    layer_count,
    stacked_params,
    store_layer,
)
from jaxmem.levers.host.streaming import stream
from jaxmem.levers.host.trees import trainable, with_inexact
from jaxmem.levers.host.updating import DifferentiableStack, LayerStack
from jaxmem.levers.mixed_precision.policy import Precision, precision as parse_precision

_INPUTS = ("keep", "offload", "recompute")


class Layers:
    """A stack of equal layers with parameters on the host; `layers` makes it."""

    def __init__(
        self,
        block: Callable,
        optimizer: optax.GradientTransformation | None,
        inputs: str,
        precision: Precision | None,
        microbatches: int,
    ):
        self.block = block
        self.optimizer = optimizer
        self.inputs = inputs
        self.precision = precision
        self.microbatches = microbatches

    def __repr__(self):
        name = getattr(self.block, "__qualname__", repr(self.block))
        return f"Layers({name}, inputs={self.inputs!r})"

    def init(self, make: Callable[[Any], Any], keys: Any) -> Any:
        """A stack in host memory, made layer by layer: the device holds one.

        Args:
            make: the parameters of one layer, from one of ``keys``.
            keys: arrays with the layers along their first axis: PRNG keys to draw from, or
                parameters that are there already (for ``make=lambda params: params``).

        Returns:
            A `LayerStack` if these layers have an optimizer, else the stacked parameters.
        """
        count = layer_count(keys)

        def layer(keys, index):
            params = make(fetch_layer(keys, index))
            if self.optimizer is None:
                return params
            return LayerStack(params, self.optimizer.init(trainable(params)))

        @jax.jit
        def make_stack(keys):
            def body(index, stack):
                return store_layer(stack, layer(keys, index), index)

            empty = empty_stack(jax.eval_shape(layer, keys, 0), count)
            return jax.lax.fori_loop(0, count, body, empty)

        return make_stack(keys)

    def __call__(self, layers: Any, x: Any, *extras: Any) -> Any:
        """The layers, one after another, on ``x``.

        Args:
            layers: stacked parameters; their gradients come in host memory too. Or the
                `LayerStack` that `value_and_update` gives to the loss.
            x: what the first layer takes and each gives to the next: a pytree. A stack of one
                layer may return something else (an embedding does, or a head with its loss).
            *extras: further arguments of the block, the same for every layer.

        Raises:
            JaxmemError: no layers, stacks of different lengths, a `LayerStack` used twice, or a
                batch that the microbatches do not divide.
            OffloadError: differentiated where the stack is not in host memory.
        """
        lent = layers if isinstance(layers, DifferentiableStack) else None
        if lent is not None:
            lent.mark_used()
        count = layer_count(stacked_params(layers))
        layer = Layer(self.block, self.precision, self.microbatches, repr(self))
        loops = LayerLoops(layer, self.inputs, self._updated, count)
        differentiable = jax.custom_vjp(loops.value)
        differentiable.defvjp(loops.forward, loops.backward)
        return differentiable(layers, x, extras)

    def update(self, stack: LayerStack, gradients: Any, *, scale: Any = 1.0) -> LayerStack:
        """The stack after one optimizer step on gradients in host memory, layer by layer.

        For what needs every gradient before the first update, such as clipping by their global
        norm: ``scale=jnp.minimum(1, limit / blocks.norm(gradients))``.
        """
        check_same(("gradients", "in the stack"), stack.params, "in this call", gradients)
        if self.optimizer is not None:
            check_on_host(stack)

        def body(index, stack):
            layer = fetch_layer(trainable(gradients), index)
            return self._updated(stack, jax.tree.map(lambda leaf: leaf * scale, layer), index)

        return jax.lax.fori_loop(0, layer_count(gradients), body, stack)

    def norm(self, gradients: Any) -> jax.Array:
        """The norm of all the gradients of a stack, fetched layer by layer."""

        def body(index, total):
            layer = fetch_layer(trainable(gradients), index)
            squares = [
                jnp.sum(jnp.square(leaf.astype(total.dtype))) for leaf in jax.tree.leaves(layer)
            ]
            return total + sum(squares)

        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(trainable(gradients)))
        return jnp.sqrt(jax.lax.fori_loop(0, layer_count(gradients), body, jnp.zeros((), dtype)))

    def _updated(self, stack: LayerStack, gradient: Any, index: Any) -> LayerStack:
        """The stack with one layer updated in place, one array of parameters after another."""
        optimizer = self.optimizer
        if optimizer is None:
            raise JaxmemError(
                f"{self} have no optimizer to update a stack with. Give it to "
                "jaxmem.layers(block, optimizer=...), or differentiate by the parameters."
            )

        def of_one_layer(stack):
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack
            )

        params = trainable(stack.params)
        like = jax.eval_shape(optimizer.init, of_one_layer(params))
        name = ("a layer's optimizer state", "by the init of the optimizer of these layers")
        check_alike(name, like, "in the stack", of_one_layer(stack.opt_state))

        def step(gradient, state, params):
            gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        params, state = stream(step, gradient, stack.opt_state, params, {}, index=index)
        return LayerStack(with_inexact(stack.params, params), state)


def layers(
    block: Callable,
    *,
    optimizer: optax.GradientTransformation | None = None,
    inputs: str = "keep",
    precision: str | Precision | None = None,
    microbatches: int = 1,
) -> Layers:
    """A stack of equal layers with their parameters, and their optimizer state, in host memory.

    Layer by layer the parameters come to the device, the next one while one computes, and what
    the backward pass makes goes back as it comes. So the device holds about three layers at any
    depth, and the model may be as large as the host's memory.

    Given stacked parameters, the result is an ordinary differentiable function, and the gradients
    are in host memory like the parameters. With an ``optimizer``, in a loss under
    `jaxmem.value_and_update`, each layer is updated in the backward pass itself and no gradient is
    kept. That is for optimizers that treat layers one by one; clipping by a global norm, or a
    loss scale that can skip a step, needs all gradients first: `Layers.norm` and `Layers.update`.

    Unlike ZeRO-Offload nothing runs on the host's processor: optimizer state comes to the device
    and goes back, 12 bytes a parameter each way for Adam. Parameters come in their own dtype and
    are cast on the device; a half-precision copy on the host would save the forward pass the
    bytes that writing it costs the backward pass.

    Args:
        block: ``block(params, x, *extras) -> x``, one layer on the parameters of one; for a Flax
            module, ``lambda params, x: module.apply({"params": params}, x)``, or
            ``lambda params, x: nnx.merge(graph, params, rest)(x)`` with ``graph, _, rest =
            nnx.split(layer, nnx.Param, ...)`` of one of them. ``rest`` stays as it is and is the
            same for every layer: running statistics are not updated, and a dropout key is one
            of ``extras``. Its own regions (`jax.checkpoint`,
            `jaxmem.remat`) are kept. Integer parameters, such as the layer's number for its
            dropout key, stay as they are.
        optimizer: any optax transformation that treats layers one by one. Its state is that of
            each layer, schedules included.
        inputs: of the layers, for the backward pass: ``"keep"`` them on the device,
            ``"offload"`` them to the host, or ``"recompute"`` them from every sqrt(N)-th one, which
            fetches each layer once more.
        precision: parameters are cast to its ``compute`` dtype when they are on the device; None:
            they are not.
        microbatches: of the batch (the first axis of ``x``) inside each layer; the gradients are
            summed in the parameters' dtype. A layer is fetched once for all of them.

    Raises:
        JaxmemError: not a function, not an optax transformation, or no such choice.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> blocks = jaxmem.layers(lambda w, x: jnp.tanh(x @ w), optimizer=optax.adam(1e-3))
    >>> make = lambda key: jax.random.normal(key, (8, 8)) / 8**0.5
    >>> stack = blocks.init(make, jax.random.split(jax.random.key(0), 6))
    >>> stack.params.shape, stack.params.sharding.memory_kind
    ((6, 8, 8), 'pinned_host')
    >>> @jax.jit
    ... def step(scale, stack, x):
    ...     loss = lambda scale, stack, x: jnp.sum(scale * blocks(stack, x) ** 2)
    ...     return jaxmem.value_and_update(loss)(scale, stack, x)
    >>> loss, gradient, stack = step(jnp.ones(()), stack, jnp.ones((2, 8)))
    >>> stack.opt_state[0].count
    Array([1, 1, 1, 1, 1, 1], dtype=int32)
    """
    if isinstance(block, type) or not callable(block):
        raise JaxmemError(
            f"jaxmem.layers takes a function block(params, x) -> x; got {shown(block)}. For a Flax "
            "module, pass a function that applies it."
        )
    if optimizer is not None:
        optimizer = check_optimizer(optimizer, "jaxmem.layers")
    if inputs not in _INPUTS:
        raise JaxmemError(f"jaxmem.layers takes inputs= as one of {_INPUTS}; got {shown(inputs)}.")
    if not is_count(microbatches):
        raise JaxmemError(
            f"jaxmem.layers takes microbatches= as an int of 1 or more; got {shown(microbatches)}."
        )
    chosen = None if precision is None else parse_precision(precision)
    return Layers(block, optimizer, inputs, chosen, microbatches)
