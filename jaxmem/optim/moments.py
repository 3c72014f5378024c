"""Any optax optimizer, its moments in 8 or 16 bits."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem import jaxprs
from jaxmem.ground.checks import check_optimizer, check_state, is_count
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.host.streaming import stream
from jaxmem.optim.codecs import CODECS
from jaxmem.optim.state_analysis import StateAnalysis, analyze_state

_SMALL = 4096  # chosen, as in bitsandbytes (min_8bit_size): norms and biases are below


class SmallState(NamedTuple):
    """The state of `small_moments`: ``inner`` is the optimizer's, its large leaves compressed."""

    step: jax.Array
    inner: Any


def _is_small_or_embedding(path: str, leaf: Any) -> bool:
    """What stays in float32: under 4096 values, or a path with "embed" in it."""
    return leaf.size < _SMALL or "embed" in path.lower()


def small_moments(
    optimizer: optax.GradientTransformation,
    dtype: str = "8bit",
    *,
    block: int = 256,
    keep: Callable[[str, Any], bool] = _is_small_or_embedding,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` whose moments take 8 or 16 bits a parameter instead of 32.

    Works for every optax optimizer: what its state holds is read from its own init and update.
    A moment is what each update changes element by element. What is none stays as it is:

    - what begins as the parameters' values, or is made of no gradients (the averages of
      `optax.contrib.schedule_free`): in 8 bits it would not move;
    - in 8 bits, what is only added to (the sums of `optax.adagrad`): they would lose what is small
      beside them, which ``"bfloat16"`` rounds up by chance;
    - what an update replaces or shifts (the last gradient, the pairs of `optax.lbfgs`): their
      differences would be those of the rounding;
    - two moments of which an update takes the root of the difference (those of
      `optax.rmsprop(centered=True)`): it would be of a negative number.

    Each update expands the state of a parameter, runs the optimizer in float32, and compresses
    again; XLA fuses it, so there is no float32 copy of the whole state. The codes have the
    parameter's shape and shard and offload like it.

    optax has other ways to less state: ``mu_dtype=jnp.bfloat16`` (first moments alone, rounded to
    nearest), and optimizers with less of it (`optax.adafactor`, `optax.sm3`, `optax.lion`).

    Args:
        optimizer: any optax transformation.
        dtype: ``"8bit"``: block-wise dynamic quantization (Dettmers et al. 2021), 1.02 bytes a
            value; second moments (what is never negative, or is taken the root of) take the map
            without a sign. ``"bfloat16"``: stochastic rounding, 2 bytes a value.
        block: values that share a scale in 8 bits, along the last axis.
        keep: ``keep(path, leaf)``, for each floating-point leaf of the optimizer's state: whether
            it stays as it is. By default those under 4096 values, and embeddings (a path with
            "embed" in it), whose gradients vary most.
        seed: of the stochastic rounding.

    Raises:
        JaxmemError: not an optax transformation, no such dtype; at init, an update that asks for
            other arguments than ``value``, ``grad`` and ``value_fn``; at update, a state that is
            not of this optimizer.
        OffloadError: at init, 8-bit moments of a `jaxmem.offload`, which goes outside.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.optim.small_moments(optax.adamw(1e-3))
    >>> state = optimizer.init({"kernel": jnp.ones((256, 512))})
    >>> nu = state.inner[0].nu["kernel"]
    >>> nu.codes.dtype, nu.codes.shape, nu.scales.shape
    (dtype('uint8'), (256, 512), (256, 2))
    """
    optimizer = check_optimizer(optimizer, "jaxmem.optim.small_moments")
    if dtype not in CODECS:
        known = " or ".join(f'"{name}"' for name in CODECS)
        raise JaxmemError(f"jaxmem.optim.small_moments takes dtype= {known}; got {dtype!r}.")
    codec = CODECS[dtype]
    if not is_count(block):
        raise JaxmemError(f"A block is an int of 1 or more values; got block={block!r}.")

    read: dict[Any, StateAnalysis] = {}  # by what the parameters are

    def recurrences_of(params) -> StateAnalysis:
        leaves, tree = jax.tree.flatten(params)
        kind = tree, tuple(map(jax.typeof, leaves))
        if kind not in read:
            found = analyze_state(optimizer, params, is_large)
            left_out = frozenset() if codec.adds_up else found.sums
            read[kind] = dataclasses.replace(found, moments=found.moments - left_out)
        return read[kind]

    def is_large(path, leaf) -> bool:
        if not jaxprs.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return False
        return leaf.size > 0 and not keep(jax.tree_util.keystr(path), leaf)

    def compress(path, leaf, key, own):
        if path not in own.moments:
            return leaf
        return codec.compress(leaf, key, path not in own.second, block)

    def is_compressed(leaf) -> bool:
        return codec.kind is not None and isinstance(leaf, codec.kind)

    def init(params):
        state = optimizer.init(params)
        if codec.kind is not None:  # an array alone may lie in host memory
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                if is_large(path, leaf):
                    where = jax.tree_util.keystr(path)
                    jaxprs.check_on_device("jaxmem.optim.small_moments", leaf, where)
        own = recurrences_of(params)

        def begin(path, leaf):
            if path not in own.moments:
                return leaf
            return codec.zeros(leaf, path not in own.second, block)

        state = jax.tree_util.tree_map_with_path(begin, state)
        return SmallState(jnp.zeros((), jnp.int32), state)

    def update(updates, state, params=None, **extra):
        check_state(init, update, updates, state, params, extra)
        own = recurrences_of(updates if params is None else params)

        def expand(path, shape, leaf):
            if path not in own.moments:
                return leaf
            return codec.expand(leaf, path not in own.second, block).astype(shape.dtype)

        def step(updates, state, params, **extra):
            large = jax.tree_util.tree_map_with_path(
                expand, own.shapes, state.inner, is_leaf=is_compressed
            )
            updates, large = optimizer.update(updates, large, params, **extra)
            leaves, tree = jax.tree_util.tree_flatten_with_path(large)
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            small = [
                compress(path, leaf, jax.random.fold_in(key, at), own)
                for at, (path, leaf) in enumerate(leaves)
            ]
            return updates, SmallState(state.step + 1, jax.tree.unflatten(tree, small))

        return stream(step, updates, state, params, extra, state_on_host=False)

    return optax.GradientTransformationExtraArgs(init, update)
