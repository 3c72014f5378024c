"""Loops whose derivative makes its states again from a few that are kept."""

from jaxmem.loops.checkpointed import checkpointed_scan as checkpointed_scan
from jaxmem.loops.online import checkpointed_while as checkpointed_while
from jaxmem.loops.schedules import (
    Schedule as Schedule,
    cheapest as cheapest,
    repeats as repeats,
)
