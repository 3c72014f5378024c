"""A scan whose derivative makes its states again from a few that are kept.

The forward pass keeps states where `Schedule` says, and the residuals of the last block of steps.
The backward pass takes one block after the other, from the last: it runs from the nearest state
that is kept to the block, keeps other states on the way where there is room, and makes the block's
residuals.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.placement import DEVICE, HOST
from jaxmem.loops.looped import DifferentiableLoop
from jaxmem.loops.schedules import Schedule
from jaxmem.loops.states import Arrays, StateWalk
from jaxmem.loops.tapes import Step


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
    scan = _Scan(
        step=step,
        schedule=schedule,
        constants=len(constants),
        carried=len(carry),
        reverse=reverse,
    )
    return scan.run(*constants, *carry, *slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scan(DifferentiableLoop):
    step: Step
    schedule: Schedule

    @property
    def length(self) -> int:
        return self.schedule.length

    @property
    def plain_step(self) -> Step:
        return self.step

    def walk(self, operands, wanted) -> StateWalk:
        schedule = self.schedule
        return StateWalk(
            self.step,
            self.tape(self.step, operands, wanted),
            schedule.states,
            schedule.reachable,
            schedule.block,
            schedule.length,
            self.reverse,
        )

    @property
    def tail_start(self) -> int:
        return (self.schedule.blocks - 1) * self.schedule.block

    @property
    def keeps_all(self) -> bool:
        """Whether there is room for the state before each block: XLA then knows how often every
        loop runs."""
        return self.schedule.states >= self.schedule.blocks - 1

    def forward(self, wanted, operands):
        """Results, and what is kept: states, where they are (of those in host memory, in place of
        that, the last one, on the device), and the last block's residuals."""
        constants, carry, slices = self.parts(operands)
        schedule, walk = self.schedule, self.walk(operands, wanted)
        results = self.blank_results(operands)
        others, slots = schedule.blocks - 1, None

        def sent(loop, at):
            """The state before the block before this one is sent while this one runs."""
            state, before, results = loop
            new, results = walk.run_on(state, at, 1, constants, slices, results)
            return (new, state, results), _moved(before, HOST)

        def stacked(loop, at):
            state, results = loop
            return walk.run_on(state, at, 1, constants, slices, results), state

        if schedule.host:
            (state, slots, results), kept = jax.lax.scan(
                sent, (carry, carry, results), jnp.arange(others)
            )
        elif self.keeps_all:
            (state, results), kept = jax.lax.scan(stacked, (carry, results), jnp.arange(others))
        else:
            states, results = walk.advance(others, walk.start(carry), constants, slices, results)
            state, _, slots, kept = states
        carry, results, tail = walk.forward_with_residuals(
            state, schedule.tail, self.tail_start, constants, slices, results
        )
        constant = walk.tape.constant(constants, carry, [value[0] for value in slices])
        return (*carry, *results), (slots, kept, tail, constant)

    def backward(self, wanted, operands, residuals, cotangents) -> Arrays:
        """The cotangents of the operands."""
        constants, _, slices = self.parts(operands)
        slots, kept, tail, constant = residuals
        schedule, walk = self.schedule, self.walk(operands, wanted)
        loop_cotangents, result_cotangents = self.final_cotangents(
            operands, wanted, walk.tape, cotangents
        )
        loop_cotangents = walk.backward_steps(
            loop_cotangents,
            tail,
            schedule.tail,
            self.tail_start,
            constant,
            slices,
            result_cotangents,
        )

        def block(state, at, loop_cotangents):
            start = at * schedule.block
            _, _, more = walk.forward_with_residuals(
                state, schedule.block, start, constants, slices, None
            )
            return walk.backward_steps(
                loop_cotangents, more, schedule.block, start, constant, slices, result_cotangents
            )

        def fetched(loop, entry):
            """The state before the block before this one is fetched while this one runs."""
            loop_cotangents, state = loop
            at, before = entry
            return (block(state, at, loop_cotangents), _moved(before, DEVICE)), None

        def kept_one(loop_cotangents, entry):
            at, state = entry
            return block(state, at, loop_cotangents), None

        def found_one(count, loop):
            slots, kept, loop_cotangents = loop
            target = schedule.blocks - 2 - count
            states = walk.restore(target, slots, kept)
            states, _ = walk.advance(target, states, constants, slices, None)
            return states.slots, states.kept, block(states.state, target, loop_cotangents)

        others = schedule.blocks - 1
        if others == 1:
            # XLA has no loop to run once, and would make the block's residuals at any time.
            slots, kept, loop_cotangents = jax.lax.optimization_barrier(
                (slots, kept, loop_cotangents)
            )
        entry = (jnp.arange(others), kept)
        if schedule.host:
            (loop_cotangents, _), _ = jax.lax.scan(
                fetched, (loop_cotangents, slots), entry, reverse=True
            )
        elif self.keeps_all:
            loop_cotangents, _ = jax.lax.scan(kept_one, loop_cotangents, entry, reverse=True)
        else:
            *_, loop_cotangents = jax.lax.fori_loop(
                0, others, found_one, (slots, kept, loop_cotangents)
            )
        carry_cotangents, sums, slice_cotangents = loop_cotangents
        return [*sums, *carry_cotangents, *slice_cotangents]


def _moved(state: Arrays, space) -> Arrays:
    """A state on its way to host memory or back; numbers stay on the device."""
    return [jax.device_put(x, space) if x.ndim else x for x in state]
