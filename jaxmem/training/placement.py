"""Where the arrays of a state lie: devices, meshes, and who owns their memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem import jaxprs
from jaxmem.targets import HOST_KIND
from jaxmem.training.state import TrainState


def first_axes(leaf: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The mesh of an array and the axes over which its first axis is sharded, in their order; None:
    it is not."""
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, jax.core.Tracer) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return None
    axes = sharding.spec[0]
    axes = axes if isinstance(axes, tuple) else (axes,)
    wide = tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1)
    return (sharding.mesh, wide) if wide else None


def named_axes(leaf: Any) -> set[str]:
    """The mesh axes over which any axis of an array is sharded."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    return {
        axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))
    }


def own_arrays(tree: Any) -> Any:
    """JAX arrays in place of numpy's and of numbers, each with a buffer of its own."""
    tree = without_sharing(tree)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), tree)


def without_sharing(tree: Any) -> Any:
    """A copy in place of an array that stands twice (as in the state of `optax.lbfgs`): no buffer
    can be donated twice."""
    seen: set[int] = set()

    def own(leaf):
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)


def made_anew(init: Callable[[Any], Any], params: Any) -> Any:
    """``init(params)``, with copies of arrays that were there before, as `optax.add_noise` returns
    its own key: a step takes over what it is given, and those are still needed."""
    before = jax.live_arrays()
    ids = {id(array) for array in before} - {id(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf):
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        return jnp.copy(leaf) if id(array) in ids else leaf

    return jax.tree.map(own, init(params))


def commit(state: TrainState) -> TrainState:
    """The state with every array bound to its place, if one is: in the place where it is, or on
    the devices that parameters are on.

    Results of a step over bound arrays are bound too, and a first step with other bindings than the
    second would be compiled twice.
    """
    bound = [leaf.sharding for leaf in jax.tree.leaves(state) if jaxprs.is_committed(leaf)]
    if not bound:
        return state
    widest = max(bound, key=lambda sharding: len(sharding.device_set))
    everywhere = jaxprs.replicated_like(widest)

    def put(leaf):
        if not jaxprs.is_committed(leaf) and leaf.sharding.device_set != widest.device_set:
            return jax.device_put(leaf, everywhere)
        return jax.device_put(leaf, jaxprs.canonical_sharding(leaf.sharding))

    return jax.tree.map(put, state)


def placed_like(params: Any, state: TrainState) -> TrainState:
    """An abstract state on the mesh of its parameters, as JAX and `commit` place a real one: what
    has the path and the shape of a parameter lies as it does, all else on every device."""
    placed = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            placed[jax.tree_util.keystr(path)] = leaf.shape, sharding
    if not placed:
        return state
    longest_first = sorted(placed, key=len, reverse=True)

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        like = (placed[end] for end in longest_first if name.endswith(end))
        found = next((sharding for shape, sharding in like if shape == leaf.shape), None)
        sharding = found or jaxprs.replicated_like(placed[longest_first[0]][1])
        if jaxprs.memory_space(leaf) is jaxprs.HOST:
            sharding = sharding.with_memory_kind(HOST_KIND)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jaxprs.canonical_sharding(sharding)
        )

    return jax.tree_util.tree_map_with_path(place, state)


def places_on_mesh(state: TrainState) -> tuple[NamedSharding | None, ...]:
    """Where the arrays of a state lie on a mesh of several devices; empty where parameters do
    not."""

    def place(leaf: Any) -> NamedSharding | None:
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        named = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
        return jaxprs.canonical_sharding(sharding) if named else None

    # A look at two arrays, and not at thousands in every call, where there is no mesh.
    if not any(map(place, [state.step, *jax.tree.leaves(state.params)[:1]])):
        return ()
    return tuple(map(place, jax.tree.leaves(state)))


def kept_in_place(state: TrainState, places: tuple[NamedSharding | None, ...]) -> TrainState:
    """The state after a step, its arrays where they were before it: XLA, left to itself, puts some
    elsewhere, and the next step is compiled anew."""
    if not places:
        return state
    leaves, tree = jax.tree.flatten(state)
    kept = [
        leaf if place is None else jax.lax.with_sharding_constraint(leaf, place)
        for leaf, place in zip(leaves, places, strict=True)
    ]
    return jax.tree.unflatten(tree, kept)
