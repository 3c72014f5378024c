"""A stack of equal layers whose parameters live in host memory.

The heart of PatrickStar and ZeRO-Infinity, as one XLA program: each layer's parameters come to the
device for as long as the layer computes, and its gradient, or the layer after its optimizer
update, goes back at once. Device memory is that of about three layers, whatever the depth.

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
import numpy as np
import optax

from jaxmem import jaxprs
from jaxmem.ground.checks import check_alike, check_optimizer, check_same, is_count, shown
from jaxmem.ground.errors import JaxmemError, OffloadError
from jaxmem.levers.host.streaming import fetch, store, stream, to_device, to_host, zeros
from jaxmem.levers.host.updating import LayerStack, Lent
from jaxmem.levers.precision.policy import Precision, precision as parse_precision

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
        self.optimizer = None if optimizer is None else optax.with_extra_args_support(optimizer)
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
        count = _count(keys)

        def one(keys, index):
            params = make(jax.tree.map(lambda leaf: fetch(leaf, index), keys))
            if self.optimizer is None:
                return params
            return LayerStack(params, self.optimizer.init(_trainable(params)))

        @jax.jit
        def all_of_them(keys):
            def body(index, stack):
                new = one(keys, index)
                return jax.tree.map(lambda leaf, value: store(leaf, value, index), stack, new)

            layer = jax.eval_shape(one, keys, 0)
            return jax.lax.fori_loop(0, count, body, jax.tree.map(_stack_of(count), layer))

        return all_of_them(keys)

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
        lent = layers if isinstance(layers, Lent) else None
        if lent is not None:
            lent.take()
        count = _count(_stack_params(layers))
        once = _Pass(self, count)
        differentiable = jax.custom_vjp(once.value)
        differentiable.defvjp(once.forward, once.backward)
        return differentiable(layers, x, extras)

    def update(self, stack: LayerStack, gradients: Any, *, scale: Any = 1.0) -> LayerStack:
        """The stack after one optimizer step on gradients in host memory, layer by layer.

        For what needs every gradient before the first update, such as clipping by their global
        norm: ``scale=jnp.minimum(1, limit / blocks.norm(gradients))``.
        """
        check_same(("gradients", "in the stack"), stack.params, "in this call", gradients)
        if self.optimizer is not None:
            _check_on_host(stack)

        def body(index, stack):
            layer = jax.tree.map(lambda leaf: fetch(leaf, index) * scale, _trainable(gradients))
            return self._updated(stack, layer, index)

        return jax.lax.fori_loop(0, _count(gradients), body, stack)

    def norm(self, gradients: Any) -> jax.Array:
        """The norm of all the gradients of a stack, fetched layer by layer."""

        def body(index, total):
            layer = jax.tree.map(lambda leaf: fetch(leaf, index), _trainable(gradients))
            squares = [
                jnp.sum(jnp.square(leaf.astype(total.dtype))) for leaf in jax.tree.leaves(layer)
            ]
            return total + sum(squares)

        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(_trainable(gradients)))
        return jnp.sqrt(jax.lax.fori_loop(0, _count(gradients), body, jnp.zeros((), dtype)))

    def _updated(self, stack: LayerStack, gradient: Any, index: Any) -> LayerStack:
        """The stack with one layer updated in place, one array of parameters after another."""
        optimizer = self.optimizer
        if optimizer is None:
            raise JaxmemError(
                f"{self} have no optimizer to update a stack with. Give it to "
                "jaxmem.layers(block, optimizer=...), or differentiate by the parameters."
            )

        def one(stack):
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack
            )

        like = jax.eval_shape(optimizer.init, one(_trainable(stack.params)))
        name = ("a layer's optimizer state", "by the init of the optimizer of these layers")
        check_alike(name, like, "in the stack", one(stack.opt_state))

        def step(gradient, state, params):
            gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        trainable = _trainable(stack.params)
        params, state = stream(step, gradient, stack.opt_state, trainable, {}, index=index)
        return LayerStack(_fill(stack.params, params), state)


class _Pass:
    """One use of the layers: the value, and the two halves of its derivative."""

    def __init__(self, layers: Layers, count: int):
        self.layers = layers
        self.count = count
        self.segment = math.isqrt(count) if layers.inputs == "recompute" else count

    # ---- forward

    def value(self, layers: Any, x: Any, extras: tuple) -> Any:
        params = _stack_params(layers)
        return self._sweep(params, x, extras, self._ready(params, 0), 0, self.count)[0]

    def forward(self, layers: Any, x: Any, extras: tuple) -> tuple[Any, tuple]:
        params = _stack_params(layers)
        _check_on_host(layers.stack if isinstance(layers, Lent) else _trainable(params))
        ready = self._ready(params, 0)
        if self.count == 1:
            saved = jax.tree.map(to_host, x) if self.layers.inputs == "offload" else x
            return self._block(ready, x, extras), (layers, extras, saved, ready)
        if self.segment == self.count:
            saved = self._room(x, self.count, self.layers.inputs == "offload")
            y, saved, ready = self._sweep(params, x, extras, ready, 0, self.count, saved)
            return y, (layers, extras, saved, ready)
        whole, rest = divmod(self.count, self.segment)

        def body(number, carry):
            x, saved, ready = carry
            saved = _store(saved, x, number)
            x, _, ready = self._sweep(params, x, extras, ready, number * self.segment, self.segment)
            return x, saved, ready

        saved = self._room(x, whole + (rest > 0), False)
        x, saved, ready = jax.lax.fori_loop(0, whole, body, (x, saved, ready))
        if rest:
            saved = _store(saved, x, whole)
            x, _, ready = self._sweep(params, x, extras, ready, whole * self.segment, rest)
        return x, (layers, extras, saved, None)

    def _sweep(self, params, x, extras, ready, start, length, saved=None):
        """``length`` layers from ``start`` on; the next layer's parameters come meanwhile."""

        def body(step, carry):
            x, saved, ready = carry
            ahead = self._ready(params, jnp.minimum(start + step + 1, self.count - 1))
            saved = saved if saved is None else _store(saved, x, step)
            return self._block(ready, x, extras), saved, ahead

        if self.count == 1:
            return self._block(ready, x, extras), saved, ready
        self._check_carried(ready, x, extras)
        return jax.lax.fori_loop(0, length, body, (x, saved, ready))

    def _block(self, params: Any, x: Any, extras: tuple) -> Any:
        if self.layers.microbatches == 1:
            return self.layers.block(params, x, *extras)
        parts = self._split(x)
        return _join(jax.lax.map(lambda part: self.layers.block(params, part, *extras), parts))

    # ---- backward

    def backward(self, residuals: tuple, cotangent: Any) -> tuple[Any, Any, tuple]:
        layers, extras, saved, ready = residuals
        lent = isinstance(layers, Lent)
        target = layers.stack if lent else jax.tree.map(_zeros_like, _trainable(layers))
        read = _stack_params if lent else lambda _: layers
        carry = (_inexact(cotangent), [jnp.zeros_like(leaf) for leaf in _inexact(extras)], target)
        if self.count == 1:
            x = jax.tree.map(to_device, saved)
            (dx, total, target), _ = self._step(0, carry, ready, ready, x, extras)
        else:
            x = jax.eval_shape(lambda: _fetch(saved, 0))
            run = self._reverse if self.segment == self.count else self._recomputed
            dx, total, target = run(0, self.count, carry, ready, saved, extras, read)
        back = layers.give_back(target) if lent else _with_float0(layers, jax.tree.leaves(target))
        return back, _with_float0(x, dx), tuple(_with_float0(extras, total))

    def _recomputed(self, _start, _length, carry, _ready, saved, extras, read):
        whole, rest = divmod(self.count, self.segment)

        def segment(number, length, carry):
            """Runs a segment's layers again, keeping their inputs, and back through them."""
            start = number * self.segment
            params = read(carry[2])
            x = _fetch(saved, number)
            room = self._room(x, length, False)
            x, room, ready = self._sweep(
                params, x, extras, self._ready(params, start), start, length - 1, room
            )
            room = _store(room, x, length - 1)
            return self._reverse(start, length, carry, ready, room, extras, read)

        if rest:
            carry = segment(whole, rest, carry)
        return jax.lax.fori_loop(
            0, whole, lambda k, carry: segment(whole - 1 - k, self.segment, carry), carry
        )

    def _reverse(self, start, length, carry, ready, saved, extras, read):
        def body(k, carry):
            carry, ready = carry
            step = length - 1 - k
            ahead = self._ready(read(carry[2]), jnp.maximum(start + step - 1, 0))
            x = _fetch(saved, step)
            return self._step(start + step, carry, ready, ahead, x, extras)

        return jax.lax.fori_loop(0, length, body, (carry, ready))[0]

    def _step(self, index, carry, ready, ahead, x, extras):
        """Back through one layer, and its gradient or its update to where it belongs."""
        dy, total, target = carry
        dparams, dx, dextras = self._pull(ready, x, extras, dy, target)
        # The next layer must have been read before this one is written in its stack, and the
        # compiler must know it: it would copy the stack otherwise.
        dparams, ahead = jax.lax.optimization_barrier((dparams, ahead))
        gradient = jax.tree.unflatten(jax.tree.structure(_trainable(ready)), dparams)
        if isinstance(target, LayerStack):
            target = self.layers._updated(target, gradient, index)
        else:
            target = _store(target, gradient, index)
        return (dx, [a + b for a, b in zip(total, dextras, strict=True)], target), ahead

    def _pull(self, params, x, extras, dy, target):
        """Cotangents of one layer's parameters, input and extras, as lists of inexact leaves."""

        def pull(x, dy):
            def run(dparams, dx, dextras):
                y = self.layers.block(_fill(params, dparams), _fill(x, dx), *_fill(extras, dextras))
                return _inexact(y)

            return jax.vjp(run, *map(_inexact, (params, x, extras)))[1](dy)

        if self.layers.microbatches == 1:
            return pull(x, dy)

        def body(sums, part):
            dparams, dx, dextras = pull(*part)
            return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, (dparams, dextras)), dx

        stacks = _trainable(target.params if isinstance(target, LayerStack) else target)
        sums = [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(stacks)]
        zero = [jnp.zeros_like(leaf) for leaf in _inexact(extras)]
        (dparams, dextras), dx = jax.lax.scan(body, (sums, zero), (self._split(x), self._split(dy)))
        return dparams, _join(dx), dextras

    # ---- pieces

    def _ready(self, params: Any, index: Any) -> Any:
        """A layer's parameters on the device in the dtype that it computes in."""
        precision = self.layers.precision
        params = _fetch(params, index)
        return params if precision is None else precision.cast_to_compute(params)

    def _room(self, x: Any, count: int, on_host: bool) -> Any:
        """Where the inputs of ``count`` layers are kept."""
        make = zeros if on_host else jnp.zeros
        return jax.tree.map(lambda leaf: make((count, *leaf.shape), leaf.dtype), x)

    def _split(self, tree: Any) -> Any:
        """The batch as microbatches; each takes every so many rows, so that what is sharded
        along the batch stays where it is."""
        count = self.layers.microbatches

        def split(leaf):
            if leaf.ndim == 0 or leaf.shape[0] % count:
                raise JaxmemError(
                    f"{self.layers} split their batch into {count} microbatches, along the first "
                    f"axis of every array that goes through them; one has shape "
                    f"{list(leaf.shape)}. Take a number that divides the batch, and leave the "
                    "loss outside of the layers."
                )
            return jnp.swapaxes(leaf.reshape(-1, count, *leaf.shape[1:]), 0, 1)

        return jax.tree.map(split, tree)

    def _check_carried(self, params: Any, x: Any, extras: tuple) -> None:
        given, made = (
            jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
            for tree in (x, jax.eval_shape(self._block, params, x, extras))
        )
        if given != made:
            raise JaxmemError(
                f"Each layer takes what the one before it returns, and a layer of {self.layers} "
                f"takes {given} and returns {made}. Cast or reshape outside, or put that layer "
                "into a stack of one."
            )


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
        check_optimizer(optimizer, "jaxmem.layers")
    if inputs not in _INPUTS:
        raise JaxmemError(f"jaxmem.layers takes inputs= as one of {_INPUTS}; got {shown(inputs)}.")
    if not is_count(microbatches):
        raise JaxmemError(
            f"jaxmem.layers takes microbatches= as an int of 1 or more; got {shown(microbatches)}."
        )
    chosen = None if precision is None else parse_precision(precision)
    return Layers(block, optimizer, inputs, chosen, microbatches)


