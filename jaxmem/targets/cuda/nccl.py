"""How long a collective takes among GPUs: NCCL has several algorithms for it, each in several
protocols, and takes the one that it counts to end first."""

import dataclasses
import math
from collections.abc import Iterator

from jaxmem.targets.links import TURNS, Group, Links


@dataclasses.dataclass(frozen=True, slots=True)
class _Protocol:
    """Microseconds until the first bytes leave, and of a step from one device to the next over each
    kind of link (nan: not used there); and the share that it reaches of what links reach."""

    start: float
    nvlink: float
    pcie: float
    network: float
    share: float


# Derived: the constants of NCCL's own model (2.28, src/graph/tuning.cc). A first protocol sends a
# flag with every four bytes, a second one with every 120, a last one none: it waits for blocks.
_RINGS = (
    _Protocol(6.6, 0.6, 1.0, 2.7, share=3 / 8),
    _Protocol(14.0, 1.9, math.nan, 4.0, share=0.92),
    _Protocol(8.4, 3.4, 5.7, 14.0, share=1.0),
)
_TREES = (
    _Protocol(6.8, 0.6, 1.0, 5.0, share=0.92 / 3.8),
    _Protocol(14.0, 1.25, math.nan, 8.5, share=0.92 * 7 / 9),
    _Protocol(8.4, 4.0, 4.0, 14.0, share=0.92),
)
_SWITCHES = _Protocol(0.0, 25.0, math.nan, 14.0, share=15 / 16)

# What pieces that wait for each other cost, of the mean of what comes before and what bytes take:
# 2 is the least for a pipeline of pieces of one size (Sanders, Speck and Träff 2009). Measured by
# others: fitted, with `AchievableShares.link` and ``network``, to half of the published
# times of ``benchmarks/speed/collectives.py``.
FILLING = 1.0


def seconds(kind: str, size: int, group: Group, links: Links, filling: float = FILLING) -> float:
    """Of a collective of so many bytes (`jaxmem.reports.xla.schedule.Collectives` says which), over
    links of rates that can be reached."""
    return min(
        start + size / rate + filling * math.sqrt(start * size / rate)
        for start, rate in _Ways(group, links).of(kind)
        if not math.isnan(start)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Ways:
    """The algorithms that there are for a group of devices."""

    group: Group
    links: Links

    def of(self, kind: str) -> Iterator[tuple[float, float]]:
        """Seconds until it is under way, and bytes of the collective per second from then on, of
        each way that there is."""
        if kind in ("all-to-all", "collective-permute"):
            yield self._directly(kind)
            return
        yield from (self._around(protocol, TURNS[kind]) for protocol in _RINGS)
        if kind == "all-reduce":
            yield from map(self._in_trees, _TREES)
            if self.links.sums and self.group.per_node > 2:
                yield self._in_switches()

    def _around(self, protocol: _Protocol, turns: int) -> tuple[float, float]:
        """In a ring: each device sends a piece to the next, as often as there are others; to sum,
        and once more what is summed (Patarasuk and Yuan 2009)."""
        between = turns * (self.group.nodes - 1)
        steps = turns * (self.group.devices - 1)
        rate = protocol.share * self.links.bandwidth_in(self.group) * self.group.devices / steps
        return self._start(protocol, steps - between, between), rate

    def _in_trees(self, protocol: _Protocol) -> tuple[float, float]:
        """Up and down two trees of nodes, each of half of the bytes, and a chain within each node
        (Sanders, Speck and Träff 2009)."""
        between = 2 * math.floor(math.log2(self.group.nodes))
        inside = 2 * (self.group.per_node - 1)
        rate = protocol.share * self.links.bandwidth_in(self.group) / 2
        return self._start(protocol, inside, between), rate

    def _in_switches(self) -> tuple[float, float]:
        """In the switches of each node, and in a tree of nodes (NVLink SHARP)."""
        inside = self.links.sums * self.links.inside * _SWITCHES.share
        between = 2 * math.floor(math.log2(self.group.nodes))
        if self.group.nodes == 1:
            return self._start(_SWITCHES, 1, 0), inside
        # A node of two sends what is its own once; one of more sends for those below it too.
        rate = self._network() * (1.0 if self.group.nodes == 2 else 0.5)
        return self._start(_SWITCHES, 1, between), min(inside, rate)

    def _directly(self, kind: str) -> tuple[float, float]:
        """From each device to those that want it, at once; each has one way into the network."""
        links, group, one_node = self.links, self.group, self.group.nodes == 1
        start = self._start(_RINGS[-1], 1, 0) if one_node else self._start(_RINGS[-1], 0, 1)
        if kind == "collective-permute":
            return start, links.inside if one_node else links.network
        inside = (group.per_node - 1) / group.devices / links.inside
        between = (group.devices - group.per_node) / group.devices / links.network
        return start, 1 / max(inside, between)

    def _start(self, protocol: _Protocol, inside: int, between: int) -> float:
        hop = protocol.nvlink if self.links.kind == "NVLink" else protocol.pcie
        waited = inside * hop if inside else 0.0  # no steps take no time, whatever one takes
        return 1e-6 * (protocol.start + waited + between * protocol.network)

    def _network(self) -> float:
        """What the devices of a node that take part send to other nodes, together."""
        return self.group.per_node * self.links.network
