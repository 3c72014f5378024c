"""Loops whose derivative makes its states again from a few that are kept."""

from jaxmem.loops.checkpointed import checkpointed_scan as checkpointed_scan
from jaxmem.loops.schedules import Schedule as Schedule, cheapest as cheapest
