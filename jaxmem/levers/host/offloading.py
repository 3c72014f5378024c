"""Optimizer state in host memory.

ZeRO-Offload and PatrickStar keep optimizer state in CPU memory and move it through the device. Here
the transfers are part of the one XLA program of the step, and they are staged: XLA's scheduler
alone would fetch the whole state at once, since nothing tells it not to.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxmem import jaxprs
from jaxmem.ground.checks import (
    check_alike,
    check_call,
    check_optimizer,
    check_state,
    name_of,
    note_call,
    shown,
)
from jaxmem.ground.errors import JaxmemError, OffloadError
from jaxmem.levers.host.streaming import nested, stream
from jaxmem.levers.host.transfers import offloadable, on_host, to_host


def _everything(path: str, leaf: Any) -> bool:
    return True


def offload(
    optimizer: optax.GradientTransformation,
    *,
    what: Callable[[str, Any], bool] = _everything,
    fraction: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` whose array state lives in host memory.

    Inside a jitted step the state comes to the device, is used and goes back, one parameter after
    another: the update is traced, and what each parameter's update needs is fetched only when the
    parameter before it is done and used only when the state before it is back. State of one
    parameter of more than 64 MiB (a large matrix, or layers stacked for a scan) comes in pieces of
    64 MiB, as in PatrickStar, where the optimizer treats the values of an array independently, as
    most do; where it does not (lamb, adafactor), that parameter's state comes as a whole. So the
    device holds two such chunks, one that comes and one that goes.

    Scalars and empty arrays stay on the device. Donate parameters and state together
    (``donate_argnums``) and return them in the order in which they are taken: host memory is then
    reused in place, while JAX, which pairs donated arguments with results by shape and order
    alone, would otherwise put one in the other's place. `jaxmem.train_step` does so.

    `jaxmem.accumulate(jaxmem.offload(optimizer), every)` touches the host once per cycle; the
    other order moves the accumulator too, at every micro-step.

    Args:
        optimizer: any optax transformation.
        what: ``what(path, leaf)``, for each array of the state: whether it goes to the host (the
            second moments alone, say: ``lambda path, leaf: ".nu" in path``).
        fraction: of the bytes of those, 0 to 1, that go to the host, in whole arrays, the first of
            the state first; the rest stay on the device, where there is room.

    Raises:
        JaxmemError: not an optax transformation, or a fraction that is none; at update, a state
            of another optimizer or of other parameters.
        OffloadError: the platform has no pinned host memory; at update, a state leaf is in device
            memory (restored without its memory kind; `jaxmem.eval_shape` gives the right one).

    Warns:
        JaxmemWarning: a loop or a branch around the update (`optax.apply_if_finite`,
            `optax.MultiSteps`, `jaxmem.accumulate`) takes more than 64 MiB of state at once.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.offload(optax.adam(1e-3))
    >>> state = optimizer.init(jnp.ones((64, 64)))
    >>> state[0].mu.sharding.memory_kind
    'pinned_host'
    """
    optimizer = check_optimizer(optimizer, "jaxmem.offload")
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise JaxmemError(
            "jaxmem.offload takes fraction= from 0 (all on the device) to 1 (all on the host); got "
            f"{shown(fraction)}."
        )

    def paths_on_host(state) -> set[str]:
        found = {
            jax.tree_util.keystr(path): leaf.size * leaf.dtype.itemsize
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            if offloadable(leaf) and what(jax.tree_util.keystr(path), leaf)
        }
        allowed, before, chosen = fraction * sum(found.values()), 0, set()
        for path, size in found.items():
            if before + size / 2 <= allowed:
                chosen.add(path)
            before += size
        return chosen

    def init(params):
        state = optimizer.init(params)
        chosen = paths_on_host(state)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: to_host(leaf) if jax.tree_util.keystr(path) in chosen else leaf,
            state,
        )

    def update(updates, state, params=None, **extra_args):
        check_state(optimizer.init, optimizer.update, updates, state, params, extra_args)
        chosen = paths_on_host(state)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            name = jax.tree_util.keystr(path)
            if name in chosen and not on_host(leaf) and not nested():
                raise OffloadError(
                    f"The optimizer state{name} should be in host memory "
                    "and is on the device. Make the state with this optimizer's init, abstract it "
                    "with jaxmem.eval_shape, and put a restored one back with jaxmem.place."
                )
        return stream(optimizer.update, updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def place(tree: Any, like: Any) -> Any:
    """The arrays of a tree, on the devices and in the memory kinds of another's.

    For a state restored from a checkpoint: what `jaxmem.offload` kept on the host comes back to
    the device, or comes back to the host as an array that JAX takes for one on the device.

    Args:
        tree: arrays.
        like: arrays of the same structure, in their places; a state from ``init``, say.

    Raises:
        JaxmemError: the structures, the shapes or the dtypes differ.

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

    check_alike(("the tree", "in the one it is placed like"), like, "in the given one", tree)

    def put(leaf, reference):
        if not isinstance(reference, jax.Array):
            return leaf
        leaf = jax.device_put(leaf, reference.sharding)
        # Once more by its kind: an array put together from others has the sharding of the host
        # and the type of the device.
        return jax.device_put(leaf, jaxprs.HOST) if on_host(reference) else leaf

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

    Raises:
        JaxmemError: ``fun`` is no function, or does not take these arguments.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> state = jaxmem.eval_shape(jaxmem.offload(optax.adam(1e-3)).init, jnp.ones((64, 64)))
    >>> state[0].mu.sharding.memory_kind
    'pinned_host'
    """
    args, kwargs = jax.tree.map(jaxprs.abstract, (args, kwargs))
    check_call(fun, args, kwargs, "jaxmem.eval_shape")
    with note_call(name_of(fun), fun, args, kwargs):
        avals, tree = jaxprs.output_avals(fun, args, kwargs)
    return jax.tree.unflatten(tree, [jaxprs.abstract(aval) for aval in avals])