# ---- trees


def _stack_params(layers: Any) -> Any:
    """Stacked parameters, of whatever a stack of layers is called with."""
    layers = layers.stack if isinstance(layers, Lent) else layers
    return layers.params if isinstance(layers, LayerStack) else layers


def _count(stack: Any) -> int:
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


def _check_on_host(stack: Any) -> None:
    """Raises `OffloadError` at the first array of a stack that is not where `_stack_of` has it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(stack):
        if leaf.ndim > 1 and leaf.size and jaxprs.memory_space(leaf) is not jaxprs.HOST:
            raise OffloadError(
                f"jaxmem.layers keeps its stack in host memory, and stack"
                f"{jax.tree_util.keystr(path)} is on the device. Make the stack with the init of "
                "these layers, abstract it with jaxmem.eval_shape, and put a restored one back "
                "with jaxmem.place."
            )


def _stack_of(count: int) -> Callable:
    return lambda leaf: (
        zeros((count, *leaf.shape), leaf.dtype) if leaf.ndim else jnp.zeros(count, leaf.dtype)
    )


def _zeros_like(leaf: Any) -> Any:
    """Room for a gradient, where its parameter is: a scalar of each layer is on the device."""
    on_host = jaxprs.memory_space(leaf) is jaxprs.HOST
    return (zeros if on_host else jnp.zeros)(leaf.shape, leaf.dtype)


def _fetch(stack: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: fetch(leaf, index), stack)


def _store(stack: Any, layer: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf, value: store(leaf, value, index), stack, layer)


def _join(parts: Any) -> Any:
    """Microbatches as one batch."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), parts)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _inexact(tree: Any) -> list[Any]:
    """The leaves that have a derivative."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]


def _trainable(tree: Any) -> Any:
    """The tree with None for what has no derivative."""
    return jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else None, tree)


def _fill(tree: Any, inexact: Any) -> Any:
    """The tree with other leaves in place of those that have a derivative."""
    leaves, structure = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(inexact))
    return jax.tree.unflatten(
        structure, [next(new) if _is_inexact(leaf) else leaf for leaf in leaves]
    )


def _with_float0(tree: Any, cotangents: list[Any]) -> Any:
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
