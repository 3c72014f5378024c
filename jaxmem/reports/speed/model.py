"""How long a kernel of a compiled program takes on a device, and a collective among several."""

import re

import numpy as np

from jaxmem.reports.speed.kernels import Kernel
from jaxmem.targets import Target

_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# What each device sends, of the bytes of the whole, in a ring of so many devices.
_RINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


def seconds_of(kernel: Kernel, target: Target) -> float:
    """The longer of a kernel's arithmetic and its memory traffic, which overlap in it, and its
    launch (a roofline: Williams, Waterman and Patterson 2009)."""
    arithmetic, traffic = parts_of(kernel, target)
    return max(arithmetic, traffic) + target.shares.launch


def parts_of(kernel: Kernel, target: Target) -> tuple[float, float]:
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
    group = _group(line, target.count)
    count, apart = len(group), int(group[1] - group[0]) if len(group) > 1 else 1
    if count < 2:
        return target.shares.launch
    sent = moved * _RINGS.get(kind, 1) * ((count - 1) / count if kind in _RINGS else 1)
    bandwidth = target.shares.link * target.links.among(count, max(apart, 1))
    return sent / bandwidth + target.shares.launch


def _group(line: str, count: int) -> np.ndarray:
    """The devices of the first group."""
    listed = _GROUPS.search(line)
    if listed and listed[1]:
        return np.array([int(one) for one in listed[1].split(",")])
    iota = _IOTA.search(line)
    if not iota:
        return np.arange(count)
    shape = [int(one) for one in iota[3].split(",")]
    devices = np.arange(np.prod(shape)).reshape(shape)
    if iota[4]:
        devices = devices.transpose([int(one) for one in iota[4].split(",")])
    return devices.reshape(int(iota[1]), int(iota[2]))[0]
