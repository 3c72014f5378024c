"""From a program and a budget to regions: pure arithmetic, no JAX."""

from jaxmem.planning.layouts import Layout as Layout, Segment as Segment
from jaxmem.planning.loops import LoopOption as LoopOption, loop_options as loop_options
from jaxmem.planning.named_counts import marginal_savings as marginal_savings
from jaxmem.planning.named_places import RegionProgram as RegionProgram
from jaxmem.planning.names import (
    MOST as MOST,
    NamedChoice as NamedChoice,
    Names as Names,
    spans_of_blocks as spans_of_blocks,
    worth_most as worth_most,
)
from jaxmem.planning.rates import (
    ARITHMETIC_WEIGHT as ARITHMETIC_WEIGHT,
    Rates as Rates,
    of_each as of_each,
    sums_seconds as sums_seconds,
)
from jaxmem.planning.regions import (
    LeadingIterations as LeadingIterations,
    Loop as Loop,
    Region as Region,
    as_emitted as as_emitted,
    locate as locate,
    loops_as_emitted as loops_as_emitted,
    saved_by as saved_by,
)
from jaxmem.planning.registry import (
    PLANNERS as PLANNERS,
    Planner as Planner,
    lowest as lowest,
    per_block_layouts as per_block_layouts,
)
from jaxmem.planning.simulation import (
    recomputed as recomputed,
    simulate as simulate,
    simulate_block as simulate_block,
)
from jaxmem.planning.usual_policies import baseline_policies as baseline_policies
from jaxmem.planning.variants import Variant as Variant
