"""The arithmetic of a budget: what is allowed, less what is spoken for."""

import dataclasses

from jaxmem.ground.bytes import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Device bytes that are allowed on each device.

    Attributes:
        allowed: bytes; None: as few as there are.
        reserved: of them, spoken for outside what is planned.
    """

    allowed: int | None
    reserved: int = 0

    @property
    def available(self) -> int | None:
        """Bytes that what is planned may take."""
        return None if self.allowed is None else self.allowed - self.reserved

    def reserve(self, more: int) -> "Budget":
        """The same, with so many more bytes reserved."""
        return Budget(self.allowed, self.reserved + more)

    def total(self, planned: int) -> int:
        """Bytes of a plan that takes so many, with what is reserved."""
        return planned + self.reserved

    def __str__(self) -> str:
        """Of a budget that is set, in words."""
        allowed, reserved = format_bytes(self.allowed or 0), format_bytes(self.reserved)
        if not self.reserved:
            return allowed
        if self.allowed is not None and self.reserved >= self.allowed:
            return f"{allowed}, all of which is reserved ({reserved})"
        return f"{allowed} with {reserved} of it reserved"

    def fits(self, total: int) -> bool:
        """Whether so many bytes on each device are allowed."""
        return self.allowed is None or total <= self.allowed
