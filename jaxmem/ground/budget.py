"""The arithmetic of a budget: what is allowed, less what is spoken for."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Device bytes that are allowed on each device.

    Attributes:
        allowed: bytes; None: as few as there are.
        reserved: of them, spoken for outside what is planned.
        share: among how many devices the program that is planned is divided evenly.
    """

    allowed: int | None
    reserved: int = 0
    share: int = 1

    @property
    def left(self) -> int | None:
        """Bytes that a plan of the whole program may take, all devices together."""
        return None if self.allowed is None else (self.allowed - self.reserved) * self.share

    def total(self, planned: int) -> int:
        """Bytes on each device, with what is reserved, of a plan that takes so many."""
        return -(-planned // self.share) + self.reserved

    def fits(self, total: int) -> bool:
        """Whether so many bytes on each device are allowed."""
        return self.allowed is None or total <= self.allowed
