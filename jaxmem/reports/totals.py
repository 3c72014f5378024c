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
