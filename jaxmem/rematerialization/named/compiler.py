"""Policies in the regions of a function, compiled for a target."""

import functools
import math
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError, OffloadError
from jaxmem.jaxprs import internals
from jaxmem.planning import ARITHMETIC_WEIGHT, NamedChoice
from jaxmem.rematerialization.corrections import Outcome
from jaxmem.rematerialization.named.choices import NamedChoices
from jaxmem.rematerialization.search import PendingCompilation
from jaxmem.reports import Compiling, MemoryReport, begin
from jaxmem.targets import Target, family_of

RATIO_KEY = "names"  # of all choices: their projections are off alike


class NamedCompiler:
    """Compiles choices over names, and policies of `jax.checkpoint_policies` by what JAX calls
    them, in the place of the policies that a function's regions have.

    Attributes:
        reports: of what was compiled.
        notes: what was refused, and why.
    """

    def __init__(self, choices: NamedChoices, target: Target):
        self.choices, self.limits, self.target = choices, choices.limits, target
        self.reports: dict[NamedChoice | str, MemoryReport] = {}
        self.notes: list[str] = []

    def start(self, one: NamedChoice | str) -> PendingCompilation:
        """Begins to compile one."""
        if isinstance(one, str):
            policy, said = getattr(jax.checkpoint_policies, one), one
        else:
            policy = self.choices.policy_of(one)
            said = f"{format_bytes(self.choices.projected(one))} projected"
        made = self._begin(policy)
        made.start()
        return PendingCompilation(said, functools.partial(self._finish, one, made), made.stop)

    def _finish(self, one: NamedChoice | str, made: Compiling) -> Outcome:
        try:
            report = made.report()
        except JaxmemError as error:
            refused = not isinstance(one, str) and one.offloaded and isinstance(error, OffloadError)
            if not (refused or isinstance(one, str)):
                raise
            return self._refused(one, str(error))
        if not isinstance(one, str) and 2 * report.host < one.host:
            names = ", ".join(self.choices.names[at] for at in sorted(one.offloaded))
            return self._refused(one, f"XLA keeps {names} on the device")
        self.reports[one] = report
        total = self.limits.budget.total(report.device)
        said = f" {one if isinstance(one, str) else 'names'} for {self.target.name}: "
        said += format_bytes(total)
        if isinstance(one, str):
            return Outcome(said, math.inf, total, total, one)
        seconds = one.seconds - float(self.choices.found.tables.seconds[self._number(one)])
        price = self.price(report) + self.choices.found.waiting * seconds
        return Outcome(said, price, self.choices.projected(one), total, RATIO_KEY)

    def _refused(self, one: NamedChoice | str, why: str) -> Outcome:
        if not isinstance(one, str):
            self.notes.append(f"not offloaded: {why}")
        return Outcome(f": {why}", math.inf, 1, None, one)

    def _number(self, one: NamedChoice) -> int:
        return sum(1 << at for at in one.saved | one.offloaded)

    def _begin(self, policy: Any) -> Compiling:
        """The function with another policy in its regions, traced and lowered."""
        traced, target, limits = self.choices.traced, self.target, self.limits
        call = internals.jaxpr_as_fun(jaxprs.with_policy(traced.closed, policy))

        def fun(*leaves):
            return traced.value(jax.tree.unflatten(traced.out_tree, call(*leaves)))

        options = family_of(target).limit_options(limits.budget.available)
        return begin(
            jax.jit(traced.differentiated(fun)),
            *traced.leaves,
            target=target,
            compiler_options=options | dict(limits.options or {}),
            timeline=False,
        )

    def price(self, report: MemoryReport) -> float:
        """What a compiled program costs: its arithmetic several times, as where plans are compared,
        and what it moves."""
        device = self.target
        return ARITHMETIC_WEIGHT * self._second_per_flop * report.work.flops + report.moved / (
            device.shares.memory * device.memory_bandwidth
        )

    @functools.cached_property
    def _second_per_flop(self) -> float:
        """Of the program's matmuls and convolutions, by their dtypes."""
        device, work, seconds = self.target, 1, 0.0
        for place, times in self.choices.place.all():
            for number, kernel in enumerate(place.program.kernels):
                if kernel.flops and number not in place.scans:
                    rate = device.flops_per_second(kernel.dtype or "float32", "highest")
                    work += times * kernel.flops
                    seconds += times * kernel.flops / (device.shares.matmul * rate)
        return seconds / work

    @functools.cached_property
    def plain_flops(self) -> int:
        """FLOPs of a step without recomputation: where XLA's own pass acts on that program, those
        of another less what it recomputes."""
        plain, target = self.reports.get("everything_saveable"), self.target
        if plain and plain.device <= family_of(target).remat_pass_threshold * target.memory_bytes:
            return max(plain.work.flops, 1)
        chosen = ((one, of) for one, of in self.reports.items() if isinstance(one, NamedChoice))
        one, report = min(chosen, key=lambda pair: pair[1].device)
        return max(report.work.flops - one.flops, 1)

    def note_pass(self, report: MemoryReport) -> None:
        """Notes where XLA's own rematerialization pass may act."""
        target = self.target
        if report.device > family_of(target).remat_pass_threshold * target.memory_bytes:
            self.notes.append(
                "near the device's memory XLA's own rematerialization pass acts too: what it "
                "recomputes is among these FLOPs"
            )
