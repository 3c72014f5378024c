"""What each operation makes of the examples, a family of operations a file.

An operation that has no rule here is not trusted.
"""

from jaxmem._independence.registry import INSIDE as INSIDE, RULES as RULES
from jaxmem._independence.rules import (
    along_axes as along_axes,
    contractions as contractions,
    control_flow as control_flow,
    derivatives as derivatives,
    elementwise as elementwise,
    gathers as gathers,
    shapes as shapes,
    updates as updates,
)
