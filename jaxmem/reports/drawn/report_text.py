"""A memory report as it is printed."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxmem.ground.bytes import format_bytes
from jaxmem.reports.cpu import CPU_NOTE, is_cpu
from jaxmem.reports.drawn.breakdown import Breakdown
from jaxmem.reports.drawn.grouping import common_path, grouped, without_numbers
from jaxmem.reports.drawn.tables import Part, Table
from jaxmem.reports.drawn.text import columns, truncate
from jaxmem.reports.drawn.verdict import verdict
from jaxmem.reports.where.padding import WORTH_A_LOOK

if TYPE_CHECKING:
    from jaxmem.reports.report import MemoryReport
    from jaxmem.reports.where.peak import Buffer

_BUFFERS = 6  # rows; the page has all of them
_EQUAL = 3  # modules of the same bytes that are worth one row


def report_parts(report: "MemoryReport", budget: int | None = None) -> Iterator[Part]:
    """Whether it fits a budget (None: what is usable on the target), the totals and, of what was
    compiled with a timeline, what is alive at the peak."""
    yield verdict(report.device, budget, report.target.usable_bytes)
    yield f"compiled for {report.target}"
    yield _totals(report)
    if is_cpu(report.target):
        yield f"note: {CPU_NOTE}"
    if report.cliff is not None and report.cliff.near:
        yield f"note: {report.cliff.summary}"
    if " while(" in report.hlo and (loops := report.work.uncounted):
        counts = "1 loop counts" if loops == 1 else f"{loops} loops count"
        yield f"note: how often it runs is not known: {counts} once in FLOPs, bytes moved and time"
    if report.has_timeline and report.on_chip:
        sizes = report.on_chip.items()
        yield f"on the chip: {', '.join(f'{name} {format_bytes(size)}' for name, size in sizes)}"
    if report.has_timeline:
        yield ""
        yield from _peak(report)


def _totals(report: "MemoryReport") -> Table:
    on_device, on_host = report.on_device, report.on_host
    rows = [
        ("argument", on_device.argument, on_host.argument),
        ("output", on_device.output, on_host.output),
        ("alias", -on_device.alias, -on_host.alias),
        ("temp", on_device.temp, on_host.temp),
        ("constant", on_device.constant, on_host.constant),
        ("total", on_device.total, on_host.total),
    ]
    few = 1 + on_device.total // 1000  # single numbers are constants too
    least = {"total": 0, "constant": few}
    shown = [row for row in rows if max(map(abs, row[1:])) >= least.get(row[0], 1)]
    count = 2 if on_host.total or on_host.argument or on_host.temp else 1
    cells = [
        (name, *(format_bytes(size).rjust(14) if size else "" for size in sizes[:count]))
        for name, *sizes in shown
    ]
    return Table(("", "device", "host")[: count + 1], cells, left=(0,))


def _peak(report: "MemoryReport") -> Iterator[Part]:
    at = report.peak_operation
    where = " · ".join([at.operation, at.module, at.source])
    start = f"peak {format_bytes(report.peak_bytes)} in the {at.phase} phase, at "
    yield start + truncate(where, columns() - len(start))
    yield ""
    yield report.by_phase.table("by phase"), report.by_kind.table("by kind")
    yield report.by_source.table("by line")
    yield _rolled_up(report.by_module).table("by module")
    yield _buffers(report.peak)
    yield from _padding(report)


def _padding(report: "MemoryReport") -> Iterator[Part]:
    """What padding to whole tiles costs, where that is worth a look."""
    total = sum(one.padding for one in report.padding)
    if total < WORTH_A_LOOK * report.device:
        return
    rows = [(format_bytes(one.padding), str(one)) for one in report.padding[:_BUFFERS]]
    yield Table(("", ""), rows, f"padding to tiles: {format_bytes(total)}", (1,))


def _rolled_up(rows: Breakdown, depth: int = 2) -> Breakdown:
    """Module paths cut to their first parts, those of equal bytes that differ by their number
    as one, largest first; rows in parentheses stay last."""
    total: Counter[str] = Counter()
    for name, size in rows.items():
        total[name if name.startswith("(") else "/".join(name.split("/")[:depth])] += size
    found: dict[str, int] = {}
    names = list(total)
    for alike in grouped(names, lambda name: (without_numbers(name), total[name])):
        size = total[alike[0]]
        if len(alike) < _EQUAL:
            found |= dict.fromkeys(alike, size)
        else:
            each = f"{common_path(alike)} (x {len(alike)}, {format_bytes(size)} each)"
            found[each] = size * len(alike)
    return Breakdown(sorted(found.items(), key=lambda row: (row[0].startswith("("), -row[1])))


def _buffers(buffers: "tuple[Buffer, ...]") -> Table:
    def alike(one: "Buffer"):
        what = one.bytes, one.shape, one.dtype, one.operation, one.source, one.phase, one.kind
        return without_numbers(one.module), *what

    groups = grouped([one for one in buffers if one.bytes], alike)
    groups.sort(key=lambda group: -group[0].bytes * len(group))
    rows = []
    for group in groups[:_BUFFERS]:
        one = group[0]
        shape = truncate(f"{one.dtype}{list(one.shape)}".replace(" ", ""), 24)
        module = common_path([each.module for each in group])
        where = " · ".join([one.operation, module, one.source])
        times = f"x {len(group)}" if len(group) > 1 else ""
        rows.append((format_bytes(one.bytes * len(group)), times, shape, one.phase, where))
    return Table(("",) * 5, rows, "largest buffers at the peak, equal ones together", (2, 3, 4))
