"""The planners by name."""

from collections.abc import Callable
from typing import Protocol

from jaxmem.planning.dots import Dots
from jaxmem.planning.dp import DP, Layout
from jaxmem.planning.rates import Rates
from jaxmem.planning.sqrt import Sqrt
from jaxmem.program import Program


class Planner(Protocol):
    """The plans that one way of planning has for one program; bytes are beyond its inputs."""

    plain: Layout

    def cheapest_within(self, budget: int) -> Layout | None:
        """The least recompute that is projected to fit a budget, or None."""

    def smallest(self) -> Layout:
        """The least projected bytes."""

    def smallest_at_one_forward(self) -> Layout:
        """The least projected bytes for at most one more forward pass."""

    def rows(self) -> list[Layout]:
        """What else to compile where nothing that is projected to fit does."""


PLANNERS: dict[str, Callable[[Program, Rates], Planner]] = {"dp": DP, "dots": Dots, "sqrt": Sqrt}


def lowest(program: Program, layout: Layout) -> str:
    """The operation that sets a layout's peak, in words."""
    if not program.kernels or not layout.peak:
        return "what is reserved"
    operation = program.operation_of(layout.place[0])
    return f"the backward pass of {operation.name} in {operation.path or 'the function'}"
