"""The planners by name."""

from collections.abc import Callable

from jaxmem.planning.dots import Dots
from jaxmem.planning.dp import DP
from jaxmem.planning.layouts import Layout, Planner as Planner
from jaxmem.planning.rates import Rates
from jaxmem.planning.segments import per_block_segments
from jaxmem.planning.sqrt import Sqrt
from jaxmem.program import Program

PLANNERS: dict[str, Callable[[Program, Rates], Planner]] = {"dp": DP, "dots": Dots, "sqrt": Sqrt}


def per_block_layouts(planner: Planner, program: Program, rates: Rates) -> list[Layout]:
    """Rows of regions that a plan must not lose to, the cheapest first; of several, those as their
    author writes them. None where the planner compares with none."""
    rows = planner.per_block_layouts()
    if rows and not program.widens_bfloat16:  # that takes derivatives of our own
        rows = [*per_block_segments(program, rates), *rows]
    return sorted(rows, key=lambda layout: layout.price)


def lowest(program: Program, layout: Layout) -> str:
    """The operation that sets a layout's peak, in words."""
    if not program.kernels or not layout.peak:
        return "what is reserved"
    operation = program.operation_of(layout.peak_location[0])
    return f"the backward pass of {operation.name} in {operation.path or 'the function'}"
