"""A scan whose derivative is jaxmem's own: what all of them have in common."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.placement import element_of
from jaxmem.loops.derivatives import Passes, with_backward
from jaxmem.loops.states import Arrays, blank, carried, stack
from jaxmem.loops.tapes import Step, Tape


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifferentiableLoop(abc.ABC):
    """A step that is run ``length`` times. Operands are ``constants``, so many, then ``carried``
    ones, then slices; in reverse the last slice is the first."""

    constants: int
    carried: int
    reverse: bool = False

    @property
    @abc.abstractmethod
    def length(self) -> int: ...

    @property
    @abc.abstractmethod
    def plain_step(self) -> Step:
        """The step where nothing is differentiated, or by JAX."""

    @abc.abstractmethod
    def forward(self, wanted: Set[int], operands: Sequence[Any]) -> tuple[tuple, Any]:
        """Results, and what is kept."""

    @abc.abstractmethod
    def backward(self, wanted: Set[int], operands, kept, cotangents: Mapping[int, Any]) -> Arrays:
        """The cotangents of the operands."""

    def run(self, *operands: Any) -> tuple[Arrays, Arrays]:
        """The last carry and the stacked results, as `jax.lax.scan` has them."""
        arrays = map(jnp.asarray, operands)
        results = list(with_backward(self.plain, self.passes)(*arrays))
        return results[: self.carried], results[self.carried :]

    def parts(self, values: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        """Those of constants, of the carry and of slices."""
        first, second = self.constants, self.constants + self.carried
        return list(values[:first]), list(values[first:second]), list(values[second:])

    def plain(self, *operands):
        constants, carry, slices = self.parts(operands)
        carry, results = jax.lax.scan(
            lambda carry, slices: self.plain_step(constants, carry, slices),
            carry, slices, self.length, self.reverse,
        )  # fmt: skip
        return tuple(carry + results)

    def passes(self, wanted: Set[int]) -> Passes:
        return functools.partial(self.forward, wanted), functools.partial(self.backward, wanted)

    def tape(self, step: Step, operands: Sequence[Any], wanted: Set[int]) -> Tape:
        """One of the iterations, with its residuals."""
        constants, carry, slices = self.parts(list(map(jax.typeof, operands)))
        slices = list(map(element_of, slices))
        return Tape.trace(step, constants, carry, slices, wanted)

    def blank_results(self, operands: Sequence[Any]) -> Arrays:
        """Where the results go."""
        constants, carry, slices = self.parts(operands)
        # For its shapes; XLA leaves out the rest.
        _, made = self.plain_step(constants, carry, [value[0] for value in slices])
        return [stack(blank(value), self.length) for value in made]

    def final_cotangents(
        self, operands: Sequence[Any], wanted: Set[int], tape: Tape, cotangents: Mapping[int, Any]
    ) -> tuple[tuple[Arrays, Arrays, Arrays], Arrays]:
        """The cotangents behind the last iteration, of carry, constants and slices, and those of
        the results."""
        _, carry, _ = self.parts(operands)
        made = range(len(carry), len(tape.results))
        zeros = [blank(x) if place in wanted else None for place, x in enumerate(operands)]
        sums, _, slice_cotangents = self.parts(zeros)
        loop_cotangents = carried(cotangents, carry), sums, slice_cotangents
        return loop_cotangents, [cotangents.get(place) for place in made]
