"""An optimizer update on arrays in host memory, fetched and returned piece by piece.

XLA's scheduler alone would start every transfer at once, since nothing tells it not to.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _jax


def offloadable(leaf: Any) -> bool:
    """Whether a leaf goes to host memory: scalars and empty arrays stay on the device."""
    return getattr(leaf, "ndim", 0) > 0 and leaf.size > 0


def to_host(leaf: Any) -> Any:
    """The leaf in host memory, if it is one to go there."""
    return jax.device_put(leaf, _jax.HOST) if offloadable(leaf) else leaf


def to_device(leaf: Any) -> Any:
    """The leaf in device memory."""
    return jax.device_put(leaf, _jax.DEVICE) if _on_host(leaf) else leaf


def fetch(stack: Any, index: Any, after: Sequence[Any] = ()) -> Any:
    """One layer of a stack, on the device; not before ``after`` is there."""
    if _jax.memory_space(stack) is _jax.HOST and after:
        stack, *_ = jax.lax.optimization_barrier((stack, *after))
    taken = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return to_device(taken)


def store(stack: Any, value: Any, index: Any) -> Any:
    """The stack with one layer replaced, in place where the compiler owns the stack."""
    value = jnp.asarray(value, stack.dtype)[None]
    if _on_host(stack):
        value = jax.device_put(value, _jax.HOST)
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, 0)


def stream(
    update: Callable,
    gradients: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
    *,
    index: Any = None,
    on_host: bool = True,
) -> tuple[Any, Any]:
    """``update(gradients, state, params, **extra)`` with what is on the host kept there.

    The results are computed one after another, each with the operations that it alone still
    needs. A host leaf is fetched at its first use, behind a barrier that waits for the result
    before and for the gradient at hand.

    With ``on_host=False`` the state is on the device and stays there, and only the order matters:
    XLA fuses the end of several parameters' updates otherwise, with all that they need alive.

    With an ``index``, state and parameters are stacks of layers (the gradients are that layer's),
    and the results are the stacks with that layer replaced, the first of them in the place of the
    parameters.
    """
    leaves, call = _jax.split_arrays(update, (gradients, state, params), extra)
    stacked = set()
    if index is not None:
        stacked = {id(leaf) for leaf in jax.tree.leaves((state, params))}
    ordered = set()
    if not on_host:
        ordered = {id(leaf) for leaf in jax.tree.leaves(state) if offloadable(leaf)}
    flat = _jax.flatten(call, [_stand_in(leaf, id(leaf) in stacked) for leaf in leaves])
    operands = [*flat.consts, *leaves]
    maker = {value: step for step in flat.steps for value in step.outputs}
    values: dict[int, Any] = {}
    awaited: list[Any] = []

    def bring(number: int) -> None:
        operand = operands[number]
        if id(operand) in stacked:
            operand = fetch(operand, index, awaited)
        elif _on_host(operand) or id(operand) in ordered:
            operand, *_ = jax.lax.optimization_barrier((operand, *awaited))
            operand = to_device(operand)
        values[number] = operand

    def compute(wanted: int) -> None:
        pending = [wanted]
        while pending:
            number = pending[-1]
            if number in values:
                pending.pop()
            elif number < flat.input_count:
                bring(number)
            else:
                step = maker[number]
                missing = [value for value in step.uses if value not in values]
                if missing:
                    pending.extend(missing)
                else:
                    flat.run([step], values)

    out_first, out_state = jax.tree.unflatten(flat.out_tree, range(len(flat.outputs)))
    homes: dict[int, Any] = {}
    if index is not None:
        at_home = jax.tree.leaves((out_first, out_state)), jax.tree.leaves((params, state))
        homes = dict(zip(*at_home, strict=True))
    going = {
        at: made
        for at in jax.tree.leaves((out_first, out_state) if homes else out_state)
        if isinstance(made := flat.outputs[at], int) and offloadable(flat.avals[made])
    }
    origin = dict(zip(jax.tree.leaves(out_state), jax.tree.leaves(state), strict=True))
    results: dict[int, Any] = {}
    done: list[Any] = []

    def settle(at: int) -> None:
        value = _jax.read(values, flat.outputs[at])
        if at in going:
            done[:] = [value]
        if at in homes:
            value = store(homes[at], value, index)
        elif at in going and _on_host(origin[at]):
            value = jax.device_put(value, _jax.HOST)
        results[at] = value

    # Which gradients and host leaves each value is made of, as bits.
    moved = {id(leaf) for leaf in jax.tree.leaves(gradients)} | stacked | ordered
    made_of = {
        number: 1 << number if id(operand) in moved or _on_host(operand) else 0
        for number, operand in enumerate(operands)
    }
    for step in flat.steps:
        parts = functools.reduce(operator.or_, (made_of[value] for value in step.uses), 0)
        made_of.update(dict.fromkeys(step.outputs, parts))

    gradient = dict(zip(jax.tree.leaves(out_first), jax.tree.leaves(gradients), strict=False))
    for at in [*reversed(jax.tree.leaves(out_first)), *jax.tree.leaves(out_state)]:
        if at in results:
            continue
        awaited[:] = [*done, gradient[at]] if at in gradient else done
        if isinstance(wanted := flat.outputs[at], int):
            compute(wanted)
        settle(at)
        here = functools.reduce(operator.or_, (made_of[value] for value in values), 0)
        for other in sorted(going.keys() - results.keys()):
            if not made_of[going[other]] & ~here:  # all that it takes has come: back it goes
                compute(going[other])
                settle(other)
    return jax.tree.unflatten(flat.out_tree, [results[at] for at in range(len(results))])


def _on_host(leaf: Any) -> bool:
    return _jax.memory_space(leaf) is _jax.HOST


def _stand_in(leaf: Any, stacked: bool) -> Any:
    """What the update is traced with: the leaf in device memory, one layer of a stack."""
    if not stacked and not _on_host(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape[1:] if stacked else leaf.shape, leaf.dtype)


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Zeros in host memory, where they are to go there."""
    return to_host(jnp.zeros(shape, dtype))
