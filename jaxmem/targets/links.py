"""How fast devices send to each other."""

import dataclasses
import math
from collections.abc import Collection

from jaxmem.targets.shares import AchievableShares


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """Devices that send to each other: how many, and how far apart their numbers are."""

    devices: int
    stride: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Devices that take part in a collective: how many, and how many of each node."""

    devices: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Of how many nodes they are."""
        return math.ceil(self.devices / self.per_node)


# Devices of a node. Derived: of all targets that have links, and of servers that are rented.
NODE = 8

# How often the bytes of the whole, less a device's own part, go around a ring.
TURNS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second that a device sends: to others of its node, of which there are so many, and
    over the network to those of other nodes.

    ``kind`` is what links those of a node: ``"NVLink"``, ``"PCIe"`` or ``"ICI"`` (a TPU's). Where
    its switches can sum, ``sums`` is the share of ``inside`` at which they do.
    """

    inside: float
    network: float
    node: int = NODE
    kind: str = ""
    sums: float = 0.0

    def reached(self, shares: AchievableShares) -> "Links":
        """As fast as programs find them."""
        return dataclasses.replace(
            self, inside=shares.link * self.inside, network=shares.network * self.network
        )

    def group_of(self, devices: Collection[int]) -> Group:
        """Devices by their numbers, those of a node after each other."""
        nodes = len({device // self.node for device in devices})
        return Group(len(devices), math.ceil(len(devices) / nodes))

    def ring(self, count: int, stride: int = 1) -> Group:
        """So many devices, every ``stride``-th one."""
        return Group(count, min(count, max(self.node // stride, 1)))

    def bandwidth_in(self, group: Group) -> float:
        """What each device sends to the next in a ring: within a node by its links, between nodes
        by what those of one send together."""
        if group.nodes == 1:
            return self.inside
        return min(self.inside, group.per_node * self.network)


def sent_in_ring(kind: str, size: int, devices: int) -> float:
    """Bytes that each device sends in a ring, of a collective of so many bytes."""
    return size * TURNS[kind] * (devices - 1) / devices if kind in TURNS else size
