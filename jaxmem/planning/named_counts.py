"""What sets of names cost, many at once: as arrays with an entry a set."""

import dataclasses

import numpy as np

from jaxmem.planning.named_places import RegionProgram
from jaxmem.planning.rates import Rates, of_each

# Sets at a time, so that what is counted of them fits a processor's cache. Chosen: it changes no
# plan, only the time; so do half and twice.
_CHUNK = 2**16


@dataclasses.dataclass(slots=True)
class Tables:
    """By set of names: seconds, price and FLOPs of recomputation, bytes kept for the backward pass,
    those of them that names hold, and the most bytes that one region makes again at once."""

    seconds: np.ndarray
    price: np.ndarray
    flops: np.ndarray
    kept: np.ndarray
    named: np.ndarray
    inside: np.ndarray

    @classmethod
    def zeros(cls, count: int) -> "Tables":
        return cls(*(np.zeros(count) for _ in dataclasses.fields(cls)))


def cost_tables(root: RegionProgram, count: int, rates: Rates) -> Tables:
    """What each set of so many names costs."""
    tables = Tables.zeros(2**count)
    for start in range(0, 2**count, _CHUNK):
        part = slice(start, min(start + _CHUNK, 2**count))
        numbers = np.arange(part.start, part.stop)
        bits = [((numbers >> name) & 1).astype(bool) for name in range(count)]
        fields = dataclasses.fields(tables)
        view = Tables(*(getattr(tables, field.name)[part] for field in fields))
        for place, times in root.all():
            _Counting(place, times, rates, bits, view).run()
    return tables


def marginal_savings(root: RegionProgram, count: int, rates: Rates) -> list[float]:
    """For each of any number of names the seconds of recomputation that it spares if it alone is
    saved."""
    tables = Tables.zeros(count + 1)
    bits = [np.arange(count + 1) == name + 1 for name in range(count)]
    for place, times in root.all():
        _Counting(place, times, rates, bits, tables).run()
    return [float(tables.seconds[0] - seconds) for seconds in tables.seconds[1:]]


class _Counting:
    """Counts what sets of names cost in one place, and adds it to tables."""

    def __init__(self, place: RegionProgram, times: int, rates: Rates, bits, tables: Tables):
        self.place, self.times, self.tables, self.bits = place, times, tables, bits
        self.program = program = place.program
        self.seconds = of_each(program, rates.seconds)
        self.prices = of_each(program, rates.price)
        self.names = {value: name for name, values in enumerate(place.groups) for value in values}
        self.no_sets = np.zeros(len(tables.price), bool)
        self.all_sets = ~self.no_sets
        # Sets for which a value is kept for the backward pass: made outside of the region that
        # reads it.
        self.kept: dict[int, np.ndarray] = {}

    def run(self) -> None:
        program, stop = self.program, len(self.program.kernels)
        for start, end in reversed(self.place.spans):
            for number in reversed(range(end, stop)):
                self.count_outside_regions(number)
            self.count_region(start, end)
            stop = start
        for number in reversed(range(stop)):
            self.count_outside_regions(number)
        inputs = (value for value in self.kept if value in self.place.carry)
        for value in inputs:
            self.tables.kept += self.times * program.sizes[value] * self.kept[value]

    def count_outside_regions(self, number: int) -> None:
        """A kernel outside of all regions: what its derivative reads is kept."""
        kernel = self.program.kernels[number]
        if any(self.program.active[value] for value in kernel.results):
            for value in kernel.reads:
                self.mark_kept(value, self.all_sets)
        if number in self.place.scans and kernel.residuals is not None:
            self.kept.pop(kernel.residuals, None)  # its turns are counted by themselves
        for value in kernel.results:
            self.finalize_value(value)

    def mark_kept(self, value: int, when: np.ndarray) -> None:
        self.kept[value] = self.kept[value] | when if value in self.kept else when

    def finalize_value(self, value: int) -> None:
        """Counts a value whose readers are all known."""
        when = self.kept.pop(value, None)
        if when is not None:
            self.tables.kept += self.times * self.program.sizes[value] * when

    def count_region(self, start: int, stop: int) -> None:
        program, tables = self.program, self.tables
        kernels = program.kernels[start:stop]
        made = {value for kernel in kernels for value in kernel.results}
        needed: dict[int, np.ndarray] = {}
        for kernel in kernels:
            if any(program.active[value] for value in kernel.results):
                needed |= dict.fromkeys(kernel.reads, self.all_sets)
        inside = np.zeros(len(tables.price))
        for number in reversed(range(start, stop)):
            kernel = program.kernels[number]
            runs = self.no_sets
            for value in kernel.results:
                when = needed.get(value)
                if when is None:
                    continue
                name = self.names.get(value)
                if name is not None:
                    kept = when & self.bits[name]
                    tables.named += self.times * program.sizes[value] * kept
                    self.mark_kept(value, kept)
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
                self.mark_kept(value, when)
        for value in made:
            self.finalize_value(value)
        np.maximum(tables.inside, inside, out=tables.inside)
