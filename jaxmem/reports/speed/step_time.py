"""How long one run of a compiled step takes, and what of it takes how long."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.drawn.breakdown import Breakdown
from jaxmem.reports.drawn.grouping import grouped, without_numbers
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.speed.model import parts_of
from jaxmem.reports.speed.schedule import Ran, Schedule
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.attribution import Attribution, Origin
from jaxmem.reports.xla.instructions import Module
from jaxmem.targets import LocalDevice, Target

_KERNELS = 6  # rows
WAITING = "(copies and collectives)"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


class Seconds(Breakdown):
    """Seconds by name: a dict that prints as a table in milliseconds and shares of the whole."""

    def unit(self, size: float) -> str:
        return _ms(size)


@dataclasses.dataclass(frozen=True, repr=False)
class StepTime(Printed):
    """Predicted seconds of one run of a compiled step.

    Of each kernel of the optimised program, in the order of its schedule: the longer of its FLOPs
    over the rate of its operands and its bytes over the memory's rate, each by the share of the
    maker's figure that programs reach (`Target.shares`), and a launch. Copies to the host and
    collectives run beside the kernels from where XLA starts them to where it waits for them, and
    count as long as it waits. Custom kernels count by their bytes alone.
    """

    target: Target
    ran: tuple[Ran, ...]
    origins: tuple[Origin, ...] = dataclasses.field(repr=False)

    @functools.cached_property
    def seconds(self) -> float:
        """Of the whole run."""
        return sum(one.seconds for one in self.ran)

    @functools.cached_property
    def waiting(self) -> float:
        """Seconds in which the device waits for copies and collectives."""
        return sum(one.seconds for one in self.ran if one.kernel is None)

    @functools.cached_property
    def by_phase(self) -> Seconds:
        """Seconds by phase: forward, loss, backward, recompute, update."""
        return self._by(lambda origin: origin.phase)

    @functools.cached_property
    def by_module(self) -> Seconds:
        """Seconds by module path."""
        return self._by(lambda origin: origin.module)

    @functools.cached_property
    def by_source(self) -> Seconds:
        """Seconds by the user's line."""
        return self._by(lambda origin: origin.source)

    @functools.cached_property
    def by_limit(self) -> Seconds:
        """Seconds by what limits the kernels: arithmetic, memory, or the launch."""
        rows: collections.defaultdict[str, float] = collections.defaultdict(float)
        for one in self.ran:
            if one.kernel is None:
                rows[WAITING] += one.seconds
                continue
            arithmetic, traffic = parts_of(one.kernel, self.target)
            launch = self.target.shares.launch
            word = "launches" if max(arithmetic, traffic) < launch else "memory"
            rows["arithmetic" if arithmetic > max(traffic, launch) else word] += one.seconds
        return _sorted(rows)

    def _by(self, key: Callable[[Origin], str]) -> Seconds:
        rows: collections.defaultdict[str, float] = collections.defaultdict(float)
        for one, origin in zip(self.ran, self.origins, strict=True):
            rows[WAITING if one.kernel is None else key(origin)] += one.seconds
        return _sorted(rows)

    def _parts(self) -> Iterable[Part]:
        error = self.target.time_error
        known = "unchecked" if error is None else f"within {error:.0%} on such devices"
        yield f"{_ms(self.seconds)} a step on {self.target.name}, predicted ({known})"
        yield self.by_phase.table("by phase"), self.by_limit.table("by limit")
        yield self.by_source.table("by line")
        yield self.by_module.table("by module")
        yield self._largest()

    def _largest(self) -> Table:
        ran = [
            (one.kernel.flops, one.kernel.moved, _where(origin), one.times, one.seconds)
            for one, origin in zip(self.ran, self.origins, strict=True)
            if one.kernel
        ]
        alike = grouped(ran, lambda one: one[:3])
        alike.sort(key=lambda group: -sum(one[4] for one in group))
        rows = []
        for group in alike[:_KERNELS]:
            flops, _, where, _, _ = group[0]
            times, seconds = sum(one[3] for one in group), sum(one[4] for one in group)
            work = f"{flops / 1e9:.4g} GFLOP" if flops else ""
            rows.append((_ms(seconds), f"x {times}", work, where))
        return Table(("",) * 4, rows, "longest kernels, equal ones together", (3,))


def step_time(
    hlo: str, arguments: Sequence[Argument | None], target: Target | LocalDevice
) -> StepTime:
    """The predicted time of a program on the device that it was compiled for.

    Raises:
        JaxmemError: its rates are not known.
    """
    known = target.known if isinstance(target, LocalDevice) else target
    if known is None:
        raise JaxmemError(
            f"The rates of {target.description} are not known. `jaxmem targets` lists the devices "
            "whose time is predicted."
        )
    if isinstance(target, LocalDevice) and target.platform == "cpu":
        raise JaxmemError("No rates of CPUs are known. Name a target to predict the time on it.")
    ran = Schedule(hlo, known).ran
    attribution = Attribution(Module(hlo), arguments)
    return StepTime(known, ran, tuple(attribution.describe(one.name) for one in ran))


def _sorted(rows: dict[str, float]) -> Seconds:
    return Seconds(sorted(rows.items(), key=lambda row: -row[1]))


def _where(origin: Origin) -> str:
    return without_numbers(" · ".join([origin.operation, origin.module, origin.source]))
