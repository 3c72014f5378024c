"""A scan whose iterations are not all run alike: its first ones keep other residuals than its last.

Slices are read, and results and gradients written, where they are: two scans, one after the other,
would have copies of both.
"""

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.placement import of_shape
from jaxmem.loops.derivatives import Passes, with_backward
from jaxmem.loops.schedules import table
from jaxmem.loops.states import Arrays, Walk, blank, carried, stack
from jaxmem.loops.tapes import Step, Tape


def split_scan(
    parts: Sequence[tuple[int, Step]],
    constants: Sequence[Any],
    carry: Sequence[Any],
    slices: Sequence[Any],
    reverse: bool = False,
) -> tuple[Arrays, Arrays]:
    """The last carry and the stacked results of the steps, each run so many times after the one
    before it, as `jax.lax.scan` has them. All steps compute the same: what differs is what their
    derivatives keep."""
    operands = [jnp.asarray(value) for value in (*constants, *carry, *slices)]
    scan = _Split(tuple(parts), reverse, len(constants), len(constants) + len(carry))
    results = with_backward(scan.plain, scan.passes)(*operands)
    return list(results[: len(carry)]), list(results[len(carry) :])


@dataclasses.dataclass(frozen=True)
class _Split:
    parts: tuple[tuple[int, Step], ...]
    reverse: bool
    first: int  # operands are constants up to here
    second: int  # the carry up to here, then slices

    @property
    def length(self) -> int:
        return sum(count for count, _ in self.parts)

    def apart(self, values: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        """Those of constants, of the carry and of slices."""
        first, second = self.first, self.second
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def plain(self, *operands):
        constants, carry, slices = self.apart(operands)
        _, step = self.parts[0]
        carry, results = jax.lax.scan(
            lambda carry, slices: step(constants, carry, slices),
            carry, slices, self.length, self.reverse,
        )  # fmt: skip
        return tuple(carry + results)

    def passes(self, wanted: Set[int]) -> Passes:
        return functools.partial(self.forward, wanted), functools.partial(self.backward, wanted)

    def walks(self, operands, wanted) -> list[tuple[int, int, Walk]]:
        """For each part its first step, how many it has, and how it goes through them."""
        constants, carry, slices = self.apart(list(map(jax.typeof, operands)))
        slices = [of_shape(aval, aval.shape[1:]) for aval in slices]
        found, start = [], 0
        for count, step in self.parts:
            tape = Tape.of(step, constants, carry, slices, wanted)
            walk = Walk(step, tape, 1, table(1, 1), 1, self.length, self.reverse)
            found.append((start, count, walk))
            start += count
        return found

    def forward(self, wanted, operands):
        """Results, and of each part what its steps keep."""
        constants, state, slices = self.apart(operands)
        one = [value[0] for value in slices]
        _, made = self.parts[0][1](constants, state, one)  # its shapes; XLA leaves out the rest
        results = [stack(blank(value), self.length) for value in made]
        kept = []
        for start, count, walk in self.walks(operands, wanted):
            constant = walk.tape.constant(constants, state, one)
            state, results, tape = walk.taped(state, count, start, constants, slices, results)
            kept.append((tape, constant))
        return (*state, *results), kept

    def backward(self, wanted, operands, kept, cotangents) -> Arrays:
        """The cotangents of the operands."""
        _, carry, slices = self.apart(operands)
        walks = self.walks(operands, wanted)
        made = range(len(carry), len(walks[0][2].tape.results))
        results_bar = [cotangents.get(place) for place in made]
        zeros = [blank(x) if place in wanted else None for place, x in enumerate(operands)]
        sums, _, slices_bar = self.apart(zeros)
        bars = carried(cotangents, carry), sums, slices_bar
        for (start, count, walk), (tape, constant) in reversed(list(zip(walks, kept, strict=True))):
            bars = walk.untaped(bars, tape, count, start, constant, slices, results_bar)
        carry_bar, sums, slices_bar = bars
        return [*sums, *carry_bar, *slices_bar]
