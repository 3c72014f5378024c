"""A scan whose derivative makes its states again from a few that are kept.

The forward pass keeps states where `Schedule` says, and the residuals of the last block of steps.
The backward pass takes one block after the other, from the last: it runs from the nearest state
that is kept to the block, keeps other states on the way where there is room, and makes the block's
residuals. All of that is driven by numbers: the program has the size of a few steps, however many
there are.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.operands import of_some
from jaxmem.jaxprs.placement import of_shape, varying
from jaxmem.loops.linear import Linear
from jaxmem.loops.schedules import Schedule
from jaxmem.loops.tapes import Step, Tape, no_cotangent

Arrays = list[Any]


def checkpointed_scan(
    step: Step,
    constants: Sequence[Any],
    carry: Sequence[Any],
    slices: Sequence[Any],
    schedule: Schedule,
    reverse: bool = False,
) -> tuple[Arrays, Arrays]:
    """The last carry and the stacked results of ``step``, run ``schedule.length`` times, as
    `jax.lax.scan` has them."""
    operands = [jnp.asarray(value) for value in (*constants, *carry, *slices)]
    avals = list(map(jax.typeof, operands))
    first, second = len(constants), len(constants) + len(carry)
    one_each = [of_shape(aval, aval.shape[1:]) for aval in avals[second:]]
    tape = Tape.of(step, avals[:first], avals[first:second], one_each)
    return _Scan(step, tape, schedule, reverse, first, second).run(operands)


class _States(NamedTuple):
    """The state that the loop is at, which block that is before, and those that are kept: the
    number of the last of them, the blocks that they are before, and the states."""

    state: Arrays
    at: Any
    last: Any
    places: Any
    kept: Arrays


@dataclasses.dataclass(frozen=True)
class _Scan:
    step: Step
    tape: Tape
    schedule: Schedule
    reverse: bool
    first: int  # operands are constants up to here
    second: int  # the carry up to here, then slices

    def parts(self, operands: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        return (
            list(operands[: self.first]),
            list(operands[self.first : self.second]),
            list(operands[self.second :]),
        )

    # The function and its derivative, as JAX sees them.

    def run(self, operands: Arrays) -> tuple[Arrays, Arrays]:
        carries = self.second - self.first
        results = self.function(*operands)
        return list(results[:carries]), list(results[carries:])

    @functools.cached_property
    def function(self):
        @jax.custom_jvp
        def function(*operands):
            return self.plain(*operands)

        @functools.partial(function.defjvp, symbolic_zeros=True)
        def derivative(operands, tangents):
            results, kept = self.kept(*operands)
            return results, self.tangents(operands, tangents, results, kept)

        return function

    @functools.cached_property
    def kept(self):
        """Results and residuals; differentiated as the plain loop is, once more."""

        @jax.custom_jvp
        def kept(*operands):
            return self.forward(operands)

        @functools.partial(kept.defjvp, symbolic_zeros=True)
        def derivative(operands, tangents):
            results, residuals = self.kept(*operands)
            moved = self.tangents(operands, tangents, results, residuals)
            none = jax.tree.map(_no_tangent, residuals)
            return (results, residuals), (moved, none)

        return kept

    def plain(self, *operands):
        """The loop as `jax.lax.scan` runs it: the last carry and the results."""
        constants, carry, slices = self.parts(operands)
        carry, results = jax.lax.scan(
            lambda carry, slices: self.step(constants, carry, slices),
            carry, slices, self.schedule.length, self.reverse,
        )  # fmt: skip
        return tuple(carry + results)

    def tangents(self, operands, tangents, results, residuals) -> tuple:
        """The tangents of the results, by those of the operands that have one."""
        zero = jax.custom_derivatives.SymbolicZero
        at = [
            place for place, tangent in enumerate(tangents)
            if self.tape.moving[place] and type(tangent) is not zero
        ]  # fmt: skip
        real = [place for place, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        leaves, tree = jax.tree.flatten(residuals)
        count = len(operands)

        def chosen(values):
            def of_real(*operands):
                made = self.plain(*operands)
                return [made[place] for place in real]

            return of_some(at, of_real, values[:count])

        def plain(values, moved):
            return jax.jvp(chosen(values), [values[place] for place in at], list(moved))[1]

        def plain_back(values, moved):
            return list(jax.vjp(chosen(values), *(values[place] for place in at))[1](list(moved)))

        def back(values, moved):
            cotangents = dict(zip(real, moved, strict=True))
            residuals = jax.tree.unflatten(tree, values[count:])
            made = self.backward(values[:count], residuals, cotangents, set(at))
            return [made[place] for place in at]

        rule = Linear(
            plain,
            plain,
            back,
            plain_back,
            tuple(jax.typeof(operands[place]) for place in at),
            tuple(jax.typeof(results[place]) for place in real),
        )
        moved = iter(rule([*operands, *leaves], [tangents[place] for place in at]))
        return tuple(
            next(moved) if place in real else no_cotangent(x) for place, x in enumerate(results)
        )

    # The two passes.

    def forward(self, operands):
        """Results, and what is kept: states, and the last block's residuals."""
        constants, carry, slices = self.parts(operands)
        schedule = self.schedule
        kept = [_stack(value, schedule.states) for value in carry]
        first = [value[0] for value in slices]
        _, made = self.step(constants, carry, first)  # its shapes; XLA leaves out the rest
        results = [_stack(_blank(value), schedule.length) for value in made]
        places = jnp.zeros(schedule.states, jnp.int32)
        states = _States(carry, jnp.int32(0), jnp.int32(0), places, kept)
        start = (schedule.blocks - 1) * schedule.block
        if schedule.blocks > 1:
            states, results = self.reach(schedule.blocks - 1, states, constants, slices, results)
        carry, results, tape = self.taped(
            states.state, schedule.tail, start, constants, slices, results
        )
        constant = self.tape.constant(constants, carry, first)
        return (*carry, *results), (states.last, states.places, states.kept, tape, constant)

    def backward(self, operands, residuals, cotangents, wanted) -> Arrays:
        """The cotangents of the operands, None of what is not ``wanted``; ``cotangents`` are those
        of the results, by their places."""
        constants, carry, slices = self.parts(operands)
        last, places, kept, tape, constant = residuals
        schedule = self.schedule
        carry_bar = [cotangents.get(place) for place in range(len(carry))]
        results_bar = [cotangents.get(place) for place in range(len(carry), len(self.tape.results))]
        zeros = [_blank(x) if place in wanted else None for place, x in enumerate(operands)]
        bars = carry_bar, zeros[: self.first], zeros[self.second :]
        start = (schedule.blocks - 1) * schedule.block
        bars = self.untaped(bars, tape, schedule.tail, start, constant, slices, results_bar)

        def block(count, loop):
            last, places, kept, bars = loop
            target = schedule.blocks - 2 - count
            # The block behind this one is done: the state that was kept before it makes room.
            last = jnp.where(places[last] > target, last - 1, last)
            state = [jax.lax.dynamic_index_in_dim(x, last, keepdims=False) for x in kept]
            states = _States(state, places[last], last, places, kept)
            states, _ = self.reach(target, states, constants, slices, None)
            start = target * schedule.block
            _, _, tape = self.taped(states.state, schedule.block, start, constants, slices, None)
            bars = self.untaped(bars, tape, schedule.block, start, constant, slices, results_bar)
            return states.last, states.places, states.kept, bars

        loop = (last, places, kept, bars)
        if schedule.blocks == 2:
            # XLA has no loop to run once, and would make the block's residuals at any time.
            *_, bars = block(0, jax.lax.optimization_barrier(loop))
        elif schedule.blocks > 2:
            *_, bars = jax.lax.fori_loop(0, schedule.blocks - 1, block, loop)
        carry_bar, sums, slices_bar = bars
        return [*sums, *carry_bar, *slices_bar]

    def reach(self, target, states: _States, constants, slices, results):
        """From a state to the one before block ``target``; keeps others on the way."""
        most = self.schedule.states
        if most > 1:
            table = jnp.asarray(self.schedule.reachable)

            def more(loop):
                states, _ = loop
                return (states.at < target) & (states.last < most - 1)

            def keep(loop):
                (state, at, last, places, kept), results = loop
                distance = _distance(table, target - at + 1, most - last)
                state, results = self.run_on(state, at, distance, constants, slices, results)
                at, last = at + distance, last + 1
                places = places.at[last].set(at)
                kept = _written(kept, state, last)
                return _States(state, at, last, places, kept), results

            states, results = jax.lax.while_loop(more, keep, (states, results))
        state, results = self.run_on(
            states.state, states.at, target - states.at, constants, slices, results
        )
        return states._replace(state=state), results

    def run_on(self, state, at, blocks, constants, slices, results):
        """The state some blocks later; the results are written, where there is room for them."""
        size = self.schedule.block

        def block(count, loop):
            start = (at + count) * size

            def one(count, loop):
                state, results = loop
                place = self.place(start + count)
                state, made = self.step(constants, state, _at(slices, place))
                return state, results if results is None else _written(results, made, place)

            return one(0, loop) if size == 1 else jax.lax.fori_loop(0, size, one, loop)

        return jax.lax.fori_loop(0, blocks, block, (state, results))

    def taped(self, state, steps, start, constants, slices, results):
        """The state some steps later, the results written, and what each step keeps."""

        def one(count, loop):
            state, results, kept = loop
            place = self.place(start + count)
            state, made, more = self.tape.run(constants, state, _at(slices, place))
            results = results if results is None else _written(results, made, place)
            return state, results, _written(kept, more, count)

        # XLA would have one buffer for the first contents of all stacks of zeros, and copy it.
        fill = int(results is None)
        kept = [_filled(aval, steps, fill) for aval in self.tape.stacked]
        if None in kept:  # random keys: the first ones
            _, _, more = self.tape.run(constants, state, _at(slices, self.place(start)))
            kept = [_stack(y, steps) if x is None else x for x, y in zip(kept, more, strict=True)]
        return jax.lax.fori_loop(0, steps, one, (state, results, kept))

    def untaped(self, bars, tape, steps, start, constant, slices, results_bar):
        """The cotangents before some steps, from those behind them."""

        def one(bars, there):
            carry_bar, sums, slices_bar = bars
            count, kept = there
            place = self.place(start + count)
            made = self.tape.back(
                constant, kept, _at(slices, place), [*carry_bar, *_at(results_bar, place)]
            )
            more, carry_bar, slice_bar = made
            sums = [None if x is None else x + y for x, y in zip(sums, more, strict=True)]
            slices_bar = [
                None if x is None else _written([x], [y], place)[0]
                for x, y in zip(slices_bar, slice_bar, strict=True)
            ]
            return (carry_bar, sums, slices_bar), None

        return jax.lax.scan(one, bars, (jnp.arange(steps), tape), reverse=True)[0]

    def place(self, at):
        """Where a step's slices and results are."""
        return self.schedule.length - 1 - at if self.reverse else at


def _distance(table, blocks, states):
    """How many blocks to run on before the next state is kept, where so many are to be reversed
    with so many states, that of now among them: the rule of Griewank and Walther (2000)."""
    repeats = jnp.sum(table[states] < blocks)
    return jnp.minimum(table[states, repeats - 1], blocks - table[states - 1, repeats - 1])


def _at(stacks, place):
    return [
        None if x is None else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
        for x in stacks
    ]


def _written(stacks, values, place):
    return [
        jax.lax.dynamic_update_index_in_dim(stack, value, place, 0)
        for stack, value in zip(stacks, values, strict=True)
    ]


def _stack(value, count: int):
    return jnp.broadcast_to(value[None], (count, *value.shape))


def _filled(aval, count: int, fill: int):
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    return varying(jnp.full((count, *aval.shape), fill, aval.dtype), aval)


def _blank(value):
    """Zeros of the same type, over the same axes of `jax.shard_map`; of random keys, the keys."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return varying(jnp.zeros_like(value), value)


def _no_tangent(value):
    return (
        jnp.zeros_like(value) if jnp.issubdtype(value.dtype, jnp.inexact) else no_cotangent(value)
    )
