"""What a plan or a policy may cost, and on what."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem.ground.budget import Budget
from jaxmem.ground.bytes import device_budget, parse_budget
from jaxmem.planning import Rates
from jaxmem.targets import Target, example_target, resolve


@dataclasses.dataclass(frozen=True)
class Limits:
    """What something may cost, and on what: a budget; a target, None: nothing is compiled; whether
    residuals may wait in host memory; how much may be compiled, and with the XLA flags of who
    compiles it in the end."""

    budget: Budget
    target: Target | None
    offload: bool = False
    compilations: int = 8  # chosen: it bounds the time; most searches end sooner
    options: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, budget, reserved, target, offload: bool = False) -> "Limits":
        """From what a user writes."""
        chosen = None if target is None else resolve(target)
        limits = (chosen.usable_bytes, chosen.name) if chosen else ()
        capacity = chosen.usable_bytes if chosen else None
        allowed = None if budget is None else device_budget(budget, *limits)
        parsed = parse_budget(reserved, capacity, what="reserved size", least=0)
        return cls(
            Budget(allowed, parsed),
            chosen.known if chosen else None,
            offload,
        )

    @property
    def rates(self) -> Rates:
        """Those of the target, or of one that stands for none."""
        device = self.target or example_target()
        return Rates(device, device.host_bandwidth if self.offload else 0.0)
