"""A scan whose derivative makes its states again from a few that are kept.

The forward pass keeps states where `Schedule` says, and the residuals of the last block of steps.
The backward pass takes one block after the other, from the last: it runs from the nearest state
that is kept to the block, keeps other states on the way where there is room, and makes the block's
residuals.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.placement import of_shape
from jaxmem.loops.derivatives import with_backward
from jaxmem.loops.schedules import Schedule
from jaxmem.loops.states import Arrays, Walk, blank, stack
from jaxmem.loops.tapes import Step, Tape


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
    length, block, blocks = schedule.length, schedule.block, schedule.blocks
    walk = Walk(step, tape, schedule.states, schedule.reachable, block, length, reverse)
    tail_start = (blocks - 1) * block

    def parts(values: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def plain(*operands):
        constants, carry, slices = parts(operands)
        carry, results = jax.lax.scan(
            lambda carry, slices: step(constants, carry, slices), carry, slices, length, reverse
        )
        return tuple(carry + results)

    def forward(operands):
        constants, carry, slices = parts(operands)
        one = [value[0] for value in slices]
        _, made = step(constants, carry, one)  # its shapes; XLA leaves out the rest
        results = [stack(blank(value), length) for value in made]
        states = walk.start(carry)
        if blocks > 1:
            states, results = walk.reach(blocks - 1, states, constants, slices, results)
        carry, results, kept = walk.taped(
            states.state, schedule.tail, tail_start, constants, slices, results
        )
        constant = tape.constant(constants, carry, one)
        return (*carry, *results), (states.places, states.kept, kept, constant)

    def backward(operands, residuals, cotangents, wanted) -> Arrays:
        constants, carry, slices = parts(operands)
        places, kept, tail, constant = residuals
        bars = [cotangents.get(place) for place in range(len(tape.results))]
        results_bar = bars[len(carry) :]
        zeros = [blank(x) if place in wanted else None for place, x in enumerate(operands)]
        sums, _, slices_bar = parts(zeros)
        bars = walk.untaped(
            (bars[: len(carry)], sums, slices_bar),
            tail, schedule.tail, tail_start, constant, slices, results_bar,
        )  # fmt: skip

        def one(count, loop):
            places, kept, bars = loop
            target = blocks - 2 - count
            states = walk.back(target, places, kept)
            states, _ = walk.reach(target, states, constants, slices, None)
            start = target * block
            _, _, more = walk.taped(states.state, block, start, constants, slices, None)
            bars = walk.untaped(bars, more, block, start, constant, slices, results_bar)
            return states.places, states.kept, bars

        loop = (places, kept, bars)
        if blocks == 2:
            # XLA has no loop to run once, and would make the block's residuals at any time.
            loop = one(0, jax.lax.optimization_barrier(loop))
        elif blocks > 2:
            loop = jax.lax.fori_loop(0, blocks - 1, one, loop)
        carry_bar, sums, slices_bar = loop[-1]
        return [*sums, *carry_bar, *slices_bar]

    results = with_backward(plain, forward, backward, tape.moving)(*operands)
    return list(results[: len(carry)]), list(results[len(carry) :])
