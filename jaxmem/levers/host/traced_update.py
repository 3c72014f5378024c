"""An optimizer's update as a traced program, and which arrays each of its results is made of."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.levers.host.transfers import offloadable, on_host


class TracedUpdate:
    """``update(gradients, state, params, **extra)``, with values and results by number.

    Sets of gradients and of staged leaves are bits of an int: ``staged`` has the leaves that come
    in order, and ``made_of`` those, and gradients, that each value is computed from.
    """

    def __init__(
        self,
        update: Callable,
        gradients: Any,
        state: Any,
        params: Any,
        extra: dict[str, Any],
        index: Any,
        state_on_host: bool,
    ):
        leaves, call = jaxprs.split_arrays(update, (gradients, state, params), extra)
        self.index = index
        # The state and the parameters of all layers, of which each array gives one.
        self._stacked = _ids((state, params)) if index is not None else set()
        self.flat = flat = jaxprs.flatten(
            call, [_stand_in(leaf, id(leaf) in self._stacked) for leaf in leaves]
        )
        self.operands = [*flat.consts, *leaves]
        self.maker = flat.makers()
        self._name_results(gradients, state, params)
        # What is on the device and comes in order all the same.
        ordered = [] if state_on_host else list(filter(offloadable, jax.tree.leaves(state)))
        self._trace_back(gradients, _ids(ordered))

    def _name_results(self, gradients: Any, state: Any, params: Any) -> None:
        """What belongs to each place among the results: its gradient, parameter, leaf of state."""
        flat = self.flat
        first, rest = jax.tree.unflatten(flat.out_tree, range(len(flat.outputs)))
        alike = jax.tree.structure(first) == jax.tree.structure(params)
        self.updates, self.states = jax.tree.leaves(first), jax.tree.leaves(rest)
        self.gradient = dict(zip(self.updates, jax.tree.leaves(gradients), strict=False))
        self.parameter = (
            dict(zip(self.updates, jax.tree.leaves(params), strict=True)) if alike else {}
        )
        self.origin = dict(zip(self.states, jax.tree.leaves(state), strict=True))
        # The stacks that a layer's results are stored in.
        self.stack = self.origin | self.parameter if self.index is not None else {}
        self.outgoing = {
            at: made
            for at in ([*self.updates, *self.states] if self.stack else self.states)
            if isinstance(made := flat.outputs[at], int) and offloadable(flat.avals[made])
        }

    def _trace_back(self, gradients: Any, ordered: set[int]) -> None:
        """Which gradients and staged leaves each value is made of, as bits."""
        moved = _ids(gradients) | self._stacked | ordered
        self.staged = sum(
            1 << number
            for number, operand in enumerate(self.operands)
            if on_host(operand) or id(operand) in ordered
        )
        self.made_of = {
            number: 1 << number if id(operand) in moved or self.is_staged(number) else 0
            for number, operand in enumerate(self.operands)
        }
        for step in self.flat.steps:
            parts = functools.reduce(operator.or_, (self.made_of[v] for v in step.uses), 0)
            self.made_of.update(dict.fromkeys(step.outputs, parts))

    def is_staged(self, number: int) -> bool:
        """Whether a value is a leaf that comes in order."""
        return bool(self.staged >> number & 1)

    def is_stacked(self, number: int) -> bool:
        """Whether an operand is the stack of all layers."""
        return id(self.operands[number]) in self._stacked


def _ids(tree: Any) -> set[int]:
    return {id(leaf) for leaf in jax.tree.leaves(tree)}


def _stand_in(leaf: Any, stacked: bool) -> Any:
    """What the update is traced with: the leaf in device memory, one layer of a stack."""
    if not stacked and not on_host(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape[1:] if stacked else leaf.shape, leaf.dtype)
