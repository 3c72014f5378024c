"""How long a kernel of a compiled program takes on a device, and a collective among several."""

from jaxmem.reports.speed.kernels import CompiledKernel
from jaxmem.reports.xla.groups import first_group
from jaxmem.targets import Target

# What each device sends, of the bytes of the whole, in a ring of so many devices.
_RINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


def seconds_of(kernel: CompiledKernel, target: Target) -> float:
    """The longer of a kernel's arithmetic and its memory traffic, which overlap in it, and its
    launch (a roofline: Williams, Waterman and Patterson 2009)."""
    arithmetic, traffic = parts_of(kernel, target)
    return max(arithmetic, traffic) + target.shares.launch


def parts_of(kernel: CompiledKernel, target: Target) -> tuple[float, float]:
    """Seconds of a kernel's arithmetic and of its memory traffic."""
    shares, one = target.shares, kernel.contraction
    traffic = kernel.moved / (shares.memory * target.memory_bandwidth)
    if one is None:
        return 0.0, traffic
    reached = shares.convolution if one.kind == "convolution" else shares.matmul
    busy = target.share_of(one.rows, one.columns, one.depth, one.batch)
    peak = target.flops_per_second(one.dtype, one.precision)
    return kernel.flops / (reached * busy * peak), traffic


def collective_seconds(line: str, kind: str, moved: int, target: Target) -> float:
    """A collective in a ring, on the slowest link of its group."""
    group = first_group(line, target.count)
    count, apart = len(group), int(group[1] - group[0]) if len(group) > 1 else 1
    if count < 2:
        return target.shares.launch
    sent = moved * _RINGS.get(kind, 1) * ((count - 1) / count if kind in _RINGS else 1)
    return target.sending_seconds(sent, count, max(apart, 1)) + target.shares.launch
