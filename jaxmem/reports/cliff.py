"""The bytes from which on XLA recomputes by itself, and what it recomputes there."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_seconds
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.reports.drawn.grouping import grouped, without_numbers
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.text import milliseconds
from jaxmem.reports.lowered import Lowered
from jaxmem.reports.speed.schedule import KernelSchedule
from jaxmem.reports.totals import Totals
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.attribution import Attribution
from jaxmem.reports.where.reading import DUMPED, totals_of
from jaxmem.reports.xla.instructions import Module
from jaxmem.reports.xla.usage import temporary_bytes
from jaxmem.targets import Target, family_of

_AGAIN = re.compile(r"\.remat\d*(_(un)?compressed)?(\.|$)")  # in the names that XLA gives
_NEAR = 0.03  # of the step: less, and the printed report tells. Chosen.
_ROWS = 6  # of values in a printed report


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """An instruction that XLA added to compute a value once more: its name, how often it runs in a
    step, FLOPs, bytes moved and predicted seconds of all its runs, and where in the user's code the
    value is from."""

    name: str
    times: int
    flops: int
    moved: int
    seconds: float
    source: str
    module: str


@dataclasses.dataclass(frozen=True, repr=False)
class Rematerialized(Printed):
    """A step with what XLA recomputes in it by itself.

    Attributes:
        limit: device bytes that it was to stay within.
        device: device bytes that it takes.
        recomputed: what was added.
    """

    limit: int
    device: int
    recomputed: tuple[Recomputed, ...]

    @property
    def flops(self) -> int:
        """FLOPs of matmuls and convolutions that run once more."""
        return sum(one.flops for one in self.recomputed)

    @property
    def moved(self) -> int:
        """Bytes that are read and written once more."""
        return sum(one.moved for one in self.recomputed)

    @property
    def seconds(self) -> float:
        """Predicted seconds that it takes longer."""
        return sum(one.seconds for one in self.recomputed)

    def _parts(self) -> Iterable[Part]:
        yield f"{_recomputed_text(self.recomputed)}, and the step takes {format_bytes(self.device)}"
        rows = []
        groups = grouped(
            self.recomputed, lambda one: (one.source, without_numbers(one.module), one.flops)
        )
        groups.sort(key=lambda group: -sum(one.seconds for one in group))
        for group in groups[:_ROWS]:
            one = group[0]
            times = sum(each.times for each in group)
            rows.append(
                (
                    milliseconds(sum(each.seconds for each in group)),
                    f"x {times}" if times > 1 else "",
                    f"{one.flops / 1e9:.4g} GFLOP" if one.flops else "",
                    f"{without_numbers(one.module)} · {one.source}",
                )
            )
        if rows:
            yield Table(("",) * 4, rows, "recomputed, equal values together", (3,))


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step as the pass sees it: its target, the bytes of its arguments and results and,
    as the pass counts them, of its temporary values; and what was compiled."""

    target: Target
    boundary: int
    temporary: int
    arguments: tuple[Argument | None, ...] = dataclasses.field(repr=False)
    lowered: Lowered = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class Cliff(Printed):
    """Where XLA's own rematerialization pass begins to act on a step: `MemoryReport.cliff`.

    The pass runs where the temporary values of a step, as the pass counts them, are more than what
    the device has for them. What it then recomputes shows in no jaxpr. ``jaxmem`` plans with the
    pass off (`Plan.compiler_options`).

    Attributes:
        limit: device bytes of the step above which the pass acts.
        device: device bytes of the step as it was compiled.
        recomputed: what the pass recomputes in it already; empty: nothing.
        step: what is compiled again.
    """

    limit: int
    device: int
    recomputed: tuple[Recomputed, ...]
    step: CompiledStep = dataclasses.field(repr=False)

    @property
    def left(self) -> int:
        """Bytes between the step and the limit; below 0: the step is over it."""
        return self.limit - self.device

    @property
    def near(self) -> bool:
        """Whether the step is at most 3 % below the limit, over it, or recomputed already."""
        return bool(self.recomputed) or self.left <= _NEAR * self.device

    @property
    def summary(self) -> str:
        """It in a sentence."""
        limit = format_bytes(self.limit)
        if self.recomputed:
            return f"{_recomputed_text(self.recomputed)} to stay within {limit}"
        if self.left < 0:
            return f"XLA's own rematerialization begins at {limit}, and finds nothing to recompute"
        share = self.left / max(self.device, 1)
        far = f"{share:.1%} above this step" if share < 10 else f"{share + 1:.0f} times this step"
        return f"XLA starts to rematerialize at {limit} ({far})"

    def compile(self, over: float = 0.05, timeout: float = 3600) -> Rematerialized:
        """What XLA would recompute if the step were over the limit by a share of its temporary
        bytes: compiled for a device of so much less memory. Takes one compilation.

        Args:
            over: the share: 0.05: the limit is a twentieth below what the step needs.
            timeout: seconds for the compilation.

        Raises:
            CompileError: XLA refused the program, ran out of time, or died.
            JaxmemError: ``over`` is no share of a whole, or ``timeout`` no time.
        """
        if not 0 <= over < 1:
            raise JaxmemError(f"cliff.compile takes over= from 0 to below 1; got {over!r}.")
        check_seconds("cliff.compile", "timeout", timeout)
        step = self.step
        room = max(int((1 - over) * step.temporary) - 1, 0)
        family, options = family_of(step.target), step.lowered.options
        smaller = family.with_pass_limit(step.target, step.boundary, options, room)
        compiled = step.lowered.compile(smaller, timeout)
        on_device, _ = totals_of(compiled.text(DUMPED[0]))
        hlo = compiled.text("hlo")
        found = recomputed_in(hlo, step.arguments, step.target)
        return Rematerialized(self.device - (step.temporary - room), on_device.total, found)

    def _parts(self) -> Iterable[Part]:
        yield self.summary


