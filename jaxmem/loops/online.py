"""A while loop with a derivative in reverse mode: the states that it keeps are chosen while it
runs, since nobody knows how long it will.

Wang, Moin and Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady adjoint
calculation" (SIAM J. Sci. Comput., 2009): each state that is kept has a level. One that has a later
state of a higher level can be spared, and makes room for the next; where there is none, the latest
gives way, and the next is a level above it. However long the loop runs, no step is then made again
more often than by the best schedule of as many states for a loop whose length is known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.loops.derivatives import with_backward
from jaxmem.loops.schedules import table
from jaxmem.loops.states import Arrays, Walk, blank, written
from jaxmem.loops.tapes import Step, Tape

_FIRST = np.iinfo(np.int32).max  # the level of the first state, which is always kept
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
    second = first + len(constants[1])
    avals = list(map(jax.typeof, operands))
    tape = Tape.of(step, avals[first:second], avals[second:], [])
    walk = Walk(step, tape, states, table(states, _REPEATS))

    def parts(values: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def goes_on(of_condition, state, count):
        holds = condition(of_condition, state)
        return holds if most is None else holds & (count < most)

    def plain(*operands):
        of_condition, constants, carry = parts(operands)

        def one(loop):
            state, count = loop
            return step(constants, state, [])[0], count + 1

        state, _ = jax.lax.while_loop(
            lambda loop: goes_on(of_condition, *loop), one, (carry, jnp.int32(0))
        )
        return tuple(state)

    def forward(operands):
        of_condition, constants, carry = parts(operands)
        start = walk.start(carry)

        def one(loop):
            state, count, places, levels, kept = loop
            if states > 1:
                slot, level = _slot(places, levels, count)
                level = jnp.where(count > 0, level, _FIRST)
                slot = jnp.where(count > 0, slot, 0)
                places, levels = places.at[slot].set(count), levels.at[slot].set(level)
                kept = written(kept, state, slot)
            return step(constants, state, [])[0], count + 1, places, levels, kept

        levels = jnp.zeros(states, jnp.int32).at[0].set(_FIRST)
        loop = (carry, jnp.int32(0), start.places, levels, start.kept)
        state, count, places, _, kept = jax.lax.while_loop(
            lambda loop: goes_on(of_condition, *loop[:2]), one, loop
        )
        constant = tape.constant(constants, carry, [])
        return tuple(state), (count, places, kept, constant)

    def backward(operands, residuals, cotangents, wanted) -> Arrays:
        of_condition, constants, carry = parts(operands)
        count, places, kept, constant = residuals
        bars = [cotangents.get(place) for place in range(len(carry))]
        sums = [blank(x) if first + place in wanted else None for place, x in enumerate(constants)]

        def one(done, loop):
            places, kept, bars = loop
            target = count - 1 - done
            found, _ = walk.reach(target, walk.back(target, places, kept), constants, [], None)
            _, _, step_tape = walk.taped(found.state, 1, target, constants, [], None)
            bars = walk.untaped(bars, step_tape, 1, target, constant, [], [])
            return found.places, found.kept, bars

        *_, (carry_bar, sums, _) = jax.lax.fori_loop(
            0, count, one, (places, kept, (bars, sums, []))
        )
        return [*[None] * len(of_condition), *sums, *carry_bar]

    moving = [False] * first + list(tape.moving)
    return list(with_backward(plain, forward, backward, moving)(*operands))


def _slot(places, levels, count):
    """Where the state before step ``count`` is kept, and its level."""
    used = places >= 0
    later = (places[None, :] > places[:, None]) & used[None, :]
    spared = used & jnp.any(later & (levels[None, :] > levels[:, None]), axis=1)
    empty = ~used
    latest = jnp.argmax(places)
    any_empty, any_spared = jnp.any(empty), jnp.any(spared)
    slot = jnp.where(
        any_empty, jnp.argmax(empty), jnp.where(any_spared, jnp.argmax(spared), latest)
    )
    return slot, jnp.where(any_empty | any_spared, 0, levels[latest] + 1)
