"""A plan: which stretches of a program are regions, and what that is expected to cost."""

import dataclasses
import json

from jaxmem._bytes import format_bytes
from jaxmem._errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Operations ``start`` to ``stop - 1`` under one `jax.checkpoint`, recomputed in the backward
    pass; ``kept_bytes`` are those of its results that later operations read, and
    ``recompute_flops`` what its recomputation costs (matmuls and convolutions)."""

    start: int
    stop: int
    kept_bytes: int
    recompute_flops: int
    path: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Regions of one program, in order, and the bytes and FLOPs that they are projected to cost.

    Attributes:
        planner: the name of the planner that made it.
        fingerprint: of the program it belongs to; it refuses any other.
        regions: what is recomputed. Operations outside them keep their residuals.
        operations: number of operations of the program.
        flops: FLOPs of one forward pass (matmuls and convolutions).
        plain_bytes: projected peak of the residuals without any region.
        projected_bytes: projected peak with the regions. Both are bytes beyond the program's
            inputs, by jaxmem's own arithmetic; `jaxmem.memory` has the compiler's.
        reserved: bytes of the budget spoken for outside what is planned.
        budget: bytes asked for, or None for the least memory.
    """

    planner: str
    fingerprint: str
    regions: tuple[Region, ...]
    operations: int
    flops: int
    plain_bytes: int
    projected_bytes: int
    reserved: int = 0
    budget: int | None = None

    @property
    def recompute_flops(self) -> int:
        """FLOPs of the forward pass that the backward pass does again."""
        return sum(region.recompute_flops for region in self.regions)

    def check(self, fingerprint: str) -> None:
        """Raises `PlanError` if the plan was made for another program."""
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"This plan was made for the program {self.fingerprint}, and is asked to run "
                f"{fingerprint}. A plan holds for one function at one set of shapes and dtypes; "
                "make another with jaxmem.plan()."
            )

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is not a plan.
        """
        try:
            fields = json.loads(text)
            fields["regions"] = tuple(Region(**region) for region in fields["regions"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(
                f"This is not the JSON of a plan ({error}); pass text that Plan.to_json() wrote."
            ) from error

    def __str__(self):
        share = f", {self.recompute_flops / self.flops:.0%} of the forward pass" * bool(self.flops)
        lines = [
            f"{self.planner} plan of {self.operations} operations in {len(self.regions)} regions "
            f"(program {self.fingerprint})",
            f"  projected {format_bytes(self.projected_bytes)} of residuals, "
            f"{format_bytes(self.plain_bytes)} without regions",
            f"  recomputes {self.recompute_flops / 1e9:.4g} GFLOP{share}",
        ]
        if self.budget is not None:
            lines.append(
                f"  budget {format_bytes(self.budget)}, of which {format_bytes(self.reserved)} "
                "reserved"
            )
        if self.regions:
            lines.append(f"  {'operations':>12}  {'keeps':>11}  {'GFLOP':>9}  ends in")
        for region in self.regions:
            lines.append(
                f"  {region.start:>5}-{region.stop - 1:<6}  {format_bytes(region.kept_bytes):>11}"
                f"  {region.recompute_flops / 1e9:>9.4g}  {region.path}"
            )
        return "\n".join(lines)

    __repr__ = __str__
