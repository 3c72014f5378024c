"""Which names to save where regions stay where the user has them: all choices, and the best.

Regions say what is recomputed, and a policy says by name what of it is saved or waits in host
memory. Of n names there are 2^n sets that are saved, and which kernels run again depends on the
whole set: a value that nothing reads any more need not be made, nor what it alone is made from. All
sets are counted at once, as arrays with an entry a set; up to `MOST` names that takes seconds.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxmem.planning.rates import DEAR, Rates, of_each
from jaxmem.planning.regions import Region
from jaxmem.planning.rows import Spans, tilings
from jaxmem.planning.simulate import simulate, simulate_block
from jaxmem.program import Program

MOST = 20  # names whose sets are all counted: a million sets, some seconds
_CHUNK = 2**16  # sets at a time: what is counted of them fits a processor's cache
# Of the time of a loop: how much of it copies to and from the host may run beside, as in `loops`.
_OVERLAP = 0.5
_GOALS = 64  # budgets at which a front with host memory is known
_EQUAL = 1e-9  # seconds; sets this near in price are one, and the fewer bytes decide


@dataclasses.dataclass(frozen=True)
class Place:
    """A program with regions, the whole or the body of a scan in it.

    Attributes:
        program: its kernels.
        spans: first and last kernel (which is not in it) of each region.
        groups: for each name the values that it marks here.
        length: how often it runs for once of what is around it.
        carry: inputs that one turn hands to the next: each turn's are kept.
        scans: by number of the kernel, scans outside of the regions that have regions inside.
    """

    program: Program
    spans: tuple[tuple[int, int], ...]
    groups: tuple[frozenset[int], ...]
    length: int = 1
    carry: frozenset[int] = frozenset()
    scans: Mapping[int, "Place"] = dataclasses.field(default_factory=dict)

    def all(self, times: int = 1) -> Iterator[tuple["Place", int]]:
        """This one and all inside, with how often each runs in a step."""
        yield self, times * self.length
        for scan in self.scans.values():
            yield from scan.all(times * self.length)


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


@dataclasses.dataclass(slots=True)
class _Tables:
    """By set of names: seconds, price and FLOPs of recomputation, bytes kept for the backward pass,
    those of them that names hold, and the most bytes that one region makes again at once."""

    seconds: np.ndarray
    price: np.ndarray
    flops: np.ndarray
    kept: np.ndarray
    named: np.ndarray
    inside: np.ndarray

    @classmethod
    def zeros(cls, count: int) -> "_Tables":
        return cls(*(np.zeros(count) for _ in dataclasses.fields(cls)))


class Names:
    """All choices over the names of a program. Sets are numbers whose bits are the names.

    Args:
        root: the program and its regions.
        count: of the names.
        rates: of the target; with a link to the host names in scans may wait there.
        fixed: by number, names whose choice is given: "save", "offload" or "recompute".
    """

    def __init__(
        self, root: Place, count: int, rates: Rates, fixed: Mapping[int, str] | None = None
    ):
        if count > MOST:
            raise ValueError(f"{count} names; at most {MOST} are counted")
        self.root, self.count, self.rates, self.fixed = root, count, rates, fixed or {}
        self.tables = self._counted()
        counted = int(self.tables.kept[0] + self.tables.inside[0])
        base = self.projected(frozenset()) - counted
        self.forced = sum(1 << name for name, how in self.fixed.items() if how == "offload")
        self._on_host = sum(self.sizes[name] for name in _names(self.forced))
        # Projected bytes by set, beyond inputs, outputs and gradients.
        self.bytes = base - self._on_host + self.tables.kept + self.tables.inside
        self.allowed = np.ones(2**count, bool)
        for name, how in self.fixed.items():
            self.allowed &= self._has(name) == (how != "recompute")

    def projected(self, saved: frozenset[int]) -> int:
        """Bytes beyond inputs, outputs and gradients by the layout of the whole step, with some
        names saved on the device: slower, and what all other counts rest on."""
        return _laid_out(self.root, saved)

    @functools.cache  # noqa: B019 (this lives as long as the call that made it)
    def laid_out(self, choice: NamedChoice) -> int:
        """`projected`, of a choice."""
        return self.projected(choice.saved | choice.offloaded) - choice.host

    def laid_out_within(self, budget: float) -> NamedChoice:
        """Of the `front` the lowest price whose layout takes at most so many bytes; where none
        does, the one of the fewest."""
        fits = (one for one in self.front if self.laid_out(one) <= budget)
        return next(fits, None) or min(self.front, key=self.laid_out)

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
        exposed = float(self._exposed(host, tables.seconds[number]))
        return NamedChoice(
            frozenset(_names(number & ~offloaded)),
            frozenset(_names(offloaded)),
            float(tables.seconds[number]) + exposed,
            float(tables.price[number]) + DEAR * exposed,
            int(tables.flops[number]),
            int(self.bytes[number]) + self._on_host - host,
            host,
        )

    def cheapest_within(self, budget: float) -> NamedChoice | None:
        """The lowest price whose projected bytes are at most so many; None: nothing is."""
        fits = self.allowed & (self.bytes <= budget)
        best = self.choice(self._least(fits)) if fits.any() else None
        return self._with_host(budget, best) if self.rates.host else best

    def smallest(self) -> NamedChoice:
        """The fewest projected bytes on the device; of several the lowest price."""
        sizes = np.where(self.allowed, self.bytes, np.inf)
        away = self._whole & self.allowed
        sizes[away] -= self._total(self._hostable)[away]
        number = self._least(sizes <= sizes.min())
        hostable = sum(1 << name for name in self._hostable)
        return self.choice(number, number & hostable if away[number] else 0)

    @functools.cached_property
    def front(self) -> list[NamedChoice]:
        """Choices of which none is better in both price and bytes, the lowest price first; with a
        link to the host those at some bytes alone."""
        found = self.front_without(())
        if not self.rates.host:
            return found
        low, high = self.smallest(), found[0]
        goals = np.linspace(low.bytes, high.bytes, _GOALS)
        more = filter(None, map(self.cheapest_within, goals))
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
        return np.lexsort((self._many, self.bytes, np.round(self.tables.price / _EQUAL)))

    def _has(self, name: int) -> np.ndarray:
        """By set whether a name is in it."""
        return ((np.arange(2**self.count) >> name) & 1).astype(bool)

    def _total(self, names: Iterable[int]) -> np.ndarray:
        """By set the bytes of those of some names that are in it."""
        return sum((self._has(name) * self.sizes[name] for name in names), np.zeros(2**self.count))

    @functools.cached_property
    def _whole(self) -> np.ndarray:
        """The sets all of whose bytes are read: of the others there is one without what is not."""
        return self.tables.named == self._total(range(self.count))

    @functools.cached_property
    def _many(self) -> np.ndarray:
        """By set how many names it has."""
        return sum((self._has(name) for name in range(self.count)), np.zeros(2**self.count, int))

    def _least(self, wanted: np.ndarray) -> int:
        """The set of the lowest price among some, of several that of the fewest bytes, and then of
        the fewest names."""
        numbers = np.flatnonzero(wanted)
        for table, near in ((self.tables.price, _EQUAL), (self.bytes, 0), (self._many, 0)):
            values = table[numbers]
            numbers = numbers[values <= values.min() + near]
        return int(numbers[0])

    def _exposed(self, host: float | np.ndarray, seconds: float | np.ndarray) -> np.ndarray:
        """Seconds of copies to the host and back that nothing hides: beside the forward pass, and
        beside the backward pass with its recomputation."""
        if not self.rates.host:
            return np.zeros_like(np.asarray(seconds, float))
        link = np.asarray(host) / self.rates.host
        beside = (self._forward, 2 * self._forward + seconds)
        return sum((np.maximum(link - _OVERLAP * time, 0.0) for time in beside), np.zeros(()))

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
            for size, held in list(found.items()):
                found.setdefault(size + self.sizes[name], held | 1 << name)
        return found

    def _with_host(self, budget: float, best: NamedChoice | None) -> NamedChoice | None:
        """The lowest price where names may wait in host memory: sets by the least that each can
        cost, until that is more than what is found."""
        tables = self.tables
        hostable = sum(1 << name for name in self._hostable)
        short = np.maximum(self.bytes - budget, 0)
        able = self.allowed & self._whole & (short > 0) & (short <= self._total(self._hostable))
        exposed = self._exposed(short + self._on_host, tables.seconds)
        least = tables.price + DEAR * exposed
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

    def _counted(self) -> _Tables:
        tables = _Tables.zeros(2**self.count)
        for start in range(0, 2**self.count, _CHUNK):
            part = slice(start, min(start + _CHUNK, 2**self.count))
            numbers = np.arange(part.start, part.stop)
            bits = [((numbers >> name) & 1).astype(bool) for name in range(self.count)]
            view = _Tables(
                *(getattr(tables, field.name)[part] for field in dataclasses.fields(tables))
            )
            for place, times in self.root.all():
                _Counting(place, times, self.rates, bits, view).run()
        return tables


def spared_alone(root: Place, count: int, rates: Rates) -> list[float]:
    """For each of any number of names the seconds of recomputation that it spares if it alone is
    saved."""
    tables = _Tables.zeros(count + 1)
    bits = [np.arange(count + 1) == name + 1 for name in range(count)]
    for place, times in root.all():
        _Counting(place, times, rates, bits, tables).run()
    return [float(tables.seconds[0] - seconds) for seconds in tables.seconds[1:]]


class _Counting:
    """Counts what sets of names cost in one place, and adds it to tables."""

    def __init__(self, place: Place, times: int, rates: Rates, bits, tables: _Tables):
        self.place, self.times, self.tables, self.bits = place, times, tables, bits
        self.program = program = place.program
        self.seconds = of_each(program, rates.seconds)
        self.prices = of_each(program, rates.price)
        self.names = {value: name for name, values in enumerate(place.groups) for value in values}
        self.never = np.zeros(len(tables.price), bool)
        self.always = ~self.never
        # Sets for which a value is kept for the backward pass: made outside of the region that
        # reads it.
        self.kept: dict[int, np.ndarray] = {}

    def run(self) -> None:
        program, stop = self.program, len(self.program.kernels)
        for start, end in reversed(self.place.spans):
            for number in reversed(range(end, stop)):
                self.plain(number)
            self.region(start, end)
            stop = start
        for number in reversed(range(stop)):
            self.plain(number)
        inputs = (value for value in self.kept if value in self.place.carry)
        for value in inputs:
            self.tables.kept += self.times * program.sizes[value] * self.kept[value]

    def plain(self, number: int) -> None:
        """A kernel outside of all regions: what its derivative reads is kept."""
        kernel = self.program.kernels[number]
        if any(self.program.active[value] for value in kernel.results):
            for value in kernel.reads:
                self.keep(value, self.always)
        if number in self.place.scans and kernel.residuals is not None:
            self.kept.pop(kernel.residuals, None)  # its turns are counted by themselves
        for value in kernel.results:
            self.settle(value)

    def keep(self, value: int, when: np.ndarray) -> None:
        self.kept[value] = self.kept[value] | when if value in self.kept else when

    def settle(self, value: int) -> None:
        """Counts a value whose readers are all known."""
        when = self.kept.pop(value, None)
        if when is not None:
            self.tables.kept += self.times * self.program.sizes[value] * when

    def region(self, start: int, stop: int) -> None:
        program, tables = self.program, self.tables
        kernels = program.kernels[start:stop]
        made = {value for kernel in kernels for value in kernel.results}
        needed: dict[int, np.ndarray] = {}
        for kernel in kernels:
            if any(program.active[value] for value in kernel.results):
                needed |= dict.fromkeys(kernel.reads, self.always)
        inside = np.zeros(len(tables.price))
        for number in reversed(range(start, stop)):
            kernel = program.kernels[number]
            runs = self.never
            for value in kernel.results:
                when = needed.get(value)
                if when is None:
                    continue
                name = self.names.get(value)
                if name is not None:
                    held = when & self.bits[name]
                    tables.named += self.times * program.sizes[value] * held
                    self.keep(value, held)
                    when = when & ~self.bits[name]
                inside += program.sizes[value] * when
                runs = runs | when
            if runs.any():
                tables.seconds += self.times * self.seconds[number] * runs
                tables.price += self.times * self.prices[number] * runs
                tables.flops += self.times * float(kernel.flops) * runs
                for value in kernel.sources:
                    needed[value] = needed[value] | runs if value in needed else runs
        for value, when in needed.items():
            if value not in made:
                self.keep(value, when)
        for value in made:
            self.settle(value)
        np.maximum(tables.inside, inside, out=tables.inside)


def spans_of_blocks(program: Program, rates: Rates) -> Spans:
    """The blocks of a program without regions, where its author would place them; empty: nothing
    repeats."""
    prices = of_each(program, rates.price)
    found = tilings(program, prices)
    return max(found, key=lambda spans: sum(sum(prices[a:b]) for a, b in spans), default=())


def _names(number: int) -> list[int]:
    return [name for name in range(number.bit_length()) if number >> name & 1]


def _laid_out(place: Place, saved: frozenset[int]) -> int:
    """The projected peak of the whole program, with some names saved."""
    program = _decided(place, saved)
    return simulate(program, _regions(place, saved)).peak


def _decided(place: Place, saved: frozenset[int]) -> Program:
    """The program of a place, its scans with what they keep and take inside."""
    loops = {}
    for number, scan in place.scans.items():
        body = _decided(scan, saved)
        regions = _regions(scan, saved)
        within = {k for start, stop in scan.spans for k in range(start, stop)}
        given = {value for region in regions for value in region.saved}
        for at, kernel in enumerate(body.kernels):
            out = [v for v in kernel.results if at not in within or _leaves(scan, v, at)]
            given.update(value for value in out if value != kernel.residuals)
        cost = simulate_block(body, 0, len(body.kernels), given, regions)
        read = cost.read & (given | scan.carry)
        kept = sum(body.sizes[value] for value in read)
        loops[number] = scan.length * kept, cost.peak
    return place.program.with_loops(loops) if loops else place.program


def _leaves(place: Place, value: int, kernel: int) -> bool:
    """Whether a value of a region is read after it."""
    stop = next(stop for start, stop in place.spans if start <= kernel < stop)
    return place.program.last_used[value] > stop


def _regions(place: Place, saved: frozenset[int]) -> list[Region]:
    held = {value for name in saved for value in place.groups[name]}
    regions = []
    for start, stop in place.spans:
        made = {v for kernel in place.program.kernels[start:stop] for v in kernel.results}
        regions.append(Region(start, stop, tuple(sorted(made & held))))
    return regions
