"""A plan: what a program saves and recomputes, and what that is expected to cost."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jaxmem.ground.budget import Budget
from jaxmem.ground.errors import PlanError
from jaxmem.ground.plain_data import from_plain
from jaxmem.planning import Loop, Region, Segment
from jaxmem.program import Program, apply_compiler_rules
from jaxmem.rematerialization import plan_text
from jaxmem.rematerialization.bounds import Bound, bound_of
from jaxmem.rematerialization.choices import Choice, Row
from jaxmem.rematerialization.emission import planned_function
from jaxmem.rematerialization.layout_check import misfits
from jaxmem.rematerialization.named.policy import NamedPolicy
from jaxmem.rematerialization.plan_facts import Compiled, OwnRegions, PlannedFor, Predicted
from jaxmem.reports.drawn.tables import Part, Printed
from jaxmem.targets import Rules, Target


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Printed):
    """A tree of regions for one program, with what each saves, and what it costs.

    Attributes:
        planner: the name of the planner that made it.
        fingerprint: of the program it belongs to; it refuses any other.
        regions: what is recomputed. Kernels outside them keep their residuals.
        loops: what the scans of the program save and recompute of their bodies.
        segments: stretches of operations under `jax.checkpoint` as their author would write it,
            in place of regions of kernels, which then say what they come to.
        predicted: bytes, FLOPs and seconds by jaxmem's own arithmetic.
        compiled: bytes and FLOPs by XLA; None: not compiled.
        rows, choices: the plan in words: its regions, and its larger values.
        reserved: bytes of the budget spoken for outside of the function.
        budget: bytes asked for, or None.
        planned_for: the accelerator, and its compiler.
        widens_bfloat16: whether the target has no bfloat16 units and the program has matmuls or
            convolutions in bfloat16: computed in float32, from copies.
        inputs: dtypes and shapes of the arrays that the program takes.
        differentiated: the numbers of those that gradients are taken of; None: of all.
        own_regions: those that the function has already.
        has_plainer_gathers: whether gathers of the function are written as what they are.
    """

    planner: str
    fingerprint: str
    regions: tuple[Region, ...]
    loops: tuple[Loop, ...]
    predicted: Predicted
    segments: tuple[Segment, ...] = ()
    compiled: Compiled | None = None
    rows: tuple[Row, ...] = ()
    choices: tuple[Choice, ...] = ()
    reserved: int = 0
    budget: int | None = None
    planned_for: PlannedFor = dataclasses.field(default_factory=PlannedFor)
    widens_bfloat16: bool = False
    inputs: tuple[str, ...] = ()
    differentiated: tuple[int, ...] | None = None
    own_regions: OwnRegions = dataclasses.field(default_factory=OwnRegions)
    has_plainer_gathers: bool = False
    # What it was made of: the function, its abstract arguments, and how it is differentiated.
    _call: ClassVar[Any] = None

    @property
    def target(self) -> str:
        """The name of the accelerator that it is planned for; empty: none was named."""
        return self.planned_for.target

    @property
    def time_error(self) -> float | None:
        """How far its predicted times may be off; None: unchecked."""
        return self.planned_for.time_error

    @property
    def plain_bytes(self) -> int:
        """Projected bytes of the function as it is, without any regions of its own."""
        return self.predicted.plain_bytes

    @property
    def projected_bytes(self) -> int:
        """Bytes by jaxmem's own arithmetic."""
        return self.predicted.bytes

    @property
    def host_peak(self) -> int:
        """Bytes in host memory at once: by XLA, or projected where it is not compiled."""
        return self.compiled.host if self.compiled else self.predicted.host_peak

    @property
    def compiled_bytes(self) -> int | None:
        """Bytes by XLA, or None: not compiled."""
        return self.compiled.bytes if self.compiled else None

    @property
    def allowance(self) -> Budget:
        """The budget, with what of it is reserved."""
        return Budget(self.budget, self.reserved)

    @functools.cached_property
    def bound(self) -> Bound | None:
        """The least FLOPs of any schedule within the budget, or, without one, within the bytes that
        the plan takes; the plan prints it from then on. It takes about as long as planning does.
        None: not known, of a plan that was read from JSON, that has residuals in host memory, or
        that is for several devices."""
        return bound_of(self)

    @property
    def recomputes(self) -> bool:
        """Whether anything is recomputed, or waits in host memory."""
        return bool(self.regions or self.loops or self.predicted.recompute_seconds)

    @property
    def keeps_own_regions(self) -> bool:
        """Whether the function's own regions stay, as nothing better was found in their place."""
        return bool(self.own_regions.kept and self.own_regions.count)

    @property
    def changes(self) -> bool:
        """Whether the planned function is another program than the function: derivatives of
        jaxmem's own, which take other bytes than JAX's, are in it without regions too."""
        derived = self.has_plainer_gathers or self.projected_bytes != self.plain_bytes
        return bool(self.recomputes or self.widens_bfloat16 or self.own_regions.count or derived)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What ``jax.jit(..., compiler_options=)`` needs to compile the program that was planned:
        XLA's own rematerialization pass off, and the one that makes what several scans begin with
        all at once; where bfloat16 is widened to float32, its rounding on (XLA leaves it out, and
        keeps float32 where the program has bfloat16); where states of a loop wait in host memory,
        the scheduler that copies them beside its steps; where a compiler's scheduler spends all
        that it may, the budget as its limit."""
        own = self.compiled.options if self.compiled else ()
        return self.options_for(self.budget) | dict(own)

    def options_for(self, limit: int | None) -> dict[str, Any]:
        """`compiler_options` for a program that may take so many bytes of a device."""
        copies = self.predicted.host_peak > 0
        return self.planned_for.compiler.planned_options(limit, self.widens_bfloat16, copies)

    @property
    def rules(self) -> Rules:
        """How the target's compiler fuses and lays out."""
        return self.planned_for.rules

    def apply(self, fun: Callable) -> Callable:
        """``fun`` with the plan's regions: `jaxmem.remat` with ``plan=``."""
        kept = self.own_regions.kept
        return planned_function(fun, self.layout_for, kept, self.differentiated)

    def layout_for(
        self, program: Program, inputs: Callable[[], Sequence[tuple[str, str]]]
    ) -> "Plan":
        """The plan itself, checked to be one of this program; ``inputs`` returns the names of what
        the program takes, with dtype and shape.

        Raises:
            PlanError: it was made for another program, or was changed since.
        """
        if program.fingerprint != self.fingerprint:
            raise PlanError(plan_text.other_program(self, program.fingerprint, inputs()))
        emitted = apply_compiler_rules(program, self.rules)
        for what in misfits(emitted, self.regions, self.loops, self.segments):
            raise PlanError(f"The plan has {what}, which its program has not. Make another one.")
        return self

    def to_html(self, path: str | os.PathLike, *, name: str = "") -> None:
        """Writes one self-contained page: bytes against time of the plan and of the function as
        it is, both timelines, and what is done with the values of each module and line, and why.

        Args:
            path: of the file.
            name: of the function, for the title.
        """
        from jaxmem.rematerialization.choice_page import page_of_plans

        pathlib.Path(path).write_text(page_of_plans([self], name=name), encoding="utf-8")

    def explain(self, path: str) -> str:
        """Why the values made at a module path (or source line) are saved or not, those of equal
        layers together.

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
        return plan_text.explanation(self, found)

    def as_policy(
        self,
        fun: Callable | None = None,
        *args: Any,
        offload: bool = False,
        fixed: Mapping[str, str] | None = None,
        target: str | Target | None = None,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        compilations: int = 8,  # chosen: it bounds the time; most searches end sooner
        compiler_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> NamedPolicy:
        """The plan for a trainer that is not yours to wrap: the best policy over the names that the
        program has (`jax.ad_checkpoint.checkpoint_name`). The regions that hold them stay where
        they are, and the policy is what the trainer is to put there: it is within this plan's
        budget, compiled for its target, and recomputes the least of all choices over the names.

        Args:
            fun, *args, **kwargs: the function that was planned; None: as `jaxmem.plan` was given
                them. A plan that was read from JSON needs them.
            offload: whether names in the bodies of scans may wait in host memory.
            fixed: names whose choice is given, ``"save"``, ``"offload"`` or ``"recompute"``.
            target: where the plan's own is none that `jaxmem.target` knows by name.
            argnums, has_aux: as for `jax.value_and_grad`, where ``fun`` is given.
            compilations: how many choices are compiled at most, three of JAX's own policies beside
                them; 0: none.
            compiler_options: the XLA flags that the trainer compiles with; None: XLA's defaults.

        Raises:
            PlanError: the program has no names in regions, or not the ``fixed`` ones; or ``fun`` is
                not the function that was planned.
            BudgetError: no choice fits; names the lowest bytes found.
            OffloadError: XLA keeps on the device what is fixed to be in host memory.
        """
        from jaxmem.rematerialization.named.call import policy_of

        given = {"argnums": argnums, "has_aux": has_aux}
        call = self._call if fun is None else (fun, args, kwargs, given)
        limits = {"offload": offload, "compilations": compilations, "options": compiler_options}
        return policy_of(self, call, fixed or {}, target, limits)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_call"}

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is not a plan; says where.
        """
        try:
            return from_plain(cls, json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(
                f"This is not the JSON of a plan ({error}); pass text that Plan.to_json() wrote."
            ) from error

    def _parts(self) -> Iterable[Part]:
        return plan_text.plan_parts(self)
