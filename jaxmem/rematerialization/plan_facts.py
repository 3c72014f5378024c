"""What a plan says beside its regions: its costs, whom it is for, and what was there before."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem.ground.plain_data import fields_from_plain
from jaxmem.rematerialization.timelines import UNKNOWN, PlanTimeline
from jaxmem.targets import FAMILIES, Family, Rules, family_of


@dataclasses.dataclass(frozen=True, slots=True)
class Predicted:
    """What a plan costs by jaxmem's own arithmetic.

    Attributes:
        plain_bytes, bytes: projected, without and with the regions, of the whole of
            ``value_and_grad(fun)``: arguments, gradients, residuals and what is reserved.
        flops: of the forward pass (matmuls and convolutions); ``recompute_flops`` and
            ``recompute_moved`` (bytes read and written) are what the plan adds.
        seconds, recompute_seconds: of the plain forward pass and of what the plan adds, at the
            target's rates.
        host_bytes: of the residuals that are copied to host memory, in no other count;
            ``host_peak``: the most of them that are there at once.
        timeline, plain_timeline: projected bytes along the step, with and without the regions.
    """

    plain_bytes: int
    bytes: int
    flops: int
    recompute_flops: int
    recompute_moved: int = 0
    seconds: float = 0.0
    recompute_seconds: float = 0.0
    host_bytes: int = 0
    host_peak: int = 0
    timeline: PlanTimeline = UNKNOWN
    plain_timeline: PlanTimeline = UNKNOWN

    @property
    def recompute_share(self) -> float:
        """Seconds of recomputation, of those of a plain step: three times a forward pass."""
        return self.recompute_seconds / max(3 * self.seconds, 1e-30)  # a program may do nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What a function costs with the user's own regions, by jaxmem's own arithmetic: projected
    bytes and seconds of a forward pass as in `Predicted`, and what the regions recompute."""

    bytes: int
    recompute_flops: int
    recompute_seconds: float
    seconds: float

    @property
    def recompute_share(self) -> float:
        """Seconds of recomputation, of those of a plain step: three times a forward pass."""
        return self.recompute_seconds / max(3 * self.seconds, 1e-30)  # a program may do nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA's compiler says of a plan, for the target: device bytes, FLOPs (matmuls and
    convolutions) and bytes read and written of the whole of ``value_and_grad(fun)``.
    ``xla_pass_bytes`` are the bytes with XLA's own rematerialization pass on, where it would act.
    ``host`` are the bytes in host memory: XLA may have there at once what could take turns.
    ``timeline`` has the bytes along the compiled schedule, where a plan fits. ``options`` are names
    and values of flags without which XLA does not compile it.
    """

    bytes: int
    flops: int | None = None
    moved: int | None = None
    xla_pass_bytes: int | None = None
    timeline: PlanTimeline = UNKNOWN
    options: tuple[tuple[str, Any], ...] = ()
    host: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedFor:
    """What a plan is made for.

    Attributes:
        family: the name of the target's; empty: there is no target.
        rules: the target's, by which it was told what the kernels are.
        target: its name.
        time_error: how far predicted times may be off there (`Target.time_error`).
    """

    family: str = ""
    rules: Rules = dataclasses.field(default_factory=Rules)
    target: str = ""
    time_error: float | None = None

    @property
    def compiler(self) -> Family:
        return FAMILIES[self.family] if self.family else family_of(None)

    @classmethod
    def from_plain(cls, row: Mapping[str, Any], name: str) -> "PlannedFor":
        """What JSON has of it; the family says how rules are read."""
        fields = fields_from_plain(cls, row, name, {"rules": Rules()})
        if fields["family"] not in {"", *FAMILIES}:
            raise ValueError(f"{name}.family is not known: {fields['family']!r}")
        found = cls(**fields)
        rules = Rules.read(row["rules"], found.compiler.splitting, f"{name}.rules")
        return dataclasses.replace(found, rules=rules)


@dataclasses.dataclass(frozen=True, slots=True)
class OwnRegions:
    """The regions that a function has already: how many the plan takes the place of; those stay
    where they are ``kept``. ``written`` is what they cost; None: there are none."""

    count: int = 0
    kept: bool = False
    written: Written | None = None
