"""What a compiled step takes of one memory, the device's or the host's."""

import dataclasses
from collections.abc import Mapping

ROLES = ("argument", "output", "alias", "temp")


@dataclasses.dataclass(frozen=True)
class Totals:
    """Bytes by XLA's buffer assignment; ``alias`` are outputs that reuse a donated argument."""

    argument: int
    output: int
    alias: int
    temp: int

    @classmethod
    def read(cls, stats: Mapping[str, int], prefix: str = "") -> "Totals":
        """From XLA's memory analysis, whose names for host memory begin with ``host_``."""
        return cls(*(stats[prefix + role] for role in ROLES))

    @property
    def total(self) -> int:
        """Argument + output - alias + temp."""
        return self.argument + self.output - self.alias + self.temp


class Sized:
    """Bytes of a step by memory and by role, from its totals ``on_device`` and ``on_host``."""

    on_device: Totals
    on_host: Totals

    @property
    def device(self) -> int:
        """Peak device bytes of the step: argument + output - alias + temp."""
        return self.on_device.total

    @property
    def host(self) -> int:
        """Peak host bytes of the step."""
        return self.on_host.total

    @property
    def argument(self) -> int:
        """Device bytes that the arguments take."""
        return self.on_device.argument

    @property
    def output(self) -> int:
        """Device bytes that the results take, donated arguments with them."""
        return self.on_device.output

    @property
    def alias(self) -> int:
        """Device bytes of results that reuse a donated argument."""
        return self.on_device.alias

    @property
    def temp(self) -> int:
        """Device bytes of everything else that the step makes."""
        return self.on_device.temp
