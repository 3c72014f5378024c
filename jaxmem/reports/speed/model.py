"""How long a kernel of a compiled program takes on a device, and a collective among several."""

import dataclasses

from jaxmem.reports.speed.kernels import CompiledKernel
from jaxmem.reports.xla.groups import first_group, pairs_of
from jaxmem.targets import Target


@dataclasses.dataclass(frozen=True, slots=True)
class KernelParts:
    """Seconds of a kernel: of its arithmetic, for what its operands come from a cache longer than
    that, of its memory traffic, which overlaps with both, and before and after it, of arrays that
    are turned for it."""

    arithmetic: float
    feeding: float
    traffic: float
    turning: float = 0.0

    @property
    def seconds(self) -> float:
        """The longer of what overlaps (a roofline: Williams, Waterman and Patterson 2009), and the
        rest."""
        return max(self.arithmetic + self.feeding, self.traffic) + self.turning


def seconds_of(kernel: CompiledKernel, target: Target) -> float:
    """Of a kernel, and of its launch."""
    return parts_of(kernel, target).seconds + target.shares.launch


def parts_of(kernel: CompiledKernel, target: Target) -> KernelParts:
    """Of what a kernel takes."""
    shares, one = target.shares, kernel.contraction
    moved = kernel.moved + sum(
        target.bytes_beside_rows(rows.table, rows.moved, rows.piece) for rows in kernel.rows
    )
    traffic = moved / (shares.memory * target.memory_bandwidth)
    if one is None:
        return KernelParts(0.0, 0.0, traffic)
    computed, turned, reached = 1.0, 0.0, shares.matmul
    if one.kind == "convolution":
        computed, turned = target.convolving(
            one.window, one.channels_last, one.dtype, one.precision
        )
        reached = shares.convolution
    busy = target.share_of(one.rows, one.columns, one.depth, one.batch)
    flops = computed * kernel.flops / busy
    arithmetic = flops / (reached * target.flops_per_second(one.dtype, one.precision))
    feeding = target.feeding_seconds(flops, one.dtype)
    return KernelParts(arithmetic, feeding, traffic, turned * traffic)


def collective_seconds(line: str, kind: str, moved: int, target: Target) -> float:
    """A collective of so many bytes among the devices of its group."""
    groups = pairs_of(line).tolist() or [first_group(line, target.count).tolist()]
    # The slowest counts: one that passes from node to node.
    group = max(map(target.links.group_of, groups), key=lambda group: group.nodes)
    if group.devices < 2:
        return target.shares.launch
    return target.collective_seconds(kind, moved, group)
