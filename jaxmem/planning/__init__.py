"""From a program and a budget to a plan: pure arithmetic, no JAX."""

from jaxmem.planning.dp import Layout as Layout
from jaxmem.planning.one_liners import one_liners as one_liners
from jaxmem.planning.plan import (
    COMPILER_OPTIONS as COMPILER_OPTIONS,
    Choice as Choice,
    Loop as Loop,
    Plan as Plan,
    Region as Region,
    Row as Row,
    checked as checked,
)
from jaxmem.planning.rates import Rates as Rates
from jaxmem.planning.registry import (
    PLANNERS as PLANNERS,
    Planner as Planner,
    lowest as lowest,
    write_plan as write_plan,
)
from jaxmem.planning.simulate import recomputed as recomputed, simulate as simulate
