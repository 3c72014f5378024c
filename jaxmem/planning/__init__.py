"""From a program and a budget to regions: pure arithmetic, no JAX."""

from jaxmem.planning.dp import Variant as Variant
from jaxmem.planning.layouts import Layout as Layout, Segment as Segment
from jaxmem.planning.loops import LoopOption as LoopOption, loop_options as loop_options
from jaxmem.planning.named_counts import spared_alone as spared_alone
from jaxmem.planning.named_places import Place as Place
from jaxmem.planning.names import (
    MOST as MOST,
    NamedChoice as NamedChoice,
    Names as Names,
    spans_of_blocks as spans_of_blocks,
    worth_most as worth_most,
)
from jaxmem.planning.rates import (
    DEAR as DEAR,
    Rates as Rates,
    of_each as of_each,
    sums_seconds as sums_seconds,
)
from jaxmem.planning.regions import (
    Head as Head,
    Loop as Loop,
    Region as Region,
    as_emitted as as_emitted,
    loops_as_emitted as loops_as_emitted,
    place_of as place_of,
    saved_by as saved_by,
)
from jaxmem.planning.registry import (
    PLANNERS as PLANNERS,
    Planner as Planner,
    lowest as lowest,
    rows_to_compile as rows_to_compile,
)
from jaxmem.planning.simulation import (
    recomputed as recomputed,
    simulate as simulate,
    simulate_block as simulate_block,
)
from jaxmem.planning.usual_policies import one_liners as one_liners
