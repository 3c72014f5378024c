"""From a function and a budget to a planned function."""

from jaxmem.rematerialization.bounds import Bound as Bound
from jaxmem.rematerialization.choices import Choice as Choice, Row as Row
from jaxmem.rematerialization.constraints import Constraints as Constraints
from jaxmem.rematerialization.corrections import FIRST_ERROR as FIRST_ERROR, Outcome as Outcome
from jaxmem.rematerialization.frontier import Frontier as Frontier, pareto as pareto
from jaxmem.rematerialization.limits import Limits as Limits
from jaxmem.rematerialization.named.policy import (
    BuiltIn as BuiltIn,
    NamedPolicy as NamedPolicy,
)
from jaxmem.rematerialization.named.shaped import (
    Saved as Saved,
    ShapedPolicy as ShapedPolicy,
)
from jaxmem.rematerialization.named.suggesting import suggest_names as suggest_names
from jaxmem.rematerialization.named.suggestions import (
    Suggestion as Suggestion,
    Suggestions as Suggestions,
)
from jaxmem.rematerialization.own_regions import (
    WithOwnRegions as WithOwnRegions,
    own_regions_cost as own_regions_cost,
)
from jaxmem.rematerialization.plan import Plan as Plan
from jaxmem.rematerialization.plan_compiler import is_offloaded as is_offloaded
from jaxmem.rematerialization.plan_facts import (
    Compiled as Compiled,
    OwnRegions as OwnRegions,
    PlannedFor as PlannedFor,
    Predicted as Predicted,
    Written as Written,
)
from jaxmem.rematerialization.plan_text import time_error_text as time_error_text
from jaxmem.rematerialization.policies import remat_policy as remat_policy
from jaxmem.rematerialization.search import (
    ALTERNATIVE as ALTERNATIVE,
    MAX_OVERPROJECTION as MAX_OVERPROJECTION,
    MAX_PLAIN_OVERPROJECTION as MAX_PLAIN_OVERPROJECTION,
    PendingCompilation as PendingCompilation,
    Search as Search,
)
from jaxmem.rematerialization.timelines import PlanTimeline as PlanTimeline
from jaxmem.rematerialization.traced import TracedFunction as TracedFunction
from jaxmem.rematerialization.transform import remat as remat
