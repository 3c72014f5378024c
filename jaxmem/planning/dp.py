"""The dp planner: the least recomputation within a budget, over nested regions and what they save.

Scans come with a menu (`planning.loops`), and so does a `jax.shard_map`; every place in it is a
variant of the program, which has plans of its own (`planning.variants`). What the best of them
leaves is spent (`planning.refining`).
"""

import dataclasses
import functools
from collections.abc import Sequence

from jaxmem.planning.layouts import Layout
from jaxmem.planning.loops import LoopWays, is_differentiated, loop_ways, plain_option
from jaxmem.planning.mapped import mapped_options
from jaxmem.planning.options import combine_menus
from jaxmem.planning.rates import Rates
from jaxmem.planning.refining import refined
from jaxmem.planning.variants import PEAK_TOLERANCE, Variant
from jaxmem.program import Program

# Times that a loop's bytes are fitted into what a plan leaves. Derived: the second try knows what
# is there beside the loop's residuals, where that takes more than the loop inside; with less room
# the residuals may grow, at the cost of what is inside, which takes one or two more.
_LOOP_FIT_ROUNDS = 4
# A program of more `jax.shard_map`s has no regions inside of them, but round them: it has small
# ones, such as the attention of each layer. Chosen: it bounds the time of planning. At half and at
# twice tests/test_spread.py, test_answers.py and test_context.py pass.
_MAX_SHARD_MAPS = 4


class DP:
    """The plans of one program, from no recomputation to the least memory."""

    def __init__(self, program: Program, rates: Rates, ways: Sequence[LoopWays] | None = None):
        """``ways`` are those to run each loop, where they are known."""
        self.program, self.rates = program, rates
        self.ways = ways or [
            _mapped(program, number, rates)
            if number in program.maps
            else loop_ways(program, number, rates)
            for number in program.loops
        ]
        menus = [one.menu(rates.host) for one in self.ways]
        self.variants = [Variant(program, rates, options) for options in combine_menus(menus)]
        self.plain = self.variants[0].layout(())

    def cheapest_for(self, budget: int) -> Layout | None:
        """The lowest price whose projected peak is at most ``budget`` bytes; None: nothing is. At
        the same price nothing waits in host memory."""
        if self.plain.peak <= budget:
            return self.plain
        planners = filter(None, [self._without_host, self])
        found = [layout for one in planners if (layout := one._cheapest_for(budget))]
        if not found:
            small = [layout for layout in self._small if layout.peak <= budget]
            for layout in sorted(small, key=lambda layout: layout.price)[:1]:
                of_it = (one for one in self.variants if one.loops == layout.loops)
                found = [self._spent(one, layout, budget) for one in of_it] or [layout]
        return min(found, key=lambda layout: layout.price, default=None)

    def _spent(self, variant: Variant, layout: Layout, budget: int) -> Layout:
        """A layout of a variant with the bytes spent that it leaves."""
        variant, layout = self._filled(variant, layout, budget)
        return refined(layout, budget, variant.layout, variant.blocks)

    @functools.cached_property
    def _without_host(self) -> "DP | None":
        """The plans with nothing in host memory: with more ways to run a loop fewer of each kind
        are looked at, and none must be lost by that."""
        if not self.rates.host or not self.program.loops:
            return None
        return DP(self.program, dataclasses.replace(self.rates, host=0.0), self.ways)

    def _cheapest_for(self, budget: int) -> Layout | None:
        found = None
        for variant in sorted(self.variants, key=lambda variant: variant.loops_price):
            if found and found[1].price <= variant.loops_price:
                break
            if variant.least > budget:
                continue
            layout = variant.cheapest_for(budget)
            if layout and (found is None or layout.price < found[1].price):
                found = variant, layout
        return self._spent(*found, budget) if found else None

    def _filled(self, variant: Variant, layout: Layout, budget: int) -> tuple[Variant, Layout]:
        """The variant and its layout with loops run as the bytes that it leaves allow."""
        for at in range(len(variant.options)):
            option = variant.options[at]
            room = option.bytes + budget - layout.peak
            for _ in range(_LOOP_FIT_ROUNDS):
                other = option.cheapest_for_bytes(room)
                if other is None or other.price >= option.price:
                    break
                options = [*variant.options[:at], other, *variant.options[at + 1 :]]
                filled = Variant(self.program, self.rates, options)
                found = filled.layout(layout.regions)
                if found.peak <= budget:
                    if found.price < layout.price:
                        variant, layout = filled, found
                    break
                # Beside what the loop keeps something else takes more than the loop inside.
                room = other.bytes - (found.peak - budget)
        return variant, layout

    def minimum_peak(self) -> Layout:
        """The least projected peak, at any price."""
        return min(self._small, key=lambda layout: layout.peak)

    def cheapest_near_minimum(self) -> Layout:
        """The least projected peak; of several about as low, the lowest price."""
        lowest = self.minimum_peak().peak
        return min(
            (layout for layout in self._small if layout.peak <= PEAK_TOLERANCE * lowest),
            key=lambda layout: layout.price,
        )

    @functools.cached_property
    def _small(self) -> list[Layout]:
        """What may have the least peak."""
        found = [self.plain, self.minimum_at_one_forward(), *self.per_block_layouts()]
        return [*found, *(variant.minimum_peak() for variant in self.variants)]

    def per_block_layouts(self) -> list[Layout]:
        """One region on each block, or on the body of each scan, or both, for each policy: what a
        plan must not lose to."""
        rows = [
            variant.per_block_layout(*one)
            for variant in self.variants
            for one in variant.per_block_choices
        ]
        return list(dict.fromkeys([*rows, *self._rows_of_bodies]))

    @functools.cached_property
    def _rows_of_bodies(self) -> list[Layout]:
        found = Variant.checkpointed(self.program, self.rates).values()
        variants = [variant for ways in found for variant in ways]
        return [
            *(variant.layout(()) for variant in variants),
            *(
                variant.per_block_layout(*one)
                for variant in variants
                for one in variant.per_block_choices
            ),
        ]

    def minimum_at_one_forward(self) -> Layout:
        """The least projected peak for at most one more forward pass: below that, memory is bought
        with recomputation that grows faster and faster."""
        forward = sum(self.variants[0].seconds)
        found = [self.plain, *self.per_block_layouts()]
        fast = (variant for variant in self.variants if variant.loops_seconds <= forward)
        found += [variant.smallest_in(forward) for variant in fast]
        return min(
            (layout for layout in found if layout.seconds <= forward),
            key=lambda layout: (layout.peak, layout.price),
        )


def _mapped(program: Program, number: int, rates: Rates) -> LoopWays:
    """Those of a `jax.shard_map`."""
    if not is_differentiated(program, number):
        return LoopWays([plain_option(program, number)])
    body, rates = program.body_of(number), dataclasses.replace(rates, host=0.0)
    plain = Variant.plain(body.as_written, rates).layout(())
    planner = DP(body, rates) if len(program.maps) <= _MAX_SHARD_MAPS else None
    return LoopWays(mapped_options(planner, number, plain, plain_option(program, number)))
