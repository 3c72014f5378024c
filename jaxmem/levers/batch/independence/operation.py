"""One equation of the program in both traces, with what is known of its operands."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import ANOTHER, Each, Free, Sizes, Unproved
from jaxmem.levers.batch.independence.layout import Shapes, agreed, lies


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation in both traces.

    Attributes:
        steps: itself; the second is of the slice.
        kinds: of its operands.
        shapes, results: of operands and results in both traces.
        sizes: numbers of examples.
    """

    steps: tuple[jaxprs.Step, jaxprs.Step]
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
    def mixes(self) -> Unproved:
        return Unproved(f"its examples see one another ({self.where})")

    @property
    def bends(self) -> Unproved:
        return Unproved(f"it is no plain mean over examples ({self.where})")

    @property
    def sized(self) -> Unproved:
        return Unproved(f"it depends on the size of the batch in another way ({self.where})")

    @property
    def another(self) -> Unproved:
        return Unproved(f"{ANOTHER.why} ({self.where})")

    @property
    def unknown(self) -> Unproved:
        return Unproved(f"whether it keeps examples apart is not known ({self.where})")

    @property
    def numbered(self) -> Unproved:
        return Unproved(f"it uses the place of an example in the batch ({self.where})")

    # ---- what rules ask of it

    def alike(self, *but: str) -> bool:
        """Whether both traces have the same parameters, but for some."""
        one, two = (step.equation.params for step in self.steps)
        return one.keys() == two.keys() and all(
            name in but or equal(one[name], two[name]) for name in one
        )

    def inexact(self) -> bool:
        aval = self.steps[0].equation.outvars[0].aval
        return jnp.issubdtype(aval.dtype, jnp.inexact)

    @property
    def common(self) -> Each | None:
        """The place of the examples in all operands that have any; None: it is not the same."""
        return agreed([kind for kind in self.kinds if isinstance(kind, Each)])

    @property
    def only(self) -> Each | None:
        """The examples of the first operand, where none of the others has any."""
        kind, *others = self.kinds
        alone = isinstance(kind, Each) and all(isinstance(other, Free) for other in others)
        return kind if alone else None

    @property
    def has_other_array(self) -> bool:
        """Whether an operand has elements that are neither of the examples nor all one number: what
        they mean for an example may depend on its place in the batch."""
        return any(isinstance(kind, Free) and kind.value is None for kind in self.kinds)

    def each(self, axis: int, like: Each, at: int = 0) -> Each | Unproved:
        """The kind of a result with the examples of another value along an axis."""
        result = dataclasses.replace(like, axis=axis)
        return result if lies(result, self.results[at], self.sizes) else self.mixes

    def every(self, kind: Any) -> list[Any]:
        """One kind for all its results."""
        return [kind] * len(self.results)


def equal(one: Any, two: Any) -> bool:
    """Whether two parameters of a primitive are the same."""
    try:
        return one is two or bool(one == two)
    except (TypeError, ValueError):  # arrays and such
        return False
