"""What a compiled step takes of one memory, the device's or the host's."""

import dataclasses
from collections.abc import Mapping

_ANALYSED = ("argument", "output", "alias", "temp")  # what XLA's memory analysis tells
ROLES = (*_ANALYSED, "constant")


@dataclasses.dataclass(frozen=True)
class Totals:
    """Bytes by XLA's buffer assignment; ``alias`` are outputs that reuse a donated argument,
    ``constant`` arrays that are part of the program: a step's function closes over them."""

    argument: int
    output: int
    alias: int
    temp: int
    constant: int = 0

    @classmethod
    def read(cls, stats: Mapping[str, int], prefix: str = "", constant: int = 0) -> "Totals":
        """From XLA's memory analysis, whose names for host memory begin with ``host_``, and which
        leaves constants out."""
        argument, output, alias, temp = (stats[prefix + role] for role in _ANALYSED)
        return cls(argument, output, alias, temp, constant)

    @property
    def total(self) -> int:
        """Argument + output - alias + temp + constant."""
        return self.argument + self.output - self.alias + self.temp + self.constant


class Sized:
    """Bytes of a step by memory and by role, from its totals ``on_device`` and ``on_host``."""

    on_device: Totals
    on_host: Totals

    @property
    def device(self) -> int:
        """Peak device bytes of the step: argument + output - alias + temp + constant."""
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
