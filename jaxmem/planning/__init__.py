"""From a program and a budget to a plan: pure arithmetic, no JAX."""

from jaxmem.planning._plan import Plan as Plan, Region as Region
from jaxmem.planning._sqrt import plan_sqrt as plan_sqrt
