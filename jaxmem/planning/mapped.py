"""A `jax.shard_map` in a plan: a program inside of a program, with plans of its own."""

import dataclasses

import numpy as np

from jaxmem.planning.layouts import Layout, Planner
from jaxmem.planning.options import LoopOption
from jaxmem.planning.regions import Loop

# Plans in a menu. Chosen: the bytes that are left go to a plan of their own (`cheapest_for_bytes`).
# At half and at twice tests/test_spread.py, test_answers.py and test_context.py pass.
_OPTIONS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class MappedOption(LoopOption):
    """One way to run what a `jax.shard_map` maps."""

    plans: "MappedPlans | None" = None

    def cheapest_for_bytes(self, room: int) -> LoopOption | None:
        """The plan for the lowest price that takes at most so many bytes."""
        assert self.plans is not None
        return self.plans.cheapest_option(int(room))


@dataclasses.dataclass(frozen=True)
class MappedPlans:
    """The plans of a `jax.shard_map`.

    Attributes:
        kernel: its number.
        planner: that of what one device runs; None: it is left as it is.
        more: bytes that its derivative takes beside those of a layout: of loops inside, layouts
            know less than is read of the derivative as JAX has it.
    """

    kernel: int
    planner: Planner | None
    more: int

    def cheapest_option(self, room: int) -> LoopOption | None:
        """The plan for the lowest price that takes at most so many bytes."""
        found = self.planner and self.planner.cheapest_for(room - self.more)
        return self.option(found) if found else None

    def option(self, layout: Layout) -> LoopOption:
        """A layout of what one device runs."""
        live, first = layout.live
        kept = min(live[max(first - 1, 0) : first + 1], default=0)
        return MappedOption(
            Loop(self.kernel, regions=layout.regions, whole=True, loops=layout.loops),
            kept,
            layout.peak - kept + self.more,
            layout.peak_location,
            layout.flops,
            layout.moved,
            layout.seconds,
            layout.price,
            plans=self,
        )


def mapped_options(
    planner: Planner | None, kernel: int, plain: Layout, derivative: LoopOption
) -> list[LoopOption]:
    """The menu of the `jax.shard_map` that is the kernel of that number: as it is, then from the
    lowest price to the fewest bytes. As it is, which is ``plain``, it has JAX's derivatives, of
    which ``derivative`` was read."""
    plans = MappedPlans(kernel, planner, max(derivative.bytes - plain.peak, 0))
    unchanged = dataclasses.replace(plans.option(plain), loop=None)
    if planner is None:
        return [unchanged]
    least = planner.cheapest_near_minimum()
    between = np.geomspace(max(plain.peak, 1), max(least.peak, 1), _OPTIONS)[1:-1]
    found = [planner.cheapest_for(int(budget)) for budget in between]
    layouts = [least, planner.plain, *planner.per_block_layouts(), *filter(None, found)]
    front: list[LoopOption] = [unchanged]
    for layout in sorted(layouts, key=lambda layout: (layout.price, layout.peak)):
        if layout.peak + plans.more < front[-1].bytes:
            front.append(plans.option(layout))
    return front
