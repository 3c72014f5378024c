"""The report of one compiled step."""

import dataclasses
import functools
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from jaxmem.ground.bytes import device_budget
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.cliff import Cliff, cliff_of
from jaxmem.reports.drawn.breakdown import Breakdown
from jaxmem.reports.drawn.report_text import report_parts
from jaxmem.reports.drawn.tables import Part, Printed
from jaxmem.reports.lowered import Lowered
from jaxmem.reports.plain_data import costs, describe
from jaxmem.reports.speed.step_time import StepTime, step_time
from jaxmem.reports.totals import Sized, Totals
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.attribution import Origin
from jaxmem.reports.where.padding import Padded
from jaxmem.reports.where.peak import Buffer, MemoryMap
from jaxmem.reports.where.reading import DUMPED, read_map
from jaxmem.reports.where.timeline import Timeline
from jaxmem.reports.xla.schedule import Collectives, Transfers, count_collectives, find_transfers
from jaxmem.reports.xla.traffic import count_bytes
from jaxmem.reports.xla.work import Work, count_work
from jaxmem.targets import LocalDevice, Target, example, family_of


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(Sized, Printed):
    """Bytes of one compiled step on one device of the target, by XLA's buffer assignment.

    ``argument``, ``output``, ``alias`` (outputs that reuse a donated argument), ``temp`` and
    ``on_device.constant`` (arrays that the step closes over) are device bytes; the ``host_`` ones
    are in host memory and are never part of ``device``. All of one memory are ``on_device`` and
    ``on_host``.

    The layout is fixed before the step runs. ``timeline`` says which of its bytes are alive at
    each point of the compiled schedule, ``peak_bytes`` how many are at the worst one, ``peak``
    what they are, and ``fragmentation`` what the layout takes beyond them:
    ``device == peak_bytes + fragmentation``. The breakdowns (``by_phase``, ``by_kind``,
    ``by_module``, ``by_source``) split the peak, each with the fragmentation as its last row, so
    that its rows add up to ``device`` exactly; ``"(not attributed)"`` is what nothing is known of.
    Arguments and results are the caller's and count as alive throughout. Phases, kinds and what
    they follow from are told in the files of `jaxmem.reports.where`.
    """

    target: Target | LocalDevice
    on_device: Totals
    on_host: Totals
    hlo: str = dataclasses.field(repr=False)
    dump: Mapping[str, bytes] = dataclasses.field(repr=False, default_factory=dict, compare=False)
    arguments: tuple[Argument | None, ...] = dataclasses.field(repr=False, default=())
    lowered: Lowered | None = dataclasses.field(repr=False, default=None, compare=False)

    @property
    def name(self) -> str:
        """The name of the function that was compiled."""
        return self.hlo.partition(",")[0].removeprefix("HloModule ").removeprefix("jit_")

    @functools.cached_property
    def work(self) -> Work:
        """FLOPs and number of matmuls and convolutions in the optimised HLO."""
        return count_work(self.hlo)

    @functools.cached_property
    def moved(self) -> int:
        """Bytes that the kernels of one run read and write, by the optimised HLO."""
        return count_bytes(self.hlo, taken=True)

    @functools.cached_property
    def transfers(self) -> Transfers:
        """Copies between host and device, and how many have other work beside them."""
        return find_transfers(self.hlo)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Collectives of one run, on one device."""
        return count_collectives(self.hlo)

    @functools.cached_property
    def time(self) -> StepTime:
        """Predicted seconds of one run, by its kernels."""
        return step_time(self.hlo, self.arguments, self.target)

    @functools.cached_property
    def cliff(self) -> Cliff | None:
        """Where XLA's own rematerialization pass begins to act, and how far the step is from it;
        None: the pass is off, as in the steps that jaxmem planned, or where it begins is not known
        (of the attached device, and of some families of targets)."""
        target, lowered = self.target, self.lowered
        if isinstance(target, LocalDevice) or lowered is None:
            return None
        return cliff_of(self.hlo, self.arguments, self.on_device, target, lowered)

    @functools.cached_property
    def _map(self) -> MemoryMap:
        if not self.has_timeline:
            raise JaxmemError(
                f"There is no timeline of what was compiled for {self.target}: XLA's CPU compiler "
                "writes no live ranges, nor are they found where compiler_options has its own "
                "xla_dump_to, or timeline=False was asked for. Totals are there; for the timeline "
                f"name a target, as in jaxmem.memory(step, *args, {example()})."
            )
        return read_map(self.dump, self.hlo, self.arguments, self.on_device, self.on_host)

    @property
    def has_timeline(self) -> bool:
        """Whether XLA said where the bytes lie: of what was compiled for a known target."""
        return set(self.dump) == set(DUMPED)

    @property
    def timeline(self) -> Timeline:
        """Live device bytes at each point of the compiled schedule, and the layout."""
        return self._map.timeline

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that are alive at once."""
        return self.timeline.peak

    @property
    def peak(self) -> tuple[Buffer, ...]:
        """Every buffer alive at the peak, largest first."""
        return self._map.buffers

    @property
    def peak_operation(self) -> Origin:
        """What runs at the peak: operation, source line, module and phase."""
        return self._map.describe(self.timeline.peak_point)

    @property
    def on_chip(self) -> dict[str, int]:
        """Bytes of the memories of the chip itself that the step uses, by the names that the
        target's family has for them: part of neither ``device`` nor ``host``."""
        names = family_of(self.target.known).chip_memories
        found: Counter[str] = Counter()
        for number, size in self._map.on_chip.items():
            found[names.get(number, "other")] += size
        return {name: size for name, size in found.items() if size}

    @property
    def padding(self) -> tuple[Padded, ...]:
        """The arrays at the peak that are padded to whole tiles, the most padding first."""
        return self._map.padding

    @property
    def fragmentation(self) -> int:
        """Device bytes that the layout takes beyond what is alive at the peak."""
        return self.timeline.fragmentation

    @functools.cached_property
    def by_phase(self) -> Breakdown:
        """Bytes at the peak by the phase that made them: state, batch, forward, loss, backward,
        recompute, update."""
        return Breakdown(self._map.breakdown(lambda buffer: buffer.phase))

    @functools.cached_property
    def by_kind(self) -> Breakdown:
        """Bytes at the peak by what they are: parameters, gradients, optimizer state, residuals,
        temporaries, workspace, outputs, model state, batch."""
        return Breakdown(self._map.breakdown(lambda buffer: buffer.kind))

    @functools.cached_property
    def by_module(self) -> Breakdown:
        """Bytes at the peak by module path (``ResNet/Block_3/Conv_1``)."""
        return Breakdown(self._map.breakdown(lambda buffer: buffer.module))

    @functools.cached_property
    def by_source(self) -> Breakdown:
        """Bytes at the peak by the user's line that made them."""
        return Breakdown(self._map.breakdown(lambda buffer: buffer.source))

    @property
    def live_by_kind(self) -> dict[str, np.ndarray]:
        """Live device bytes at each point of the schedule, by kind (``int64 [points]``)."""
        return self._map.live_by_kind

    @property
    def phases(self) -> tuple[str, ...]:
        """The phase of what runs at each point of the schedule."""
        return self._map.phases

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Line, module and operation of what runs at each point of the schedule."""
        return self._map.origins

    def fits(self, budget: int | str | None = None) -> bool:
        """Whether the device bytes are within a budget; None: what is usable on the target, which
        counts too where the budget is more (`JaxmemWarning`).

        Raises:
            BudgetError: the budget does not parse.
        """
        return self.device <= device_budget(budget, self.target.usable_bytes, self.target.name)

    def _parts(self) -> Iterable[Part]:
        return report_parts(self)

    def to_json(self) -> str:
        """All figures as JSON text, which `jaxmem.diff` reads back.

        ``work`` has the fields of `Work`, ``moved`` is a number of bytes, and ``time`` has the
        predicted ``seconds`` of a run, those of them that are ``waiting``, the error of the
        prediction (null: unchecked), and seconds ``by_phase``, ``by_limit``, ``by_module`` and
        ``by_source``; it is null where the rates of the device are not known. What needs a
        timeline is left out where there is none (`has_timeline`).
        """
        return json.dumps(describe(self) | costs(self), indent=1)

    def to_html(
        self, path: str | os.PathLike, *, budget: int | str | None = None, name: str = ""
    ) -> None:
        """Writes one self-contained page: whether the step fits, the timeline to hover and zoom,
        the peak as a treemap by module, and a sortable table of its buffers.

        Args:
            path: of the file.
            budget: bytes or text as for `fits`: a line in the timeline, and what the verdict is
                about; None: what is usable on the target.
            name: of the step, for the title; otherwise its function's.

        Raises:
            BudgetError: the budget does not parse.
            JaxmemError: the report has no timeline.
        """
        from jaxmem.reports.drawn.page import page

        text = page(describe(self), _bytes_of(budget, self.target), name)
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def plot(
        self,
        path: str | os.PathLike,
        *,
        budget: int | str | None = None,
        dark: bool = False,
        kind: str = "memory",
    ) -> None:
        """Draws a picture as a ``.png``, ``.svg`` or ``.pdf`` file: the timeline of bytes stacked
        by kind, its peak marked, or the predicted time. Needs matplotlib (``pip install
        'jaxmem[viz]'``).

        Args:
            path: of the file.
            budget: bytes or text as for `fits`, drawn as a line in the timeline of bytes.
            dark: for a dark page.
            kind: ``"memory"``; ``"time"``: when each phase runs, in ms, and the ms of phases and
                modules by what limits their kernels (`time`).

        Raises:
            BudgetError: the budget does not parse.
            JaxmemError: the report has no timeline, or the device's rates are not known;
                matplotlib is missing, or it does not know the suffix.
        """
        from jaxmem.reports.drawn.plot import check_plot, draw
        from jaxmem.reports.drawn.time_plot import draw_time

        check_plot(path)
        if kind not in ("memory", "time"):
            raise JaxmemError(f"A report is drawn with kind='memory' or 'time'; got {kind!r}.")
        if kind == "time":
            draw_time(self.time, path, dark)
            return
        draw({"": describe(self)}, path, _bytes_of(budget, self.target), dark)


def _bytes_of(budget: int | str | None, target: Target | LocalDevice) -> int | None:
    return None if budget is None else device_budget(budget, target.usable_bytes, target.name)
