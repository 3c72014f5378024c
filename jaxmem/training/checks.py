"""States and parameters checked before a step runs, and what is said of them after."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import is_deleted, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.warn import warn
from jaxmem.optim.parameters import HalfState
from jaxmem.program import size_of
from jaxmem.training.state import TrainState

NO_MASTER_COPY = (
    "{} keeps {} in float16 with no copy of higher precision: updates below a thousandth of a "
    "parameter are lost, and so is every one below 6e-8. Keep them in float32 and compute in "
    "float16 (precision='fp16')."
)


_TAKEN = (
    "{} was given to a step before, which took over its memory. Go on with the state that it "
    "returned (state, metrics = step(state, batch)), or make the step with "
    "train_step(..., donate=False), which needs memory for both."
)


def check_master_copy(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype == np.float16:
            raise JaxmemError(
                NO_MASTER_COPY.format("The state", "params" + jax.tree_util.keystr(path))
            )


def check_differentiable(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise JaxmemError(
                f"params{jax.tree_util.keystr(path)} is {dtype}, which has no gradient. Parameters "
                "are floating-point arrays; put the others into model_state or into the batch."
            )


def check_no_lookahead(params: Any) -> None:
    """Raises `JaxmemError` for the pairs of `optax.lookahead`, whose updates are as one of each."""
    if isinstance(params, optax.LookaheadParams):
        raise JaxmemError(
            "init got the pairs of optax.lookahead: it takes gradients of their fast parameters "
            "alone, and a step has those of all that it trains. Train without it, or take an "
            "average of parameters: optax.contrib.schedule_free, or optax.ema beside the step."
        )


def check_key(key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    if key is None:
        return
    if dtype is None or not (dtype == np.uint32 or jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        raise JaxmemError(f"key= takes a PRNG key, such as jax.random.key(0); got {shown(key)}.")
    if is_deleted(key):
        raise JaxmemError(
            "key= was deleted: something that it was given to took over its memory. Make another "
            "with jax.random.key, or give away a copy of it."
        )


def warn_of_bfloat16(params: Any, opt_state: Any) -> None:
    """Warns of parameters in bfloat16 that no precision asks for and no optimizer looks after."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rounded = [path for path, leaf in leaves if leaf.dtype == jnp.bfloat16]
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, HalfState))
    if not rounded or any(isinstance(node, HalfState) for node in nodes):
        return
    warn(
        f"{len(rounded)} of {len(leaves)} parameters are in bfloat16 (params"
        f"{jax.tree_util.keystr(rounded[0])}), and so are their gradients and, with most "
        "optimizers, their moments: updates below a 512th of a parameter are lost. To keep them in "
        "float32 and compute in bfloat16, pass precision='bf16'; to train them in bfloat16 without "
        "that loss, take jaxmem.optim.half_params(optimizer); if it is what you want, pass "
        "precision='params=bfloat16,compute=bfloat16'.",
    )


def check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise JaxmemError(
            "A TrainStep is called with (state, batch), the state made by its init; got a state "
            f"of type {type(state).__module__}.{type(state).__name__}."
        )


def check_alive(state: TrainState) -> None:
    """Raises `JaxmemError` for a state that cannot be run: abstract, or used before."""
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise JaxmemError(
            "This state is abstract: it has shapes and no arrays, for step.memory(state, batch). "
            "Make one with init from real parameters to run the step."
        )
    # Every step donates all of a state, so that one array tells of the others.
    if is_deleted(state.step):
        raise JaxmemError(_TAKEN.format("This state"))


def check_kept(state: TrainState) -> None:
    """Raises `JaxmemError` at the first array of a state that is gone."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if is_deleted(leaf):
            raise JaxmemError(_TAKEN.format(f"state{jax.tree_util.keystr(path)}"))


def check_unshared(state: TrainState, batch: Any) -> None:
    """Raises `JaxmemError` for an array of the state that is there a second time."""
    seen: dict[Any, str] = {}
    for name, tree in (("state", state), ("batch", batch)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            at, place = name + jax.tree_util.keystr(path), jaxprs.memory_of(leaf)
            if place is not None and place in seen:
                raise JaxmemError(
                    f"{at} and {seen[place]} are one array, whose memory the step takes over with "
                    f"the state. Pass a copy (jnp.copy({at})), or make the step with "
                    "train_step(..., donate=False)."
                )
            if place is not None and name == "state":
                seen[place] = at


def report_kept(leaves: list[tuple[Any, Any]], state: TrainState) -> None:
    """Warns of arrays of a donated state whose memory was not reused.

    Not of single numbers, such as an optimizer's counters, nor of less than a thousandth of the
    state: nobody need act on these, since they decide about no budget.
    """
    kept = [(path, leaf) for path, leaf in leaves if size_of(leaf) and jnp.size(leaf) > 1]
    total = sum(size_of(leaf) for _, leaf in kept)
    if kept and 1000 * total >= sum(map(size_of, jax.tree.leaves(state))):
        named = ", ".join(f"state{jax.tree_util.keystr(path)}" for path, _ in kept[:3])
        one = len(kept) == 1
        arrays, are = ("array", "it is") if one else ("arrays", "they are")
        warn(
            f"XLA did not reuse the memory of {len(kept)} donated {arrays} of the state, "
            f"{format_bytes(total)} in all ({named}{' ...' if len(kept) > 3 else ''}): {are} in "
            "memory twice during the step. Results must have the shape, dtype and memory kind of "
            "what they replace.",
        )
