"""What the recomputation of a region waits for.

That of a region in another waits for what it reads, if that is there in any case. The backward
passes of regions that are made of nothing of each other come one after the other: two batches go
through one network, a coarse network and a fine one each have a loss, two towers are compared. The
backward pass of one part needs nothing of the other's. Projections have the last part first, as
JAX's backward pass goes. XLA makes both again side by side, and holds what both take.
"""

import itertools
from collections.abc import Iterator, Mapping, Set
from typing import Any

from jaxmem import jaxprs
from jaxmem.planning import Region
from jaxmem.program import Kernel, Program


def sequence_recomputation(
    program: Program, before: Region, region: Region, values: dict[int, Any]
) -> None:
    """Has what is made again for a region wait for the backward pass of the next region, if that
    gives it no cotangent: cotangents of what is made of its results wait for those of what the next
    region reads. ``values`` are those that are there where that begins, by number."""

    def derived(start: int, stop: int) -> Iterator[tuple[set[int], Kernel]]:
        """Kernels, each with those of its sources that have cotangents of it."""
        for number in range(start, stop):
            edges = program.cotangent_edges[number].edges
            yield {edge.value for edge in edges}, program.kernels[number]

    under = {value for _, one in derived(before.start, before.stop) for value in one.results}
    for sources, kernel in derived(before.stop, region.start):
        if not under.isdisjoint(sources):
            under.update(kernel.results)
    reads = set[int]().union(*(sources for sources, _ in derived(region.start, region.stop)))
    if not under.isdisjoint(reads):
        return
    wait = [
        value
        for value in sorted(under)
        if value in values and program.active[value] and program.last_used[value] > region.start
    ]
    for one, other in itertools.product(wait, [v for v in sorted(reads) if v in values]):
        values[one], values[other] = jaxprs.order_cotangent_after(values[one], values[other])


def is_expensive(
    program: Program, value: int, region: Region, recomputed: Mapping[Region, Set[int]]
) -> bool:
    """Whether a region's recomputation runs a matmul or a convolution more to have a value, or has
    something in memory until then that nothing else reads, its own derivatives and the
    recomputation of regions inside it among these. ``recomputed`` are the kernels that each runs
    again."""
    wanted, needed = {value}, set(range(program.input_count))
    pending = [region]
    while pending:
        one = pending.pop()
        pending.extend(one.regions)
        needed.update(*(program.kernels[number].sources for number in recomputed[one]))
    for number in reversed(range(region.start, region.stop)):
        kernel = program.kernels[number]
        needed.update(kernel.reads)
        if not wanted.isdisjoint(made := set(kernel.results).difference(region.saved)):
            if kernel.flops and number not in recomputed[region]:
                return True
            wanted = (wanted - made).union(kernel.sources)
    return not wanted <= needed
