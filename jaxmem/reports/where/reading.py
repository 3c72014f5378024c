"""The map of a step's memory, from what XLA wrote at the compilation."""

import dataclasses
import gzip
from collections.abc import Mapping, Sequence

import jaxlib

from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.totals import ROLES, Totals
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.peak import MemoryMap
from jaxmem.reports.where.timeline import Timeline
from jaxmem.reports.xla.dump import read_dump, read_totals

DUMPED = ("buffer-assignment", "live-range")


def totals_of(buffers: str) -> tuple[Totals, Totals]:
    """What a program takes on the device and on the host, by the text of its buffer assignment.

    Raises:
        JaxmemError: this version's text is not known.
    """
    assignment = read_totals(buffers, jaxlib.__version__)
    device, host = (
        Totals(*(assignment.total(role, on_host=on_host) for role in ROLES))
        for on_host in (False, True)
    )
    return device, host


def live_of(dump: Mapping[str, bytes]) -> tuple[int, ...]:
    """Live device bytes at each point of the schedule, by the texts of `DUMPED`, compressed."""
    buffers, ranges = (gzip.decompress(dump[name]).decode() for name in DUMPED)
    return tuple(Timeline(read_dump(buffers, ranges, jaxlib.__version__)).live.tolist())


def read_map(
    dump: Mapping[str, bytes],
    hlo: str,
    arguments: Sequence[Argument | None],
    on_device: Totals,
    on_host: Totals,
) -> MemoryMap:
    """Which buffers lie where and when, and who made them.

    Args:
        dump: the texts of `DUMPED`, compressed by gzip.
        hlo: the optimised program.
        arguments: those that the program kept, in its order.
        on_device, on_host: XLA's totals, which those of the dump must equal.

    Raises:
        JaxmemError: they do not: this version's dump is not read right.
    """
    version = jaxlib.__version__
    buffers, ranges = (gzip.decompress(dump[name]).decode() for name in DUMPED)
    assignment = read_dump(buffers, ranges, version)
    for totals, prefix in ((on_device, ""), (on_host, "host_")):
        for role, size in dataclasses.asdict(totals).items():
            read = assignment.total(role, on_host=bool(prefix))
            if read != size:
                raise JaxmemError(
                    f"XLA's dump (jax {version}) has {read} bytes of {prefix}{role} and its "
                    f"memory analysis {size}: jaxmem does not read this version's dump right. "
                    "The totals are not touched by this."
                )
    return MemoryMap(assignment, hlo, arguments)
