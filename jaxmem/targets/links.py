"""How fast devices send to each other."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """Devices that send to each other: how many, and how far apart their numbers are."""

    devices: int
    stride: int = 1


# Devices of a node. Derived: of all targets that have links, and of servers that are rented.
NODE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second that a device sends: to others of its node, of which there are so many, and
    over the network to those of other nodes."""

    inside: float
    network: float
    node: int = NODE

    def bandwidth_in_group(self, count: int, stride: int = 1) -> float:
        """What each of so many devices sends to the next in a ring of every ``stride``-th one:
        within a node by its links, between nodes by what the devices of one send together."""
        together = max(self.node // stride, 1)
        if count <= together:
            return self.inside
        return min(self.inside, together * self.network)
