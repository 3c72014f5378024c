"""From a function and a budget to a planned function."""

from jaxmem.rematerialization.constraints import Constraints as Constraints
from jaxmem.rematerialization.frontier import Frontier as Frontier, pareto as pareto
from jaxmem.rematerialization.plan import COMPILER_OPTIONS as COMPILER_OPTIONS, Plan as Plan
from jaxmem.rematerialization.plan_text import checked as checked
from jaxmem.rematerialization.policies import remat_policy as remat_policy
from jaxmem.rematerialization.search import Outcome as Outcome, Search as Search
from jaxmem.rematerialization.traced import TracedFunction as TracedFunction
from jaxmem.rematerialization.transform import remat as remat
