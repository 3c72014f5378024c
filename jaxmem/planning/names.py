"""Which names to save where regions stay where the user has them: all choices, and the best.

Regions say what is recomputed, and a policy says by name what of it is saved or waits in host
memory. Of n names there are 2^n sets that are saved, and which kernels run again depends on the
whole set: a value that nothing reads any more need not be made, nor what it alone is made from. All
sets are counted at once, as arrays with an entry a set; up to `MOST` names that takes seconds.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from jaxmem.planning.named_counts import cost_tables, marginal_savings
from jaxmem.planning.named_places import RegionProgram, projected_peak
from jaxmem.planning.per_block import Spans, block_partitions
from jaxmem.planning.rates import Rates, of_each, waiting_weight
from jaxmem.program import Program

_Name = TypeVar("_Name")

# Names whose sets are all counted: a million sets, some seconds. Chosen; one more takes twice the
# time, and half as many names leave most choices of a model to groups of names.
MOST = 20
# Of the time of a pass: how much of it copies to and from the host run beside. Chosen: names say
# nothing of when a value is made and read (`planning.copies` does, of plans). Half changes no
# choice in tests/test_names.py, twice changes one.
_OVERLAP = 0.5
# Budgets at which a front with host memory is known. Chosen: at half and at twice
# tests/test_names.py passes.
_GOALS = 64
# Seconds: sets this near in price are one, and the fewer bytes decide. Chosen, a thousandth of the
# time that a kernel takes to start. At half and at twice tests/test_names.py passes.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class NamedChoice:
    """What to do with each name: by number the ones ``saved`` on the device and those ``offloaded``
    to the host; the others are recomputed. What that costs: seconds and FLOPs of recomputation (and
    of copies that nothing hides), the price by which choices are compared, bytes on the device
    beyond the program's inputs, outputs and gradients, and bytes in host memory."""

    saved: frozenset[int]
    offloaded: frozenset[int] = frozenset()
    seconds: float = 0.0
    price: float = 0.0
    flops: int = 0
    bytes: int = 0
    host: int = 0


