"""A scan whose iterations are not all run alike: its first ones keep other residuals than its last.

Slices are read, and results and gradients written, where they are: two scans, one after the other,
would have copies of both.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmem.loops.looped import DifferentiableLoop
from jaxmem.loops.schedules import table
from jaxmem.loops.states import Arrays, StateWalk
from jaxmem.loops.tapes import Step


def split_scan(
    pieces: Sequence[tuple[int, Step]],
    constants: Sequence[Any],
    carry: Sequence[Any],
    slices: Sequence[Any],
    reverse: bool = False,
) -> tuple[Arrays, Arrays]:
    """The last carry and the stacked results of the steps, each run so many times after the one
    before it, as `jax.lax.scan` has them. All steps compute the same: what differs is what their
    derivatives keep."""
    scan = _PiecewiseLoop(
        pieces=tuple(pieces), constants=len(constants), carried=len(carry), reverse=reverse
    )
    return scan.run(*constants, *carry, *slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PiecewiseLoop(DifferentiableLoop):
    pieces: tuple[tuple[int, Step], ...]

    @property
    def length(self) -> int:
        return sum(count for count, _ in self.pieces)

    @property
    def plain_step(self) -> Step:
        return self.pieces[0][1]

    def walks(self, operands, wanted) -> list[tuple[int, int, StateWalk]]:
        """For each piece its first step, how many it has, and how it goes through them."""
        found, start = [], 0
        for count, step in self.pieces:
            tape = self.tape(step, operands, wanted)
            walk = StateWalk(step, tape, 1, table(1, 1), 1, self.length, self.reverse)
            found.append((start, count, walk))
            start += count
        return found

    def forward(self, wanted, operands):
        """Results, and of each piece what its steps keep."""
        constants, state, slices = self.parts(operands)
        results, kept = self.blank_results(operands), []
        one = [value[0] for value in slices]
        for start, count, walk in self.walks(operands, wanted):
            constant = walk.tape.constant(constants, state, one)
            state, results, tape = walk.forward_with_residuals(
                state, count, start, constants, slices, results
            )
            kept.append((tape, constant))
        return (*state, *results), kept

    def backward(self, wanted, operands, kept, cotangents) -> Arrays:
        _, _, slices = self.parts(operands)
        pieces = list(zip(self.walks(operands, wanted), kept, strict=True))
        (_, _, first), _ = pieces[0]
        loop_cotangents, result_cotangents = self.final_cotangents(
            operands, wanted, first.tape, cotangents
        )
        for (start, count, walk), (tape, constant) in reversed(pieces):
            loop_cotangents = walk.backward_steps(
                loop_cotangents, tape, count, start, constant, slices, result_cotangents
            )
        carry_cotangents, sums, slice_cotangents = loop_cotangents
        return [*sums, *carry_cotangents, *slice_cotangents]
