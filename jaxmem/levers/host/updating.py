"""An optimizer update inside the backward pass, through `jax.grad`.

A backward pass has one way out, the cotangents. A stack that is updated on the way is lent to the
loss and comes back as its own cotangent; integers in it travel as floats of the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.ground.checks import check_callable
from jaxmem.ground.errors import JaxmemError

_SAME_SIZE = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}


class LayerStack(NamedTuple):
    """The parameters of a stack of layers and the optimizer's state of each, in host memory.

    Every leaf has the layers along its first axis. A plain pytree: orbax saves and restores it,
    and `jaxmem.place` puts a restored one back into its memory kinds. The ``init`` of
    `jaxmem.layers` makes one, `jaxmem.value_and_update` gives the next.
    """

    params: Any
    opt_state: Any


@jax.tree_util.register_pytree_node_class
class DifferentiableStack:
    """A `LayerStack` as a loss under `value_and_update` has it: every leaf is a float.

    ``update_count`` is 1, and its cotangent the number of updates that were made.
    """

    def __init__(self, leaves: list[Any], update_count: Any, static: tuple):
        self.leaves, self.update_count, self.static = leaves, update_count, static

    @classmethod
    def wrap(cls, stack: LayerStack, users: list[Any]) -> "DifferentiableStack":
        """The stack for a loss; whoever uses it is written down in ``users``."""
        leaves, tree = jax.tree.flatten(stack)
        dtypes = tuple(leaf.dtype for leaf in leaves)
        return cls(list(map(_to_float, leaves)), jnp.ones(()), (tree, dtypes, _UseRecord(users)))

    @property
    def stack(self) -> LayerStack:
        """What was lent."""
        tree, dtypes, _ = self.static
        return jax.tree.unflatten(tree, list(map(_from_float, self.leaves, dtypes)))

    def mark_used(self) -> None:
        """Says that somebody uses it, which one may do."""
        users = self.static[2].list
        if any(user is self.update_count for user in users):
            raise JaxmemError(
                "A LayerStack is used twice in one loss. Its layers are updated as the backward "
                "pass goes through them, so there is no sum of two gradients; differentiate by "
                "its params instead, which gives gradients, and use update() of the layers."
            )
        users.append(self.update_count)

    def wrap_updated(self, stack: LayerStack) -> "DifferentiableStack":
        """The cotangent that stands for the stack after its update."""
        self.static[2].updated = True
        leaves = [_to_float(leaf) for leaf in jax.tree.leaves(stack)]
        return DifferentiableStack(leaves, jnp.ones_like(self.update_count), self.static)

    def tree_flatten(self):
        """For JAX: the arrays, and what is static."""
        return (self.leaves, self.update_count), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        """For JAX: the inverse of `tree_flatten`."""
        leaves, update_count = children
        return cls(leaves, update_count, static)


class _UseRecord:
    """A list that hashes by identity, to be static in a pytree, and whether a gradient reached the
    stack, which was updated then."""

    def __init__(self, users: list[Any]):
        self.list = users
        self.updated = False


def _to_float(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    if leaf.dtype == bool:
        leaf = leaf.astype(jnp.uint8)
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        raise JaxmemError(
            f"A leaf of a LayerStack is of dtype {leaf.dtype}; they may be floating-point, integer "
            "or boolean. Keep PRNG keys as their data (jax.random.key_data); an optimizer that "
            "keeps one (optax.noisy_sgd) goes round the whole step, and not into jaxmem.layers."
        )
    return jax.lax.bitcast_convert_type(leaf, _SAME_SIZE[leaf.dtype.itemsize])


def _from_float(leaf: Any, dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.lax.bitcast_convert_type(leaf, jnp.uint8).astype(bool)
    return leaf if leaf.dtype == dtype else jax.lax.bitcast_convert_type(leaf, dtype)


def value_and_update(loss_fn: Callable, *, has_aux: bool = False) -> Callable:
    """`jax.value_and_grad` that updates `LayerStack`\\ s on the way.

    Args:
        loss_fn: ``loss_fn(params, stacks, *args) -> loss``, with ``stacks`` any pytree of
            `LayerStack`, each of which goes to its `jaxmem.layers` once.
        has_aux: whether it returns ``(loss, aux)``.

    Returns:
        A function of the same arguments that returns ``(loss, gradients, stacks)``: the gradients
        of ``params``, and the stacks after one optimizer step of each layer; one that no gradient
        reaches (behind `jax.lax.stop_gradient`) stays as it is. With ``has_aux`` the first is
        ``(loss, aux)``. Under `jax.jit`, donate the stacks: they are then updated in
        place.

    Raises:
        JaxmemError: a stack that is not used, or used twice. (Used twice through functions that
            are jitted by themselves, the loss is NaN.)

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> blocks = jaxmem.layers(lambda w, x: w * x, optimizer=optax.sgd(0.1))
    >>> stack = blocks.init(lambda w: w, jnp.ones((3, 2)))
    >>> loss = lambda bias, stack, x: jnp.sum(blocks(stack, x) + bias)
    >>> step = jax.jit(jaxmem.value_and_update(loss))
    >>> value, gradient, stack = step(jnp.zeros(2), stack, jnp.ones(2))
    >>> print(gradient, stack.params[0])
    [1. 1.] [0.9 0.9]
    """

    check_callable(loss_fn, "jaxmem.value_and_update")

    @functools.wraps(loss_fn)
    def wrapped(params, stacks, *args, **kwargs):
        users: list[Any] = []
        given, tree = jax.tree.flatten(stacks, is_leaf=lambda x: isinstance(x, LayerStack))
        others = [type(stack).__name__ for stack in given if not isinstance(stack, LayerStack)]
        if others or not given:
            raise JaxmemError(
                "jaxmem.value_and_update takes a pytree of LayerStacks as second argument (the "
                f"init of jaxmem.layers with an optimizer makes one); got {others or 'none'}."
            )
        lent = [DifferentiableStack.wrap(stack, users) for stack in given]
        gradient = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=has_aux)
        value, (gradients, back) = gradient(params, jax.tree.unflatten(tree, lent), *args, **kwargs)
        if len(users) < len(given):
            raise JaxmemError(
                f"The loss was given {len(given)} LayerStacks and used {len(users)}. Each goes "
                "to its jaxmem.layers once."
            )
        loss, *aux = value if has_aux else (value,)
        back = jax.tree.leaves(back, is_leaf=lambda x: isinstance(x, DifferentiableStack))
        for at, (was, stack) in enumerate(zip(lent, back, strict=True)):
            if was.static[2].updated:
                loss = jnp.where(stack.update_count == 1, loss, jnp.nan)
                given[at] = stack.stack
        stacks = jax.tree.unflatten(tree, given)
        return (loss, *aux) if has_aux else loss, gradients, stacks

    return wrapped
