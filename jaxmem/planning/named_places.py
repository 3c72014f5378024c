"""Programs whose regions stay where the user has them, and what saving by name costs there."""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmem.planning.regions import Region
from jaxmem.planning.simulation import simulate, simulate_block
from jaxmem.program import Program


@dataclasses.dataclass(frozen=True)
class RegionProgram:
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
    scans: Mapping[int, "RegionProgram"] = dataclasses.field(default_factory=dict)

    def all(self, times: int = 1) -> Iterator[tuple["RegionProgram", int]]:
        """This one and all inside, with how often each runs in a step."""
        yield self, times * self.length
        for scan in self.scans.values():
            yield from scan.all(times * self.length)


def projected_peak(place: RegionProgram, saved: frozenset[int]) -> int:
    """The projected peak of the whole program, with some names saved."""
    program = _with_scan_costs(place, saved)
    return simulate(program, _regions(place, saved)).peak


def _with_scan_costs(place: RegionProgram, saved: frozenset[int]) -> Program:
    """The program of a place, its scans with what they keep and take inside."""
    loops = {}
    for number, scan in place.scans.items():
        body = _with_scan_costs(scan, saved)
        regions = _regions(scan, saved)
        own = {k for start, stop in scan.spans for k in range(start, stop)}
        given = {value for region in regions for value in region.saved}
        for at, kernel in enumerate(body.kernels):
            out = [v for v in kernel.results if at not in own or _escapes_region(scan, v, at)]
            given.update(value for value in out if value != kernel.residuals)
        cost = simulate_block(body, 0, len(body.kernels), given, regions)
        read = cost.read & (given | scan.carry)
        kept = sum(body.sizes[value] for value in read)
        loops[number] = scan.length * kept, cost.peak, True
    return place.program.with_loops(loops) if loops else place.program


def _escapes_region(place: RegionProgram, value: int, kernel: int) -> bool:
    """Whether a value of a region is read after it."""
    stop = next(stop for start, stop in place.spans if start <= kernel < stop)
    return place.program.last_used[value] > stop


def _regions(place: RegionProgram, saved: frozenset[int]) -> list[Region]:
    saved_values = {value for name in saved for value in place.groups[name]}
    regions = []
    for start, stop in place.spans:
        made = {v for kernel in place.program.kernels[start:stop] for v in kernel.results}
        regions.append(Region(start, stop, tuple(sorted(made & saved_values))))
    return regions
