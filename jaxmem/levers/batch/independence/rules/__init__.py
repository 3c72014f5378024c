"""What each operation makes of the examples, a family of operations a file.

An operation that has no rule here is not trusted.
"""

from jaxmem.levers.batch.independence.registry import INSIDE as INSIDE, RULES as RULES
from jaxmem.levers.batch.independence.rules import (
    along_axes as along_axes,
    attention as attention,
    contractions as contractions,
    control_flow as control_flow,
    derivatives as derivatives,
    elementwise as elementwise,
    gathers as gathers,
    shapes as shapes,
    updates as updates,
)
