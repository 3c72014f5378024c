"""A while loop with a derivative in reverse mode: the states that it keeps are chosen while it
runs, since nobody knows how long it will.

Wang, Moin and Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady adjoint
calculation" (SIAM J. Sci. Comput., 2009): each state that is kept has a level. One that has a later
state of a higher level can be spared, and makes room for the next; where there is none, the latest
gives way, and the next is a level above it. However long the loop runs, no step is then made again
more often than by the best schedule of as many states for a loop whose length is known.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.loops.derivatives import Passes, with_backward
from jaxmem.loops.schedules import table
from jaxmem.loops.states import Arrays, StateWalk, blank, carried, written
from jaxmem.loops.tapes import Step, Tape

_NEVER_FREED = np.iinfo(np.int32).max  # the level of the first state, which is always kept
# Columns of the table of distances: more repeats than any loop that ends.
_REPEATS = 64


def checkpointed_while(
    condition: Callable[[Sequence[Any], Sequence[Any]], Any],
    step: Step,
    constants: tuple[Sequence[Any], Sequence[Any]],
    carry: Sequence[Any],
    states: int,
    most: int | None = None,
) -> Arrays:
    """The carry of ``step``, run while ``condition`` holds, at most ``most`` times, as
    `jax.lax.while_loop` has it; each takes constants of its own, of which the condition's come
    first."""
    operands = [jnp.asarray(value) for part in (*constants, carry) for value in part]
    first = len(constants[0])
    loop = _While(condition, step, states, most, first, first + len(constants[1]))
    return list(with_backward(loop.plain, loop.passes)(*operands))


@dataclasses.dataclass(frozen=True)
class _While:
    condition: Callable
    step: Step
    states: int
    most: int | None
    first: int  # operands are the condition's constants up to here
    second: int  # the step's up to here, then the carry

    def parts(self, values: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        return (
            list(values[: self.first]),
            list(values[self.first : self.second]),
            list(values[self.second :]),
        )

    def condition_holds(self, constants, state, count):
        holds = self.condition(constants, state)
        return holds if self.most is None else holds & (count < self.most)

    def plain(self, *operands):
        of_condition, constants, carry = self.parts(operands)

        def one(loop):
            state, count = loop
            return self.step(constants, state, [])[0], count + 1

        state, _ = jax.lax.while_loop(
            lambda loop: self.condition_holds(of_condition, *loop), one, (carry, jnp.int32(0))
        )
        return tuple(state)

    def passes(self, wanted: Set[int]) -> Passes:
        return functools.partial(self.forward, wanted), functools.partial(self.backward, wanted)

    def walk(self, operands, wanted) -> StateWalk:
        _, constants, carry = self.parts(list(map(jax.typeof, operands)))
        tape = Tape.trace(self.step, constants, carry, [], {place - self.first for place in wanted})
        return StateWalk(self.step, tape, self.states, table(self.states, _REPEATS))

    def forward(self, wanted, operands):
        """Results, and what is kept: how many steps there were, and states."""
        of_condition, constants, carry = self.parts(operands)
        walk = self.walk(operands, wanted)
        start = walk.start(carry)

        def one(loop):
            state, count, slots, levels, kept = loop
            if self.states > 1:
                slot, level = _next_slot(slots, levels)
                level = jnp.where(count > 0, level, _NEVER_FREED)
                slot = jnp.where(count > 0, slot, 0)
                slots, levels = slots.at[slot].set(count), levels.at[slot].set(level)
                kept = written(kept, state, slot)
            return self.step(constants, state, [])[0], count + 1, slots, levels, kept

        levels = jnp.zeros(self.states, jnp.int32).at[0].set(_NEVER_FREED)
        state, count, slots, _, kept = jax.lax.while_loop(
            lambda loop: self.condition_holds(of_condition, *loop[:2]),
            one,
            (carry, jnp.int32(0), start.slots, levels, start.kept),
        )
        constant = walk.tape.constant(constants, carry, [])
        return tuple(state), (count, slots, kept, constant)

    def backward(self, wanted, operands, residuals, cotangents) -> Arrays:
        """The cotangents of the operands."""
        _, constants, carry = self.parts(operands)
        count, slots, kept, constant = residuals
        walk = self.walk(operands, wanted)
        loop_cotangents = carried(cotangents, carry)
        zeros = [blank(x) if place in wanted else None for place, x in enumerate(operands)]
        none, sums, _ = self.parts(zeros)  # a condition has no derivative

        def one(done, loop):
            slots, kept, loop_cotangents = loop
            target = count - 1 - done
            found, _ = walk.advance(target, walk.restore(target, slots, kept), constants, [], None)
            _, _, tape = walk.forward_with_residuals(found.state, 1, target, constants, [], None)
            loop_cotangents = walk.backward_steps(
                loop_cotangents, tape, 1, target, constant, [], []
            )
            return found.slots, found.kept, loop_cotangents

        start: tuple = (slots, kept, (loop_cotangents, sums, []))
        *_, (carry_cotangents, sums, _) = jax.lax.fori_loop(0, count, one, start)
        return [*none, *sums, *carry_cotangents]


def _next_slot(slots, levels):
    """Where the next state is kept, and its level."""
    used = slots >= 0
    later = (slots[None, :] > slots[:, None]) & used[None, :]
    spared = used & jnp.any(later & (levels[None, :] > levels[:, None]), axis=1)
    empty = ~used
    latest = jnp.argmax(slots)
    any_empty, any_spared = jnp.any(empty), jnp.any(spared)
    slot = jnp.where(
        any_empty, jnp.argmax(empty), jnp.where(any_spared, jnp.argmax(spared), latest)
    )
    return slot, jnp.where(any_empty | any_spared, 0, levels[latest] + 1)