class Names:
    """All choices over the names of a program. Sets are numbers whose bits are the names.

    Args:
        root: the program and its regions.
        count: of the names.
        rates: of the target; with a link to the host names in scans may wait there.
        fixed: by number, names whose choice is given: "save", "offload" or "recompute".
    """

    def __init__(
        self, root: RegionProgram, count: int, rates: Rates, fixed: Mapping[int, str] | None = None
    ):
        if count > MOST:
            raise ValueError(f"{count} names; at most {MOST} are counted")
        self.root, self.count, self.rates, self.fixed = root, count, rates, fixed or {}
        self.tables = cost_tables(root, count, rates)
        none = int(self.tables.kept[0] + self.tables.inside[0])
        base = self.projected(frozenset()) - none
        self.forced = sum(1 << name for name, how in self.fixed.items() if how == "offload")
        self._on_host = sum(self.sizes[name] for name in _names(self.forced))
        # Projected bytes by set, beyond inputs, outputs and gradients.
        self.bytes = base - self._on_host + self.tables.kept + self.tables.inside
        self.allowed = np.ones(2**count, bool)
        for name, how in self.fixed.items():
            self.allowed &= self._contains(name) == (how != "recompute")

    def projected(self, saved: frozenset[int]) -> int:
        """Bytes beyond inputs, outputs and gradients by the layout of the whole step, with some
        names saved on the device: slower, and what all other counts rest on."""
        return projected_peak(self.root, saved)

    @functools.cache  # noqa: B019 (this lives as long as the call that made it)
    def projected_of(self, choice: NamedChoice) -> int:
        """`projected`, of a choice."""
        return self.projected(choice.saved | choice.offloaded) - choice.host

    def best_for(self, budget: float | None) -> NamedChoice:
        """Of the `front` the lowest price whose layout takes at most so many bytes; where none
        does, and without a budget, the one of the fewest."""
        fits = (
            one for one in self.front if budget is not None and self.projected_of(one) <= budget
        )
        return next(fits, None) or min(self.front, key=self.projected_of)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The bytes of each name in a step, were they all kept."""
        found = [0] * self.count
        for place, times in self.root.all():
            for name, values in enumerate(place.groups):
                found[name] += times * sum(place.program.sizes[value] for value in values)
        return found

    def choice(self, number: int, offloaded: int = 0) -> NamedChoice:
        """The choice that a set is, with some of it in host memory."""
        tables, offloaded = self.tables, offloaded | self.forced
        host = sum(self.sizes[name] for name in _names(offloaded))
        exposed = float(self._unhidden_copy_seconds(host, tables.seconds[number]))
        return NamedChoice(
            frozenset(_names(number & ~offloaded)),
            frozenset(_names(offloaded)),
            float(tables.seconds[number]) + exposed,
            float(tables.price[number]) + self.waiting * exposed,
            int(tables.flops[number]),
            int(self.bytes[number]) + self._on_host - host,
            host,
        )

    def cheapest_for(self, budget: float) -> NamedChoice | None:
        """The lowest price whose projected bytes are at most so many; None: nothing is."""
        fits = self.allowed & (self.bytes <= budget)
        best = self.choice(self._cheapest_set(fits)) if fits.any() else None
        return self._with_host(budget, best) if self.rates.host else best

    def smallest(self) -> NamedChoice:
        """The fewest projected bytes on the device; of several the lowest price."""
        sizes = np.where(self.allowed, self.bytes, np.inf)
        offloads = self._complete_sets & self.allowed
        sizes[offloads] -= self._bytes_of(self._hostable)[offloads]
        number = self._cheapest_set(sizes <= sizes.min())
        hostable = sum(1 << name for name in self._hostable)
        return self.choice(number, number & hostable if offloads[number] else 0)

    @functools.cached_property
    def front(self) -> list[NamedChoice]:
        """Choices of which none is better in both price and bytes, the lowest price first; with a
        link to the host those at some bytes alone."""
        found = self.front_without(())
        if not self.rates.host:
            return found
        low, high = self.smallest(), found[0]
        goals = np.linspace(low.bytes, high.bytes, _GOALS)
        more = filter(None, map(self.cheapest_for, goals))
        front: list[NamedChoice] = []
        for one in sorted({*found, low, *more}, key=lambda one: (one.price, one.bytes)):
            if not front or one.bytes < front[-1].bytes:
                front.append(one)
        return front

    def front_without(self, others: Iterable[NamedChoice]) -> list[NamedChoice]:
        """The `front` of the sets that are left without those of some choices, none of them in host
        memory but what is fixed to be there."""
        allowed = self.allowed.copy()
        allowed[[sum(1 << name for name in one.saved | one.offloaded) for one in others]] = False
        order = self._order[allowed[self._order]]
        sizes = self.bytes[order]
        before = np.concatenate([[np.inf], np.minimum.accumulate(sizes)[:-1]])
        return [self.choice(int(number)) for number in order[sizes < before]]

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """The sets by price, of equal ones the fewest bytes first, and then the fewest names."""
        return np.lexsort((self._set_sizes, self.bytes, np.round(self.tables.price / _EQUAL)))

    def _contains(self, name: int) -> np.ndarray:
        """By set whether a name is in it."""
        return ((np.arange(2**self.count) >> name) & 1).astype(bool)

    def _bytes_of(self, names: Iterable[int]) -> np.ndarray:
        """By set the bytes of those of some names that are in it."""
        return sum(
            (self._contains(name) * self.sizes[name] for name in names), np.zeros(2**self.count)
        )

    @functools.cached_property
    def _complete_sets(self) -> np.ndarray:
        """The sets all of whose bytes are read: of the others there is one without what is not."""
        return self.tables.named == self._bytes_of(range(self.count))

    @functools.cached_property
    def _set_sizes(self) -> np.ndarray:
        """By set how many names it has."""
        return sum(
            (self._contains(name) for name in range(self.count)), np.zeros(2**self.count, int)
        )

    def _cheapest_set(self, wanted: np.ndarray) -> int:
        """The set of the lowest price among some, of several that of the fewest bytes, and then of
        the fewest names."""
        numbers = np.flatnonzero(wanted)
        for table, near in ((self.tables.price, _EQUAL), (self.bytes, 0), (self._set_sizes, 0)):
            values = table[numbers]
            numbers = numbers[values <= values.min() + near]
        return int(numbers[0])

    def _unhidden_copy_seconds(
        self, host: float | np.ndarray, seconds: float | np.ndarray
    ) -> np.ndarray:
        """Seconds of copies to the host and back that nothing hides: beside the forward pass, and
        beside the backward pass with its recomputation."""
        if not self.rates.host:
            return np.zeros_like(np.asarray(seconds, float))
        link = np.asarray(host) / self.rates.host
        compute = (self._forward, 2 * self._forward + seconds)
        return sum((np.maximum(link - _OVERLAP * time, 0.0) for time in compute), np.zeros(()))

    @functools.cached_property
    def waiting(self) -> float:
        """What a second of waiting for copies counts: as one of what names spare, all together."""
        return waiting_weight(float(self.tables.seconds[0]), float(self.tables.price[0]))

    @functools.cached_property
    def _forward(self) -> float:
        """Seconds of the loops' iterations, beside which copies run."""
        return sum(
            times * sum(of_each(place.program, self.rates.seconds))
            for place, times in itertools.islice(self.root.all(), 1, None)
        )

    @functools.cached_property
    def _hostable(self) -> tuple[int, ...]:
        """The names that are in scans alone: what else a policy sends to the host, XLA brings back
        at once."""
        if not self.rates.host:
            return ()
        return tuple(
            name
            for name in range(self.count)
            if self.sizes[name] and not self.root.groups[name] and name not in self.fixed
        )

    def _sums(self, names: Sequence[int]) -> dict[int, int]:
        """The bytes that some of these names have together, and for each such number the names."""
        found = {0: 0}
        for name in names:
            for size, chosen in list(found.items()):
                found.setdefault(size + self.sizes[name], chosen | 1 << name)
        return found

    def _with_host(self, budget: float, best: NamedChoice | None) -> NamedChoice | None:
        """The lowest price where names may wait in host memory: sets by the least that each can
        cost, until that is more than what is found."""
        tables = self.tables
        hostable = sum(1 << name for name in self._hostable)
        short = np.maximum(self.bytes - budget, 0)
        able = (
            self.allowed
            & self._complete_sets
            & (short > 0)
            & (short <= self._bytes_of(self._hostable))
        )
        exposed = self._unhidden_copy_seconds(short + self._on_host, tables.seconds)
        least = tables.price + self.waiting * exposed
        order = np.flatnonzero(able)
        for number in order[np.argsort(least[order], kind="stable")]:
            if best is not None and least[number] >= best.price - _EQUAL:
                break
            sums = self._sums(_names(int(number) & hostable))
            enough = [size for size in sums if size >= short[number]]
            if enough:
                found = self.choice(int(number), sums[min(enough)])
                if best is None or found.price < best.price:
                    best = found
        return best


def worth_most(
    names: Sequence[_Name],
    program_with: Callable[[Sequence[_Name]], RegionProgram],
    rates: Rates,
    first: Collection[_Name] = (),
) -> list[_Name]:
    """At most `MOST` of some names, in their order: those that alone spare the most time, the
    ``first`` before all others. ``program_with`` is the program with the values that names mark."""
    if len(names) <= MOST:
        return list(names)
    spared = marginal_savings(program_with(names), len(names), rates)
    ranked = sorted(range(len(names)), key=lambda at: (names[at] not in first, -spared[at]))
    return [names[at] for at in sorted(ranked[:MOST])]


def spans_of_blocks(program: Program, rates: Rates) -> Spans:
    """The blocks of a program without regions, where its author would place them; empty: nothing
    repeats."""
    prices = of_each(program, rates.price)
    found = block_partitions(program, prices)
    return max(found, key=lambda spans: sum(sum(prices[a:b]) for a, b in spans), default=())


def _names(number: int) -> list[int]:
    return [name for name in range(number.bit_length()) if number >> name & 1]
