"""The states of a loop that are kept, and how one gets from them to any other.

A loop's step is run on without residuals to a state that is wanted, or taped: run with the
residuals that its derivative needs. All of it is driven by numbers: the program has the size of a
few steps, however many there are.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.jaxprs.operands import is_extended
from jaxmem.jaxprs.placement import filled, stack_of
from jaxmem.loops.tapes import Step, Tape

Arrays = list[Any]


class States(NamedTuple):
    """The state that a loop is at, which block that is before, and those that are kept: the blocks
    that they are before (-1: none is kept there), and the states."""

    state: Arrays
    position: Any
    slots: Any
    kept: Arrays


@dataclasses.dataclass(frozen=True)
class StateWalk:
    """The steps of a loop, ``block`` of them at a time, with ``states`` kept; ``table`` as of
    `Schedule.reachable`. In reverse the last of ``length`` slices is the first."""

    step: Step
    tape: Tape
    states: int
    table: np.ndarray
    block: int = 1
    length: int = 0
    reverse: bool = False

    def start(self, carry: Arrays) -> States:
        """Before the first step, whose state is kept."""
        slots = jnp.full(self.states, -1, jnp.int32).at[0].set(0)
        return States(carry, jnp.int32(0), slots, [stack(value, self.states) for value in carry])

    def restore(self, target, slots, kept) -> States:
        """At the last state that is kept before block ``target`` or one ahead of it."""
        last = jnp.argmax(jnp.where(slots <= target, slots, -1))
        state = [jax.lax.dynamic_index_in_dim(x, last, keepdims=False) for x in kept]
        return States(state, slots[last], slots, kept)

    def advance(self, target, states: States, constants, slices, results):
        """From a state to the one before block ``target``; keeps others on the way, where the rule
        of Griewank and Walther (2000) says. What was kept behind it makes room."""

        def free(slots):
            return (slots < 0) | (slots > target)

        def more(loop):
            states, _ = loop
            return (states.position < target) & jnp.any(free(states.slots))

        def keep(loop):
            (state, at, slots, kept), results = loop
            empty = free(slots)
            distance = self.distance(target - at + 1, 1 + jnp.sum(empty))
            state, results = self.run_on(state, at, distance, constants, slices, results)
            slot, at = jnp.argmax(empty), at + distance
            return States(state, at, slots.at[slot].set(at), written(kept, state, slot)), results

        if self.states > 1:
            states, results = jax.lax.while_loop(more, keep, (states, results))
        state, results = self.run_on(
            states.state, states.position, target - states.position, constants, slices, results
        )
        return states._replace(state=state), results

    def distance(self, blocks, states):
        """How many blocks to run on before the next state is kept, where so many are to be reversed
        with so many states, that of now among them."""
        table = jnp.asarray(self.table)
        most = jnp.sum(table[states] < blocks)
        first = jnp.minimum(table[states, most - 1], blocks - table[states - 1, most - 1])
        return first.astype(jnp.int32)

    def run_on(self, state, at, blocks, constants, slices, results):
        """The state some blocks later; the results are written, where there is room for them."""

        def block(count, loop):
            start = (at + count) * self.block

            def one(count, loop):
                state, results = loop
                place = self.place(start + count)
                state, made = self.step(constants, state, read(slices, place))
                return state, results if results is None else written(results, made, place)

            if self.block == 1:
                return one(0, loop)
            return jax.lax.fori_loop(0, self.block, one, loop)

        return jax.lax.fori_loop(0, blocks, block, (state, results))

    def forward_with_residuals(self, state, steps, start, constants, slices, results):
        """The state some steps later, the results written, and what each step keeps."""

        def one(count, loop):
            state, results, kept = loop
            place = self.place(start + count)
            state, made, more = self.tape.run(constants, state, read(slices, place))
            results = results if results is None else written(results, made, place)
            return state, results, written(kept, more, count)

        # XLA would have one buffer for the first contents of all stacks of zeros, and copy it.
        fill = int(results is None)
        kept = [
            None if is_extended(aval) else filled(stack_of(aval, steps), fill)
            for aval in self.tape.stacked
        ]
        if any(x is None for x in kept):  # random keys: the first ones
            _, _, more = self.tape.run(constants, state, read(slices, self.place(start)))
            kept = [stack(y, steps) if x is None else x for x, y in zip(kept, more, strict=True)]
        return jax.lax.fori_loop(0, steps, one, (state, results, kept))

    def backward_steps(
        self, loop_cotangents, tape, steps, start, constant, slices, result_cotangents
    ):
        """The cotangents of carry, constants and slices before some steps, from those behind."""

        def one(loop_cotangents, entry):
            carry_cotangents, sums, slice_cotangents = loop_cotangents
            count, kept = entry
            place = self.place(start + count)
            more, carry_cotangents, own_cotangents = self.tape.pullback(
                constant,
                kept,
                read(slices, place),
                [*carry_cotangents, *read(result_cotangents, place)],
            )
            sums = [None if x is None else x + y for x, y in zip(sums, more, strict=True)]
            slice_cotangents = [
                None if x is None else written([x], [y], place)[0]
                for x, y in zip(slice_cotangents, own_cotangents, strict=True)
            ]
            return (carry_cotangents, sums, slice_cotangents), None

        return jax.lax.scan(one, loop_cotangents, (jnp.arange(steps), tape), reverse=True)[0]

    def place(self, at):
        """Where a step's slices and results are."""
        return self.length - 1 - at if self.reverse else at


def read(stacks, place):
    return [
        None if x is None else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
        for x in stacks
    ]


def written(stacks, values, place):
    return [
        jax.lax.dynamic_update_index_in_dim(stack, value, place, 0)
        for stack, value in zip(stacks, values, strict=True)
    ]


def stack(value, count: int):
    return jnp.broadcast_to(value[None], (count, *value.shape))


def blank(value):
    """Zeros of the same type and in the same place; of random keys, the keys."""
    return value if is_extended(value) else filled(value)


def carried(cotangents: Mapping[int, Any], carry: Arrays) -> Arrays:
    """The cotangents of the last carry, the first of the results: zeros where nothing reads it, and
    None of what has none."""
    return [
        cotangents.get(place, blank(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else None
        for place, x in enumerate(carry)
    ]
