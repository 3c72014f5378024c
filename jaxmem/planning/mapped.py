"""A `jax.shard_map` in a plan: a program inside of a program, with plans of its own."""

import dataclasses

import numpy as np

from jaxmem.planning.layouts import Layout, Planner
from jaxmem.planning.options import LoopOption
from jaxmem.planning.regions import Loop

# Plans in a menu. Chosen: the bytes that are left go to a plan of their own (`with_room`).
_OPTIONS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class MappedOption(LoopOption):
    """One way to run what a `jax.shard_map` maps."""

    planner: Planner | None = None
    kernel: int = -1

    def with_room(self, room: int) -> LoopOption | None:
        """The plan for the lowest price that takes at most so many bytes."""
        if self.planner is None:
            return None
        found = self.planner.cheapest_within(int(room))
        return _option(self.planner, found, self.kernel) if found else None


def mapped_options(planner: Planner | None, kernel: int, plain: Layout) -> list[LoopOption]:
    """The menu of the `jax.shard_map` that is the kernel of that number: as it is, then from the
    lowest price to the fewest bytes. As it is, which is ``plain``, it has JAX's derivatives."""
    as_it_is = dataclasses.replace(_option(planner, plain, kernel), loop=None)
    if planner is None:
        return [as_it_is]
    least = planner.smallest()
    between = np.geomspace(max(plain.peak, 1), max(least.peak, 1), _OPTIONS)[1:-1]
    found = [planner.cheapest_within(int(budget)) for budget in between]
    layouts = [least, planner.plain, *planner.rows(), *filter(None, found)]
    front: list[LoopOption] = [as_it_is]
    for layout in sorted(layouts, key=lambda layout: (layout.price, layout.peak)):
        if layout.peak < front[-1].bytes:
            front.append(_option(planner, layout, kernel))
    return front


def _option(planner: Planner | None, layout: Layout, kernel: int) -> MappedOption:
    live, first = layout.live()
    kept = min(live[max(first - 1, 0) : first + 1], default=0)
    loop = Loop(kernel, regions=layout.regions, whole=True, loops=layout.loops)
    return MappedOption(
        loop,
        kept,
        layout.peak - kept,
        layout.place,
        layout.flops,
        layout.moved,
        layout.seconds,
        layout.price,
        planner=planner,
        kernel=kernel,
    )
