"""The planners by name."""

from collections.abc import Callable

from jaxmem.planning.dots import Dots
from jaxmem.planning.dp import DP
from jaxmem.planning.layouts import Layout, Planner as Planner
from jaxmem.planning.rates import Rates
from jaxmem.planning.sqrt import Sqrt
from jaxmem.program import Program

PLANNERS: dict[str, Callable[[Program, Rates], Planner]] = {"dp": DP, "dots": Dots, "sqrt": Sqrt}


def lowest(program: Program, layout: Layout) -> str:
    """The operation that sets a layout's peak, in words."""
    if not program.kernels or not layout.peak:
        return "what is reserved"
    operation = program.operation_of(layout.place[0])
    return f"the backward pass of {operation.name} in {operation.path or 'the function'}"
