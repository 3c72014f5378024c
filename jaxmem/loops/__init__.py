"""Loops whose derivative makes its states again from a few that are kept."""

from jaxmem.loops.checkpointed import checkpointed_scan as checkpointed_scan
from jaxmem.loops.online import checkpointed_while as checkpointed_while
from jaxmem.loops.schedules import (
    IN_FLIGHT as IN_FLIGHT,
    Schedule as Schedule,
    cheapest as cheapest,
    on_host as on_host,
    repeats as repeats,
)
from jaxmem.loops.split import split_scan as split_scan
