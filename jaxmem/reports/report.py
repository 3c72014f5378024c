"""The report of one compiled step."""

import dataclasses
import functools
import gzip
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jaxlib
import numpy as np

from jaxmem.ground.bytes import device_budget, format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.drawn.text import (
    breakdown_lines,
    buffer_lines,
    columns,
    fit,
    rolled_up,
    side_by_side,
)
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.attribution import Origin
from jaxmem.reports.where.peak import Buffer, MemoryMap
from jaxmem.reports.where.timeline import Timeline
from jaxmem.reports.xla.dump import read_dump
from jaxmem.reports.xla.hlo import Work, count_bytes, count_work
from jaxmem.reports.xla.schedule import Collectives, Transfers, count_collectives, find_transfers
from jaxmem.targets import LocalDevice, Target, example

CPU_NOTE = (
    "compiled for the CPU: these bytes hold for this CPU alone. An accelerator's compiler fuses "
    "and schedules otherwise, and the CPU's undoes rematerialization. Name one for its bytes: "
    f"{example()}."
)


def is_cpu(target: Target | LocalDevice) -> bool:
    """Whether a target is the machine's own CPU."""
    return isinstance(target, LocalDevice) and target.platform == "cpu"


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes of one compiled step on one device of the target, by XLA's buffer assignment.

    ``argument``, ``output``, ``alias`` (outputs that reuse a donated argument) and ``temp`` are
    device bytes; the ``host_`` ones are in host memory and are never part of ``device``.

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
    argument: int
    output: int
    alias: int
    temp: int
    host_argument: int
    host_output: int
    host_alias: int
    host_temp: int
    hlo: str = dataclasses.field(repr=False)
    dump: Mapping[str, bytes] = dataclasses.field(repr=False, default_factory=dict, compare=False)
    arguments: tuple[Argument | None, ...] = dataclasses.field(repr=False, default=())

    @property
    def device(self) -> int:
        """Peak device bytes of the step: argument + output - alias + temp."""
        return self.argument + self.output - self.alias + self.temp

    @property
    def host(self) -> int:
        """Peak host bytes of the step."""
        return self.host_argument + self.host_output - self.host_alias + self.host_temp

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

    # ---- where the bytes go

    @functools.cached_property
    def _map(self) -> MemoryMap:
        if not self.has_timeline:
            raise JaxmemError(
                f"There is no timeline of what was compiled for {self.target}: XLA's CPU compiler "
                "writes no live ranges, nor are they found where compiler_options has its own "
                "xla_dump_to, or timeline=False was asked for. Totals are there; for the timeline "
                f"name a target, as in jaxmem.memory(step, *args, {example()})."
            )
        version = jaxlib.__version__
        buffers, ranges = (
            gzip.decompress(self.dump[name]).decode()
            for name in ("buffer-assignment", "live-range")
        )
        assignment = read_dump(buffers, ranges, version)
        for on_host, prefix in ((False, ""), (True, "host_")):
            for role in ("argument", "output", "alias", "temp"):
                read = assignment.total(role, on_host=on_host)
                if read != getattr(self, prefix + role):
                    raise JaxmemError(
                        f"XLA's dump (jax {version}) has {read} bytes of {prefix}{role} and its "
                        f"memory analysis {getattr(self, prefix + role)}: jaxmem does not "
                        "read this version's dump right. The totals are not touched by this."
                    )
        return MemoryMap(assignment, self.hlo, self.arguments)

    @property
    def has_timeline(self) -> bool:
        """Whether XLA said where the bytes lie: of what was compiled for a GPU."""
        return set(self.dump) == {"buffer-assignment", "live-range"}

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
    def fragmentation(self) -> int:
        """Device bytes that the layout takes beyond what is alive at the peak."""
        return self.timeline.fragmentation

    @functools.cached_property
    def by_phase(self) -> dict[str, int]:
        """Bytes at the peak by the phase that made them: state, batch, forward, loss, backward,
        recompute, update."""
        return self._map.breakdown(lambda buffer: buffer.phase)

    @functools.cached_property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they are: parameters, gradients, optimizer state, residuals,
        temporaries, workspace, outputs, model state, batch."""
        return self._map.breakdown(lambda buffer: buffer.kind)

    @functools.cached_property
    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module path (``ResNet/Block_3/Conv_1``)."""
        return self._map.breakdown(lambda buffer: buffer.module)

    @functools.cached_property
    def by_source(self) -> dict[str, int]:
        """Bytes at the peak by the user's line that made them."""
        return self._map.breakdown(lambda buffer: buffer.source)

    @property
    def live_by_kind(self) -> dict[str, np.ndarray]:
        """Live device bytes at each point of the schedule, by kind (``int64 [points]``)."""
        return self._map.live_by_kind

    @property
    def phases(self) -> tuple[str, ...]:
        """The phase of what runs at each point of the schedule."""
        return self._map.phases

    def fits(self, budget: int | str | None = None) -> bool:
        """Whether the device bytes are within a budget; None: what is usable on the target, which
        counts too where the budget is more (`JaxmemWarning`).

        Raises:
            BudgetError: the budget does not parse.
        """
        usable = self.target.usable_bytes
        if budget is None and not usable:
            raise JaxmemError(
                f"The memory of {self.target.description} is not known; pass a budget to fits()."
            )
        budget = "100%" if budget is None else budget
        return self.device <= device_budget(budget, usable, self.target.name)

    def __str__(self):
        rows = [
            ("argument", self.argument, self.host_argument),
            ("output", self.output, self.host_output),
            ("alias", -self.alias, -self.host_alias),
            ("temp", self.temp, self.host_temp),
            ("total", self.device, self.host),
        ]
        lines = [f"compiled for {self.target}", f"{'':10}{'device':>14}{'host':>14}"]
        for name, device, host in rows:
            lines.append(f"{name:10}{format_bytes(device):>14}{format_bytes(host):>14}")
        usable = self.target.usable_bytes
        if usable:
            verdict = "fits" if self.fits() else "does not fit"
            lines.append(f"{verdict}: {self.device / usable:.0%} of {format_bytes(usable)} usable")
        if is_cpu(self.target):
            lines.append(f"note: {CPU_NOTE}")
        if self.has_timeline:
            lines += ["", *self._peak_lines()]
        return "\n".join(lines)

    __repr__ = __str__

    def _peak_lines(self) -> list[str]:
        at = self.peak_operation
        where = " · ".join([at.operation, at.module, at.source])
        start = f"peak {format_bytes(self.peak_bytes)} in the {at.phase} phase, at "
        return [
            start + fit(where, columns() - len(start)),
            "",
            *side_by_side(
                breakdown_lines("by phase", self.by_phase, self.device),
                breakdown_lines("by kind", self.by_kind, self.device),
            ),
            *breakdown_lines("by line", self.by_source, self.device),
            *breakdown_lines("by module", rolled_up(self.by_module), self.device),
            *buffer_lines(self.peak),
        ]

    # ---- as files

    def to_json(self) -> str:
        """All figures as JSON text, which `jaxmem.diff` reads back."""
        return json.dumps(describe(self), indent=1)

    def to_html(self, path: str | os.PathLike) -> None:
        """Writes one self-contained page: the timeline to hover and zoom, the peak as a treemap by
        module, and a sortable table of its buffers.

        Raises:
            JaxmemError: the report has no timeline.
        """
        from jaxmem.reports.drawn.page import page

        pathlib.Path(path).write_text(page(describe(self)), encoding="utf-8")

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the timeline stacked by kind, its peak marked, as a ``.png``, ``.svg`` or
        ``.pdf`` file. Needs matplotlib (``pip install 'jaxmem[viz]'``).

        Raises:
            JaxmemError: the report has no timeline, matplotlib is missing, or it does not know the
                suffix.
        """
        from jaxmem.reports.drawn.plot import check_plot, draw

        check_plot(path)
        draw({"": describe(self)}, path)


def describe(report: MemoryReport) -> dict[str, Any]:
    """A report as plain data: what `MemoryReport.to_json` writes."""
    fields = ("argument", "output", "alias", "temp")
    about: dict[str, Any] = {
        "jaxmem": 1,
        "jax": jaxlib.__version__,
        "target": str(report.target),
        "usable": report.target.usable_bytes,
        "device": report.device,
        "host": report.host,
        "totals": {
            name: getattr(report, name) for name in (*fields, *(f"host_{name}" for name in fields))
        },
    }
    if not report.has_timeline:
        return about
    return about | {
        "peak": report.peak_bytes,
        "fragmentation": report.fragmentation,
        "peak_point": report.timeline.peak_point,
        "peak_operation": dataclasses.asdict(report.peak_operation),
        "by_phase": report.by_phase,
        "by_kind": report.by_kind,
        "by_module": report.by_module,
        "by_source": report.by_source,
        "buffers": [dataclasses.asdict(buffer) for buffer in report.peak],
        "timeline": {
            "schedule": list(report.timeline.schedule),
            "phases": list(report.phases),
            "live": report.timeline.live.tolist(),
            "live_by_kind": {kind: row.tolist() for kind, row in report.live_by_kind.items()},
        },
    }
