"""How long one run of a compiled step takes, and what of it takes how long."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.drawn.breakdown import Breakdown
from jaxmem.reports.drawn.grouping import grouped, without_numbers
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.text import milliseconds
from jaxmem.reports.speed.model import parts_of
from jaxmem.reports.speed.schedule import KernelRun, KernelSchedule
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.attribution import Attribution, Origin
from jaxmem.reports.xla.instructions import Module
from jaxmem.targets import LocalDevice, Target, rated

_KERNELS = 6  # rows
WAITING = "(copies and collectives)"


class Seconds(Breakdown):
    """Seconds by name: a dict that prints as a table in milliseconds and shares of the whole."""

    def unit(self, size: float) -> str:
        return milliseconds(size)


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
    ran: tuple[KernelRun, ...]
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
        return self._by("phase")

    @functools.cached_property
    def by_module(self) -> Seconds:
        """Seconds by module path."""
        return self._by("module")

    @functools.cached_property
    def by_source(self) -> Seconds:
        """Seconds by the user's line."""
        return self._by("source")

    @functools.cached_property
    def by_limit(self) -> Seconds:
        """Seconds by what limits the kernels: arithmetic, memory, or the launch."""
        return self._by("limit")

    def by_run(self, key: str) -> list[str]:
        """The phase, module, source or limit of each of ``ran``, in the order in which they run."""
        if key == "limit":
            return [self._limit(one) for one in self.ran]
        return [
            WAITING if one.kernel is None else getattr(origin, key)
            for one, origin in zip(self.ran, self.origins, strict=True)
        ]

    def _limit(self, one: KernelRun) -> str:
        if one.kernel is None:
            return WAITING
        parts, launch = parts_of(one.kernel, self.target), self.target.shares.launch
        if parts.seconds < launch:
            return "launches"
        arithmetic = parts.arithmetic + parts.feeding
        return "arithmetic" if arithmetic > parts.traffic + parts.turning else "memory"

    def _by(self, key: str) -> Seconds:
        rows: collections.defaultdict[str, float] = collections.defaultdict(float)
        for name, one in zip(self.by_run(key), self.ran, strict=True):
            rows[name] += one.seconds
        return _sorted(rows)

    def _parts(self) -> Iterable[Part]:
        name, checked = self.target.name, self.target.checked
        yield f"{milliseconds(self.seconds)} a step on {name}, predicted ({checked})"
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
            rows.append((milliseconds(seconds), f"x {times}", work, where))
        return Table(("",) * 4, rows, "longest kernels, equal ones together", (3,))


def step_time(
    hlo: str, arguments: Sequence[Argument | None], target: Target | LocalDevice
) -> StepTime:
    """The predicted time of a program on the device that it was compiled for.

    Raises:
        JaxmemError: its rates are not known.
    """
    known = rated(target)
    if known is None:
        raise JaxmemError(
            f"The rates of {target.description} are not known. `jaxmem calibrate` measures them; "
            "`jaxmem targets` lists the devices whose rates are known."
        )
    ran = KernelSchedule(hlo, known).ran
    attribution = Attribution(Module(hlo), arguments)
    return StepTime(known, ran, tuple(attribution.describe(one.name) for one in ran))


def _sorted(rows: dict[str, float]) -> Seconds:
    return Seconds(sorted(rows.items(), key=lambda row: -row[1]))


def _where(origin: Origin) -> str:
    return without_numbers(" · ".join([origin.operation, origin.module, origin.source]))
