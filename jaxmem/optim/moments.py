"""Any optax optimizer, its moments in 8 or 16 bits."""

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

    What begins as a copy of the parameters is no moment, and stays as it is (the averages of
    `optax.contrib.schedule_free`): in 8 bits it would not move.

    Each update expands the state of a parameter, runs the optimizer in float32, and compresses
    again; XLA fuses it, so there is no float32 copy of the whole state. Works for every optimizer
    whose state is arrays: adam, adamw, lion, sgd with momentum, and chains of them. The codes have
    the parameter's shape and shard and offload like it.

    optax has other ways to less state: ``mu_dtype=jnp.bfloat16`` (first moments alone, rounded to
    nearest), and optimizers with less of it (`optax.adafactor`, `optax.sm3`, `optax.lion`).

    Args:
        optimizer: any optax transformation.
        dtype: ``"8bit"``: block-wise dynamic quantization (Dettmers et al. 2021), 1.02 bytes a
            value; fields of the state whose name begins with ``nu`` (second moments) take the map
            without a sign. ``"bfloat16"``: stochastic rounding, 2 bytes a value.
        block: values that share a scale in 8 bits, along the last axis.
        keep: ``keep(path, leaf)``, for each floating-point leaf of the optimizer's state: whether
            it stays as it is. By default those under 4096 values, and embeddings (a path with
            "embed" in it), whose gradients vary most.
        seed: of the stochastic rounding.

    Raises:
        JaxmemError: not an optax transformation, no such dtype; at update, a state that is not
            of this optimizer.
        OffloadError: at init, 8-bit moments of a `jaxmem.offload`, which goes outside.

    >>> import jax.numpy as jnp, jaxmem, optax
    >>> optimizer = jaxmem.optim.small_moments(optax.adamw(1e-3))
    >>> state = optimizer.init({"kernel": jnp.ones((256, 512))})
    >>> nu = state.inner[0].nu["kernel"]
    >>> nu.codes.dtype, nu.codes.shape, nu.scales.shape
    (dtype('uint8'), (256, 512), (256, 2))
    """
    check_optimizer(optimizer, "jaxmem.optim.small_moments")
    if dtype not in CODECS:
        known = " or ".join(f'"{name}"' for name in CODECS)
        raise JaxmemError(f"jaxmem.optim.small_moments takes dtype= {known}; got {dtype!r}.")
    codec = CODECS[dtype]
    if not is_count(block):
        raise JaxmemError(f"A block is an int of 1 or more values; got block={block!r}.")
    optimizer = optax.with_extra_args_support(optimizer)

    def compressed(path, leaf, own) -> bool:
        return (
            jnp.issubdtype(leaf.dtype, jnp.floating)
            and leaf.size > 0
            and path not in own.copies
            and not keep(jax.tree_util.keystr(path), leaf)
        )

    def compress(path, leaf, key, own):
        if not compressed(path, leaf, own):
            return leaf
        return codec.compress(leaf, key, not own.is_second(path), block)

    def is_compressed(leaf) -> bool:
        return codec.kind is not None and isinstance(leaf, codec.kind)

    def init(params):
        own = _Fields(optimizer, params)

        def zero(path, leaf):
            if not compressed(path, leaf, own):
                return leaf
            if codec.kind is not None:  # an array alone may lie in host memory
                where = jax.tree_util.keystr(path)
                jaxprs.check_on_device("jaxmem.optim.small_moments", leaf, where)
            return codec.zeros(leaf, not own.is_second(path), block)

        state = jax.tree_util.tree_map_with_path(zero, optimizer.init(params))
        return SmallState(jnp.zeros((), jnp.int32), state)

    def update(updates, state, params=None, **extra):
        check_state(init, update, updates, state, params, extra)
        own = _Fields(optimizer, updates if params is None else params)

        def expand(path, shape, leaf):
            if not compressed(path, shape, own):
                return leaf
            return codec.expand(leaf, not own.is_second(path), block).astype(shape.dtype)

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


class _Fields:
    """What the leaves of an optimizer's state are, by their paths; ``copies`` are made of the
    parameters' values, and not of their shapes alone."""

    def __init__(self, optimizer: optax.GradientTransformation, params: Any):
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        self.params = {path for path, _ in paths}
        flat = jaxprs.flatten(
            lambda *leaves: optimizer.init(jax.tree.unflatten(tree, leaves)),
            [leaf for _, leaf in paths],
        )
        of_values = set(range(len(flat.consts), flat.input_count))
        for step in flat.steps:
            if not of_values.isdisjoint(step.uses):
                of_values.update(step.outputs)
        self.shapes = jax.tree.unflatten(flat.out_tree, map(flat.aval, flat.outputs))
        leaves = jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(flat.out_tree, flat.outputs)
        )
        self.copies = {path for path, made in leaves if isinstance(made, int) and made in of_values}

    def is_second(self, path: tuple) -> bool:
        """Whether a leaf is a second moment, by the names that the optimizer gives: a parameter has
        fields of its own, of any name."""
        starts = (start for start in range(len(path) + 1) if path[start:] in self.params)
        own = path[: next(starts, len(path))]
        return any(str(getattr(part, "name", "")).startswith("nu") for part in own)
