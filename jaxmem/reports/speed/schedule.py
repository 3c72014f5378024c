"""When each kernel of a compiled program runs: one after the other, with copies and collectives
that XLA started early beside them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from jaxmem.reports.speed.kernels import CompiledKernel, kernel_of
from jaxmem.reports.speed.model import collective_seconds, seconds_of
from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    Lines,
    calls_of,
    entry_of,
    operands_of,
    operation_of,
)
from jaxmem.reports.xla.schedule import HOST, collective_bytes, collective_of, sent_by
from jaxmem.reports.xla.traffic import traffic
from jaxmem.targets import Target


@dataclasses.dataclass(frozen=True, slots=True)
class KernelRun:
    """What one instruction takes in one run of the program: how often it runs, its seconds
    altogether (of a copy or a collective, those that the device waits for it), and its kernel
    (None: it is a copy or a collective)."""

    name: str
    times: int
    seconds: float
    kernel: CompiledKernel | None = None


class KernelSchedule:
    """The kernels of one run of a program on a device, in order, loops unrolled by their counts."""

    def __init__(self, hlo: str, target: Target):
        self._computations = computations_of(hlo)
        self._target = target
        self._run = functools.cache(self._of)
        self.ran = self._run(entry_of(hlo))

    def _of(self, computation: str) -> tuple[KernelRun, ...]:
        """One run of a computation. Links to other devices and to the host are two streams beside
        the kernels; what is started waits for its stream, and whoever reads it for its end."""
        lines = self._computations[computation]
        found: list[KernelRun] = []
        now = 0.0
        free = {"devices": 0.0, "host": 0.0}  # from when on a stream is free
        ends: dict[str, float] = {}
        for name, line in lines.items():
            operation = operation_of(line)
            sent, inside = sent_by(line, lines, self._computations)
            link = _link(line, sent)
            if operation.endswith("-done"):
                waited = max(ends.get(operands_of(line)[0], now) - now, 0.0)
                found.append(KernelRun(name, 1, waited))
            elif link:
                ends[name] = free[link] = max(now, free[link]) + self._communication(sent, inside)
                waited = 0.0 if operation.endswith("-start") else ends[name] - now
                if waited:
                    found.append(KernelRun(name, 1, waited))
            else:
                ran = list(self._inside(name, line, lines))
                found += ran
                waited = sum(one.seconds for one in ran)
            now += waited
        return tuple(found)

    def _inside(self, name: str, line: str, lines: Lines) -> Iterator[KernelRun]:
        """The kernels of one instruction, those of what it calls among them."""
        calls = calls_of(line)
        if calls is None:
            kernel = kernel_of(name, lines, self._computations)
            if kernel.moved or kernel.flops:
                yield KernelRun(name, 1, seconds_of(kernel, self._target), kernel)
            return
        inner = [self._run(called) for called in calls.computations]
        if calls.is_branch:
            yield from max(inner, key=lambda ran: sum(one.seconds for one in ran), default=())
            return
        turns = 1 if calls.trip_count is None else calls.trip_count
        for one in itertools.chain.from_iterable(inner):
            yield dataclasses.replace(one, times=turns * one.times, seconds=turns * one.seconds)

    def _communication(self, line: str, lines: Lines) -> float:
        """Seconds on the link; a copy is read once and written once, so half of its traffic."""
        target, kind = self._target, collective_of(line)
        if kind:
            return collective_seconds(line, kind, collective_bytes(line, lines), target)
        moved = traffic(line, lines, self._computations) / 2
        return moved / (target.shares.link * target.host_bandwidth) + target.shares.launch


def _link(line: str, sent: str) -> str:
    """The stream of a copy or a collective; empty: it is a kernel."""
    if collective_of(sent):
        return "devices"
    kind = operation_of(line).removesuffix("-start")
    copies = kind in ("copy", "dynamic-slice", "dynamic-update-slice", "async")
    return "host" if copies and HOST in line.partition(", metadata=")[0] else ""
