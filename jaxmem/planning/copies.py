"""How long a loop waits for copies of what it keeps in host memory.

Copies run beside the kernels, one after the other in each direction: there from when a value is
made until the iteration ends, and back from when the iteration's derivative begins until the value
is read. What is made late, or read early, is waited for. Compilers start no copy in one iteration
for the next.
"""

import itertools
import math
from collections.abc import Iterable, Sequence, Set

from jaxmem.planning.regions import Region
from jaxmem.program import Program

# The derivative of a kernel takes as long as two of it. Derived: two matmuls for one.
_BACKWARD = 2


def exposed_seconds(
    body: Program,
    seconds: Sequence[float],
    saved: Set[int],
    regions: Sequence[Region],
    offloaded: Sequence[int],
    bandwidth: float,
) -> float:
    """Seconds that one iteration waits, forward and backward.

    Args:
        body: an iteration.
        seconds: of each of its kernels.
        saved: the values that it keeps; what else its derivative reads is recomputed when it is.
        regions: in it, one of which begins when all that it reads is there.
        offloaded: those of them that wait in host memory.
        bandwidth: of the link to it, bytes per second.
    """
    ends = [0.0, *itertools.accumulate(seconds)]
    link = {value: body.sizes[value] / bandwidth for value in offloaded}
    sent = 0.0
    for value in sorted(offloaded, key=lambda value: body.made[value]):
        sent = max(sent, ends[body.made[value]]) + link[value]
    read = _first_read(body, ends, saved, regions)
    fetched = waited = 0.0
    for value in sorted(offloaded, key=lambda value: read[value]):
        fetched += link[value]
        waited += max(fetched - read[value] - waited, 0.0)
    return max(sent - ends[-1], 0.0) + waited


def _first_read(
    body: Program, ends: Sequence[float], saved: Set[int], regions: Sequence[Region]
) -> list[float]:
    """For each value when the derivative of an iteration first reads it, in seconds from its
    beginning: itself, or to make another again."""
    read = [math.inf] * len(body.sizes)

    def needed(values: Iterable[int], when: float) -> None:
        for value in values:
            read[value] = min(read[value], when)

    begun = {region.stop: region for region in regions}
    for number in reversed(range(len(body.kernels))):
        kernel = body.kernels[number]
        begins = _BACKWARD * (ends[-1] - ends[number + 1])
        if region := begun.get(number + 1):
            for inside in body.kernels[region.start : region.stop]:
                needed(inside.sources, begins)
        needed(kernel.reads, begins)
        again = min((read[one] for one in kernel.results if one not in saved), default=math.inf)
        needed(kernel.sources, again)
    return read
