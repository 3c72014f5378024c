"""Optimizer state in host memory.

ZeRO-Offload and PatrickStar keep optimizer state in CPU memory and move it through the GPU. Here
the transfers are part of the one XLA program of the step, and they are staged: XLA's scheduler
alone would fetch the whole state at once, since nothing tells it not to.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxmem import _jax
from jaxmem._checks import check_optimizer
from jaxmem._errors import JaxmemError, OffloadError


def offload(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """``optimizer`` whose array state lives in ``pinned_host`` memory.

    Inside a jitted step the state comes to the device, is used and goes back, one parameter after
    another: the update is traced, and what each parameter's update needs is fetched only when the
    parameter before it is done. So the device holds the state of about two parameters at a time,
    for every optax transformation that treats them one by one. Where the parameters follow the
    layers, they are taken last first, as the backward pass makes their gradients.

    Scalars and empty arrays stay on the device. Donate parameters and state together
    (``donate_argnums``) and return them in the order in which they are taken: host memory is then
    reused in place, while JAX, which pairs donated arguments with results by shape and order
    alone, would otherwise put one in the other's place. `jaxmem.train_step` does so.

    `jaxmem.accumulate(jaxmem.offload(optimizer), every)` touches the host once per cycle; the
    other order moves the accumulator too, at every micro-step.

    Args:
        optimizer: any optax transformation.

    Raises:
        JaxmemError: not an optax transformation.
        OffloadError: at update, a state leaf is in device memory (made by another optimizer, or
            restored without its memory kind; `jaxmem.eval_shape` gives the right one).

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.offload(optax.adam(1e-3))
    >>> state = optimizer.init(jnp.ones((64, 64)))
    >>> state[0].mu.sharding.memory_kind
    'pinned_host'
    """
    check_optimizer(optimizer, "jaxmem.offload")
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return jax.tree.map(_to_host, optimizer.init(params))

    def update(updates, state, params=None, **extra_args):
        for path, leaf in jax.tree.leaves_with_path(state):
            if _offloadable(leaf) and _jax.memory_space(leaf) is not _jax.HOST:
                raise OffloadError(
                    f"The optimizer state{jax.tree_util.keystr(path)} should be in host memory "
                    "and is on the device. Make the state with this optimizer's init, abstract it "
                    "with jaxmem.eval_shape, and put a restored one back with jaxmem.place."
                )
        return _stream(optimizer.update, updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _stream(update: Callable, updates, state, params, extra_args) -> tuple[Any, Any]:
    """``update`` on a state in host memory, fetched and returned piece by piece.

    The results are computed one after another, each with the operations that it alone still
    needs. A host leaf is fetched at its first use, behind a barrier that waits for the result
    before and for the gradient at hand; without that chain XLA starts every transfer at once.
    """
    leaves, call = _jax.split_arrays(update, (updates, state, params), extra_args)
    flat = _jax.flatten(call, [_on_device(leaf) for leaf in leaves])
    operands = [*flat.consts, *leaves]
    maker = {value: step for step in flat.steps for value in step.outputs}
    values: dict[int, Any] = {}
    awaited: list[Any] = []

    def fetch(number: int) -> None:
        operand = operands[number]
        if _jax.memory_space(operand) is _jax.HOST:
            operand, *_ = jax.lax.optimization_barrier((operand, *awaited))
            operand = jax.device_put(operand, _jax.DEVICE)
        values[number] = operand

    def compute(wanted: int) -> None:
        pending = [wanted]
        while pending:
            number = pending[-1]
            if number in values:
                pending.pop()
            elif number < flat.input_count:
                fetch(number)
            else:
                step = maker[number]
                missing = [value for value in step.uses if value not in values]
                if missing:
                    pending.extend(missing)
                else:
                    flat.run([step], values)

    out_updates, out_state = jax.tree.unflatten(flat.out_tree, range(len(flat.outputs)))
    on_host = {
        index: made
        for index in jax.tree.leaves(out_state)
        if isinstance(made := flat.outputs[index], int) and _offloadable(flat.avals[made])
    }
    results: dict[int, Any] = {}
    done: list[Any] = []

    def settle(index: int) -> None:
        value = _jax.read(values, flat.outputs[index])
        if index in on_host:
            done[:] = [value]
            value = jax.device_put(value, _jax.HOST)
        results[index] = value

    gradients = dict(zip(jax.tree.leaves(out_updates), jax.tree.leaves(updates), strict=False))
    for index in [*reversed(jax.tree.leaves(out_updates)), *jax.tree.leaves(out_state)]:
        if index in results:
            continue
        awaited[:] = [*done, gradients[index]] if index in gradients else done
        if isinstance(wanted := flat.outputs[index], int):
            compute(wanted)
        settle(index)
        for other in sorted(on_host.keys() - results.keys()):  # what came along goes back at once
            if on_host[other] in values:
                settle(other)
    return jax.tree.unflatten(flat.out_tree, [results[i] for i in range(len(results))])


def _on_device(leaf: Any) -> Any:
    """A stand-in of the leaf in device memory, to trace the update with."""
    if _jax.memory_space(leaf) is _jax.HOST:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _offloadable(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) > 0 and leaf.size > 0


def _to_host(leaf: Any) -> Any:
    return jax.device_put(leaf, _jax.HOST) if _offloadable(leaf) else leaf


def place(tree: Any, like: Any) -> Any:
    """The arrays of a tree, on the devices and in the memory kinds of another's.

    For a state restored from a checkpoint: what `jaxmem.offload` kept on the host comes back to
    the device, or comes back to the host as an array that JAX takes for one on the device.

    Args:
        tree: arrays.
        like: arrays of the same structure, in their places; a state from ``init``, say.

    Raises:
        JaxmemError: the structures differ.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> state = jaxmem.offload(optax.adam(1e-3)).init(jnp.ones(3))
    >>> restored = jax.device_put(state, jax.memory.Space.Device)
    >>> jaxmem.place(restored, like=state)[0].mu.sharding.memory_kind
    'pinned_host'
    """
    given, expected = jax.tree.structure(tree), jax.tree.structure(like)
    if given != expected:
        raise JaxmemError(
            f"jaxmem.place needs two trees of one structure; got {given} to be placed like "
            f"{expected}. Restore the checkpoint into the structure of a state from init."
        )

    def put(leaf, reference):
        if not isinstance(reference, jax.Array):
            return leaf
        leaf = jax.device_put(leaf, reference.sharding)
        # Once more by its kind: an array put together from others has the sharding of the host
        # and the type of the device.
        on_host = _jax.memory_space(reference) is _jax.HOST
        return jax.device_put(leaf, _jax.HOST) if on_host else leaf

    return jax.tree.map(put, tree, like)


def eval_shape(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """`jax.eval_shape` whose results keep their memory kind.

    What ``fun`` puts into host memory (`jaxmem.offload`'s state, say) comes out with a sharding
    that says so, ready for `jaxmem.memory` or for a checkpoint to be restored into. jax before
    0.12 drops it.

    Args:
        fun: a function of arrays.
        *args, **kwargs: its arguments, real or abstract; nothing is allocated.

    Returns:
        What ``fun`` returns, with `jax.ShapeDtypeStruct` in place of arrays.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> state = jaxmem.eval_shape(jaxmem.offload(optax.adam(1e-3)).init, jnp.ones((64, 64)))
    >>> state[0].mu.sharding.memory_kind
    'pinned_host'
    """
    args, kwargs = jax.tree.map(_jax.abstract, (args, kwargs))
    avals, tree = _jax.output_avals(fun, args, kwargs)
    return jax.tree.unflatten(tree, [_jax.abstract(aval) for aval in avals])