def cliff_of(
    hlo: str,
    arguments: Sequence[Argument | None],
    totals: Totals,
    target: Target,
    lowered: Lowered,
) -> Cliff | None:
    """Where the pass acts on a compiled step; None: it is off, or that is not known."""
    boundary = totals.argument + totals.output - totals.alias
    allowed = family_of(target).pass_limit(target, boundary, lowered.options)
    if allowed is None:
        return None
    step = CompiledStep(target, boundary, temporary_bytes(hlo), tuple(arguments), lowered)
    limit = totals.total + allowed - step.temporary
    return Cliff(limit, totals.total, recomputed_in(hlo, arguments, target), step)


def recomputed_in(
    hlo: str, arguments: Sequence[Argument | None], target: Target
) -> tuple[Recomputed, ...]:
    """What XLA's own pass added to a compiled program, in its order."""
    if ".remat" not in hlo:
        return ()
    ran = [one for one in KernelSchedule(hlo, target).ran if _AGAIN.search(one.name) and one.kernel]
    if not ran:
        return ()
    attribution = Attribution(Module(hlo), arguments)
    found = []
    for one in ran:
        origin, kernel = attribution.describe(one.name), one.kernel
        assert kernel
        work = one.times * kernel.flops, one.times * kernel.moved
        place = origin.source, origin.module
        found.append(Recomputed(one.name, one.times, *work, one.seconds, *place))
    return tuple(found)


def _recomputed_text(recomputed: Sequence[Recomputed]) -> str:
    """What is recomputed, in a few words."""
    if not recomputed:
        return "XLA recomputes nothing by itself"
    flops = sum(one.flops for one in recomputed)
    return (
        f"XLA recomputes {pluralize(len(recomputed), 'value')} by itself ({flops / 1e9:.4g} GFLOP, "
        f"{1e3 * sum(one.seconds for one in recomputed):.3g} ms)"
    )
