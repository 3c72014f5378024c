"""One equation of the program in both traces, with what is known of its operands."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import (
    DIFFERENT_PROGRAM,
    BatchInvariant,
    NotProved,
    PerExample,
    Sizes,
)
from jaxmem.levers.batch.independence.layout import Shapes, common_batch_axis, is_consistent


@dataclasses.dataclass(frozen=True)
class BatchOperation:
    """An equation in both traces.

    Attributes:
        steps: itself; the second is of the slice.
        kinds: of its operands.
        shapes, results: of operands and results in both traces.
        sizes: numbers of examples.
    """

    steps: tuple[jaxprs.FlatStep, jaxprs.FlatStep]
    kinds: list[Any]
    shapes: list[Shapes]
    results: list[Shapes]
    sizes: Sizes

    @property
    def name(self) -> str:
        return self.steps[0].primitive

    @property
    def params(self) -> dict[str, Any]:
        return self.steps[0].equation.params

    # ---- reasons for which nothing is proved

    @property
    def where(self) -> str:
        return f"{self.name} at {self.steps[0].line}"

    @property
    def mixes_examples(self) -> NotProved:
        return NotProved(f"its examples see one another ({self.where})")

    @property
    def not_linear(self) -> NotProved:
        return NotProved(f"it is no plain mean over examples ({self.where})")

    @property
    def depends_on_batch_size(self) -> NotProved:
        return NotProved(f"it depends on the size of the batch in another way ({self.where})")

    @property
    def different_program(self) -> NotProved:
        return NotProved(f"{DIFFERENT_PROGRAM.why} ({self.where})")

    @property
    def unknown_primitive(self) -> NotProved:
        return NotProved(f"whether it keeps examples apart is not known ({self.where})")

    @property
    def uses_example_index(self) -> NotProved:
        return NotProved(f"it uses the place of an example in the batch ({self.where})")

    # ---- what rules ask of it

    def same_params(self, *but: str) -> bool:
        """Whether both traces have the same parameters, but for some."""
        one, two = (step.equation.params for step in self.steps)
        return one.keys() == two.keys() and all(
            name in but or equal(one[name], two[name]) for name in one
        )

    def inexact(self) -> bool:
        aval = self.steps[0].equation.outvars[0].aval
        return jnp.issubdtype(aval.dtype, jnp.inexact)

    @property
    def common_batch_axis(self) -> PerExample | None:
        """The place of the examples in all operands that have any; None: it is not the same."""
        return common_batch_axis([kind for kind in self.kinds if isinstance(kind, PerExample)])

    @property
    def sole_batched_operand(self) -> PerExample | None:
        """The examples of the first operand, where none of the others has any."""
        kind, *others = self.kinds
        alone = isinstance(kind, PerExample) and all(
            isinstance(other, BatchInvariant) for other in others
        )
        return kind if alone else None

    @property
    def has_other_array(self) -> bool:
        """Whether an operand has elements that are neither of the examples nor all one number: what
        they mean for an example may depend on its place in the batch."""
        return any(isinstance(kind, BatchInvariant) and kind.value is None for kind in self.kinds)

    def each(self, axis: int, like: PerExample, at: int = 0) -> PerExample | NotProved:
        """The kind of a result with the examples of another value along an axis."""
        result = dataclasses.replace(like, axis=axis)
        return (
            result if is_consistent(result, self.results[at], self.sizes) else self.mixes_examples
        )

    def all_results(self, kind: Any) -> list[Any]:
        """One kind for all its results."""
        return [kind] * len(self.results)


def equal(one: Any, two: Any) -> bool:
    """Whether two parameters of a primitive are the same."""
    try:
        return one is two or bool(one == two)
    except (TypeError, ValueError):  # arrays and such
        return False
