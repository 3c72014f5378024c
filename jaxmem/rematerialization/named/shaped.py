"""A policy by operations and shapes, for regions that the user has placed, in scans too."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jaxmem import jaxprs
from jaxmem.ground.budget import Budget
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.ground.errors import BudgetError, PlanError
from jaxmem.planning import Names, RegionProgram, worth_most
from jaxmem.program import Kernel, Program, type_of
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.places import Groups, place_of_stretch
from jaxmem.rematerialization.plan_text import time_error_text
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.verdict import short_verdict
from jaxmem.targets import Target

# What a policy sees of an operation: its primitive, and the types of its operands.
Kind = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """Results that a policy saves: of which operation on operands of which types, their bytes in a
    step, how many there are, and the line of the first."""

    operation: str
    operands: tuple[str, ...]
    bytes: int
    count: int
    line: str


@dataclasses.dataclass(frozen=True, repr=False)
class ShapedPolicy(Printed, jaxprs.OperationPolicy):
    """A policy of `jax.checkpoint` by operations and the types of their operands:
    `jaxmem.remat_policy` makes it for a function.

    Attributes:
        saved: what it saves; what else is in the regions is recomputed.
        bytes: projected device bytes of ``value_and_grad(fun)``, with what is reserved.
        recompute_share: predicted seconds of recomputation, of those of a step without it.
        budget: the bytes that were allowed; None: the fewest were asked for.
        time_error: of predicted times, where it is known.
    """

    saved: tuple[Saved, ...] = ()
    bytes: int = 0
    recompute_share: float = 0.0
    budget: int | None = None
    time_error: float | None = None

    def _parts(self) -> Iterable[Part]:
        yield (
            f"{short_verdict(self.bytes, self.budget)} (projected), {self.recompute_share:.1%} "
            f"slower {time_error_text(self.time_error)}"
        )
        if not self.saved:
            yield "saves nothing: regions are recomputed as a whole"
            return
        rows = [
            (
                format_bytes(one.bytes),
                f"x {one.count}" if one.count > 1 else "",
                f"{one.operation}({', '.join(one.operands)})",
                one.line,
            )
            for one in self.saved
        ]
        yield Table(("saves", "", "of", "at"), rows, left=(2, 3))


class _Kinds:
    """The operations in the regions of a function, by what a policy sees of them.

    Attributes:
        lines: the line of the first operation of each kind.

    Raises:
        PlanError: the function has no regions.
    """

    def __init__(self, traced: TracedFunction, device: Target | None):
        self.traced, self.device = traced, device
        self.stretch = _nameless(jaxprs.region_structure(traced.closed))
        self.lines: dict[Kind, str] = {}

        def read(program, stretch, spans) -> tuple[frozenset[int], ...]:
            for kind, kernel in _operations(program, stretch, spans):
                step = stretch.flat.steps[kernel.operations[-1]]
                self.lines.setdefault(kind, step.line)
            return ()

        if not any(place.spans for place, _ in self._place(read).all()):
            raise PlanError(
                "The function has no regions for a policy to act in. Put its blocks under "
                "jax.checkpoint, nn.remat or nnx.remat first, or let jaxmem.remat place regions."
            )

    def place(self, kinds: Sequence[Kind]) -> RegionProgram:
        """The function by its regions; what a kind makes is chosen together."""
        number = {kind: at for at, kind in enumerate(kinds)}

        def groups(program, stretch, spans) -> tuple[frozenset[int], ...]:
            found: list[set[int]] = [set() for _ in kinds]
            for kind, kernel in _operations(program, stretch, spans):
                if kind in number:
                    found[number[kind]].update(kernel.results)
            return tuple(map(frozenset, found))

        return self._place(groups)

    def _place(self, groups: Groups) -> RegionProgram:
        return place_of_stretch(self.traced, self.stretch, self.device, groups)


def shaped_policy(traced: TracedFunction, limits: Limits) -> ShapedPolicy:
    """Of all policies that save by kind the one that recomputes the least within the budget, or,
    without one, takes the fewest bytes.

    Raises:
        PlanError: the function has no regions.
        BudgetError: no policy is projected to fit.
    """
    rates, device = limits.rates, limits.target
    kinds = _Kinds(traced, device)
    weighed = worth_most(list(kinds.lines), kinds.place, rates)
    place = kinds.place(weighed)
    names = Names(place, len(weighed), rates)
    budget = limits.budget.reserve(place.program.boundary_bytes)
    chosen = names.best_for(budget.available)
    total = budget.total(names.projected_of(chosen))
    if not budget.fits(total):
        raise _too_small(limits.budget, total)
    wanted = frozenset(weighed[at] for at in chosen.saved)

    def saves(primitive, /, *avals, **_) -> bool:
        return (primitive.name, *map(type_of, avals)) in wanted

    saved = (_saved(place, at, weighed[at], kinds.lines[weighed[at]]) for at in chosen.saved)
    return ShapedPolicy(
        saves,
        tuple(sorted(saved, key=lambda one: (-one.bytes, one.operation, one.operands))),
        total,
        chosen.seconds / max(3 * rates.forward(place.program), 1e-12),
        limits.budget.allowed,
        device.time_error if device else None,
    )


def _operations(
    program: Program, stretch: jaxprs.RegionStructure, spans
) -> Iterator[tuple[Kind, Kernel]]:
    """What a policy can save of the regions of a program: results of operations that are computed
    into memory."""
    for start, stop in spans:
        for kernel in program.kernels[start:stop]:
            if not kernel.fused and kernel.residuals is None:
                step = stretch.flat.steps[kernel.operations[-1]]
                operands = [atom.aval for atom in step.equation.invars]
                yield (step.primitive, *map(type_of, operands)), kernel


def _nameless(stretch: jaxprs.RegionStructure) -> jaxprs.RegionStructure:
    """Without names, which such a policy does not ask for."""
    scans = tuple((at, _nameless(scan)) for at, scan in stretch.scans)
    return dataclasses.replace(stretch, names=(), scans=scans)


def _saved(place: RegionProgram, number: int, kind: Kind, line: str) -> Saved:
    size = count = 0
    for one, times in place.all():
        values = one.groups[number]
        size += times * sum(one.program.sizes[value] for value in values)
        count += times * len(values)
    return Saved(kind[0], kind[1:], size, count, line)


def _too_small(given: Budget, lowest: int) -> BudgetError:
    allowed = given.allowed or 0
    return BudgetError(
        f"No policy for these regions fits the budget of {given}; the "
        f"lowest found takes {format_against(lowest, allowed)} ({lowest} bytes projected). Raise "
        "the budget, or let jaxmem.remat place and nest regions.",
        lowest,
    )
