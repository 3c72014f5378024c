"""A plan: what a program saves and recomputes, and what that is expected to cost."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import PlanError

# XLA has a rematerialization pass of its own, which acts when a program passes some 80 % of the
# device. It pays recompute that no plan shows, so a plan is compiled without it.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


def checked(error: float | None) -> str:
    """What stands beside a predicted time: how far off it may be, if that has been measured."""
    return "(unchecked)" if error is None else f"±{error:.0%}"


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Kernels ``start`` to ``stop - 1`` under one `jax.checkpoint`, recomputed in the backward
    pass but for the values ``saved``; ``regions`` are nested in it."""

    start: int
    stop: int
    saved: tuple[int, ...] = ()
    regions: "tuple[Region, ...]" = ()


def place_of(regions: tuple[Region, ...], kernel: int) -> tuple[int, ...]:
    """A kernel's number, and the first and the last of the innermost region that it is in."""
    for region in regions:
        if region.start <= kernel < region.stop:
            inside = place_of(region.regions, kernel)
            return inside if len(inside) > 1 else (kernel, region.start, region.stop - 1)
    return (kernel,)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A `scan`, whose body is recomputed in the backward pass but for the values ``saved`` of it;
    ``regions`` are nested in the body. The values ``offloaded`` (inputs of the body among them)
    wait for the backward pass in host memory.

    ``kernel`` is its number in the program; values and ``regions`` are by the numbers of the body's
    own program. With ``segments`` above 1 it runs as a scan over so many scans, and only
    the carry between them is kept (Chen's sqrt(N) for loops).
    """

    kernel: int
    segments: int = 1
    saved: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    offloaded: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What a plan does with one value of the forward pass: ``"save"``, ``"recompute"`` or
    ``"offload"``, or ``"keep"`` (it is outside all regions).

    ``path`` and ``line`` are the module and the source line that made it, ``seconds`` the
    predicted time of making it once, ``times`` how often the backward pass does.
    """

    path: str
    line: str
    operation: str
    bytes: int
    seconds: float
    action: str
    times: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One region in the printed plan: its depth in the tree, where its kernels come from, and
    what it saves and runs again (FLOPs of matmuls and convolutions)."""

    depth: int
    first: str
    last: str
    saved_bytes: int
    kept_bytes: int
    flops: int


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A tree of regions for one program, with what each saves, and what it costs.

    Bytes are those of the whole of ``value_and_grad(fun)``: arguments, gradients, residuals and
    what is reserved.

    Attributes:
        planner: the name of the planner that made it.
        fingerprint: of the program it belongs to; it refuses any other.
        regions: what is recomputed. Kernels outside them keep their residuals.
        loops: what the scans of the program save and recompute of their bodies.
        plain_bytes, projected_bytes: by jaxmem's own arithmetic, without and with the regions.
        flops: of the forward pass (matmuls and convolutions); ``recompute_flops`` and
            ``recompute_moved`` (bytes read and written) are what the plan adds.
        seconds, recompute_seconds: predicted time of the plain forward pass and of what the plan
            adds, at the target's rates.
        rows, choices: the plan in words: its regions, and its larger values.
        reserved: bytes of the budget spoken for outside of the function.
        budget: bytes asked for, or None.
        target: name of the GPU that it is planned for.
        time_error: how far its predicted times may be off (`Target.time_error`); None: unchecked.
        widens: whether the target has no bfloat16 units and the program has matmuls or convolutions
            in bfloat16: computed in float32, from copies.
        host_bytes: of the residuals that wait in host memory, in no other count.
        compiled_bytes, compiled_flops, compiled_moved: device bytes, FLOPs (matmuls and
            convolutions) and bytes read and written of the whole of ``value_and_grad(fun)``, by
            XLA for the target; None: not compiled.
        xla_pass_bytes: compiled bytes with XLA's own rematerialization pass on, where it would act.
        inputs: dtypes and shapes of the arrays that the program takes.
    """

    planner: str
    fingerprint: str
    regions: tuple[Region, ...]
    loops: tuple[Loop, ...]
    plain_bytes: int
    projected_bytes: int
    flops: int
    recompute_flops: int
    recompute_moved: int = 0
    seconds: float = 0.0
    recompute_seconds: float = 0.0
    rows: tuple[Row, ...] = ()
    choices: tuple[Choice, ...] = ()
    reserved: int = 0
    host_bytes: int = 0
    budget: int | None = None
    target: str = ""
    time_error: float | None = None
    widens: bool = False
    compiled_bytes: int | None = None
    compiled_flops: int | None = None
    compiled_moved: int | None = None
    xla_pass_bytes: int | None = None
    inputs: tuple[str, ...] = ()

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What ``jax.jit(..., compiler_options=)`` needs to compile the program that was planned:
        XLA's own rematerialization pass off and, where bfloat16 is widened to float32, its rounding
        on (XLA leaves it out, and keeps float32 where the program has bfloat16)."""
        return COMPILER_OPTIONS | ({"xla_allow_excess_precision": False} if self.widens else {})

    def check(self, fingerprint: str, inputs: Sequence[tuple[str, str]]) -> None:
        """Raises `PlanError` if the plan was made for another program; ``inputs`` are the names of
        what the one at hand takes, with dtype and shape."""
        if fingerprint == self.fingerprint:
            return
        found = [kind for _, kind in inputs]
        differing = [
            f"{name} is {kind}, and the plan was made for {planned}"
            for (name, kind), planned in zip(inputs, self.inputs, strict=False)
            if kind != planned
        ]
        if len(found) != len(self.inputs):
            said = (
                f"it takes {len(found)} arrays, and the plan was made for {len(self.inputs)} "
                "(a Python number is none where the plan is made, and one under jax.jit: make it "
                "an array, such as jnp.float32(0.1), for both)"
            )
        elif differing:
            said = "; ".join(differing[:3]) + (" ..." if len(differing) > 3 else "")
        else:
            said = "its arrays are the same, and its operations are others"
        raise PlanError(
            f"This plan belongs to another program: {said}. A plan holds for one function at one "
            "set of shapes and dtypes. Make another with jaxmem.plan(), or leave it to "
            "jaxmem.remat(fun, budget=...), which plans at each new shape; where it is the last "
            "batch of an epoch that is smaller, leave it out or pad it. (Programs "
            f"{self.fingerprint} and {fingerprint}.)"
        )

    def apply(self, fun: Callable) -> Callable:
        """``fun`` with the plan's regions: `jaxmem.remat` with ``plan=``."""
        from jaxmem.rematerialization.planned import remat

        return remat(fun, plan=self)

    def explain(self, path: str) -> str:
        """Why the values made at a module path (or source line) are saved or not.

        Raises:
            PlanError: no value of the plan was made there.
        """
        found = [choice for choice in self.choices if path in f"{choice.path} {choice.line}"]
        if not found:
            paths = list(dict.fromkeys(c.path or c.line for c in self.choices))
            raise PlanError(
                f"No value of this plan was made at {path!r}. It has values of "
                f"{', '.join(paths[:8])}{', ...' * (len(paths) > 8)}; print(plan) shows the rest."
            )
        return "\n".join(map(self._reason, found))

    def _reason(self, choice: Choice) -> str:
        rate = choice.seconds / max(choice.bytes, 1) * 2**30
        made = f"{choice.operation} in {choice.path or 'the function'} ({choice.line})"
        cost = (
            f"{format_bytes(choice.bytes)}; making it again takes {choice.seconds * 1e6:.0f} us, "
            f"{rate * 1e3:.2f} ms per GiB {checked(self.time_error)}"
        )
        saved = [c for c in self.choices if c.action == "save"]
        again = [c for c in self.choices if c.action == "recompute"]

        def average(choices: list[Choice]) -> str:
            size = max(sum(c.bytes for c in choices), 1)
            rate = sum(c.seconds for c in choices) / size * 2**30
            return f"{rate * 1e3:.2f} ms per GiB {checked(self.time_error)}"

        why = {
            "keep": "it is outside of all regions, so nothing of it is recomputed",
            "offload": "it waits in host memory for the backward pass, beside which it is fetched",
            "save": "it is saved, and what is recomputed instead averages "
            + (average(again) if again else "nothing"),
            "recompute": f"it is recomputed {choice.times} times in the backward pass, and what "
            "is saved instead averages " + (average(saved) if saved else "nothing"),
        }[choice.action]
        return f"{made}: {cost}. In this plan {why}."

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
            fields["regions"] = _regions(fields["regions"])
            fields["loops"] = tuple(
                Loop(
                    row["kernel"],
                    row["segments"],
                    tuple(row["saved"]),
                    _regions(row["regions"]),
                    tuple(row["offloaded"]),
                )
                for row in fields["loops"]
            )
            fields["inputs"] = tuple(fields["inputs"])
            fields["rows"] = tuple(Row(**row) for row in fields["rows"])
            fields["choices"] = tuple(Choice(**choice) for choice in fields["choices"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(
                f"This is not the JSON of a plan ({error}); pass text that Plan.to_json() wrote."
            ) from error

    def __str__(self):
        share = ""
        if self.flops:  # a program may have no matmul
            share = f" ({self.recompute_flops / self.flops:.1%} of a forward pass)"
        lines = [
            f"{self.planner} plan, {len(self.rows)} regions (program {self.fingerprint})",
            f"  projected {format_bytes(self.projected_bytes)}, without regions "
            f"{format_bytes(self.plain_bytes)}",
        ]
        if self.compiled_bytes is not None:
            work = ""
            if self.compiled_flops is not None and self.compiled_moved is not None:
                work = f": {self.compiled_flops / 1e9:.4g} GFLOP, moves "
                work += format_bytes(self.compiled_moved)
            lines.append(f"  compiled  {format_bytes(self.compiled_bytes)} for {self.target}{work}")
        if self.widens:
            lines.append(f"  {self.target} computes bfloat16 in float32, from copies")
        if self.host_bytes:
            lines.append(f"  in host memory {format_bytes(self.host_bytes)}")
        if self.xla_pass_bytes is not None:
            lines.append(
                f"  XLA's own rematerialization pass would make it "
                f"{format_bytes(self.xla_pass_bytes)}; plan.compiler_options turns it off"
            )
        if self.budget is not None:
            lines.append(
                f"  budget    {format_bytes(self.budget)}, of which "
                f"{format_bytes(self.reserved)} reserved"
            )
        lines.append(
            f"  recomputes {self.recompute_flops / 1e9:.4g} GFLOP{share}, moves "
            f"{format_bytes(self.recompute_moved)}: about {self.recompute_seconds * 1e3:.3g} ms "
            f"beside {self.seconds * 3e3:.3g} ms {checked(self.time_error)} on "
            f"{self.target or 'the target'}"
        )
        if self.rows:
            lines.append(f"  {'saves':>11}  {'keeps':>11}  {'GFLOP again':>11}  region")
        for row in self.rows:
            where = row.first if row.first == row.last else f"{row.first} .. {row.last}"
            lines.append(
                f"  {format_bytes(row.saved_bytes):>11}  {format_bytes(row.kept_bytes):>11}  "
                f"{row.flops / 1e9:>11.4g}  {'  ' * row.depth}{where}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def _regions(rows: list[dict[str, Any]]) -> tuple[Region, ...]:
    return tuple(
        Region(row["start"], row["stop"], tuple(row["saved"]), _regions(row["regions"]))
        for row in rows
    )
