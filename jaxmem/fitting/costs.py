"""What a step of some levers takes, by jaxmem's own arithmetic: plans, bytes and seconds."""

import dataclasses
import functools
from collections.abc import Iterator

import jax

from jaxmem.fitting.levers import Levers
from jaxmem.fitting.problem import Problem
from jaxmem.fitting.sizes import bytes_of, slice_of, whole
from jaxmem.fitting.table import Candidate
from jaxmem.ground.budget import Budget
from jaxmem.ground.errors import BudgetError
from jaxmem.planning import Planner, one_liners
from jaxmem.program import Program
from jaxmem.rematerialization import Constraints, Plan, TracedFunction, Written, written

# Kept at a time: a program of 2,000 kernels takes a few MB, a planner 50 MB. The search comes back
# to the settings that it looked at last.
_PROGRAMS, _PLANNERS = 16, 3


class Costs:
    """Plans of a problem's levers, each made once, with their bytes and seconds."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._plans: dict[tuple, Plan | int] = {}
        self._program = functools.lru_cache(_PROGRAMS)(self._read)
        self._planner = functools.lru_cache(_PLANNERS)(self._make_planner)

    def plan(self, levers: Levers, budget: int | None) -> Plan | int:
        """The plan within a budget of the whole step (None: without recomputation), or the lowest
        budget that has one."""
        problem, limits = self.problem, self.budget(levers, budget)
        left = limits.left if limits.left is None else max(limits.left, 1)
        offload = problem.offload and budget is not None
        loss = Levers(**{lever.name: v for lever, v in levers.used() if lever.changes_loss})
        key = (loss, limits.share, left, offload)
        if key not in self._plans:
            cut = levers.microbatches * problem.devices // limits.share
            # Of a share of a program on several GPUs the budget may be more than one has.
            constraints = self._constraints(offload, left or 2**62)
            try:
                planner = self._planner(loss, cut, offload)
                self._plans[key] = constraints.plan(self._program(loss, cut), planner)
            except BudgetError as error:
                self._plans[key] = error.lowest or 0
        found = self._plans[key]
        return limits.total(found) if isinstance(found, int) else found

    def _constraints(self, offload: bool, left: int = 2**62) -> Constraints:
        return Constraints(left, 0, self.problem.device, "dp", offload, self._keeps_regions)

    @property
    def _keeps_regions(self) -> bool:
        return "regions" in self.problem.keep

    def _traced(self, loss: Levers, cut: int) -> TracedFunction:
        """The loss of one slice of the batch, of so many."""
        problem, state = self.problem, self.problem.state(loss)
        part = jax.tree.map(lambda leaf: slice_of(leaf, cut), problem.batch)
        params, *others = jax.tree.map(whole, (state.params, state.model_state, state.key))
        args = (params, part, *others)
        return TracedFunction(
            problem.step(loss).loss,
            args,
            {},
            0,
            open_regions=not self._keeps_regions,
            several=False,  # an even share of what all devices take is counted
        )

    def _read(self, loss: Levers, cut: int) -> Program:
        return self._traced(loss, cut).program

    def written(self) -> Written | None:
        """What the loss costs with its own regions, everything else as it is: bytes of the whole
        step; None: it has none, or they stay."""
        as_is = self.problem.as_is
        if not self.plain(as_is).opened:
            return None
        limits = self.budget(as_is)
        cut = self.problem.devices // limits.share
        found = written(self._traced(as_is, cut), self._constraints(False))
        return found and dataclasses.replace(found, bytes=limits.total(found.bytes))

    def one_liners(self) -> Iterator[tuple[str, int, float]]:
        """The policies of `jax.checkpoint` on every block of the loss, everything else as it is:
        name, projected bytes and predicted seconds of the whole step."""
        as_is = self.problem.as_is
        limits, constraints = self.budget(as_is), self._constraints(False)
        program = self._program(as_is, self.problem.devices // limits.share)
        total = constraints.budget_for(program).total
        plain = self.priced(as_is, self.plain(as_is)).seconds
        found = one_liners(constraints.as_run(program), constraints.rates)
        for name, layout in found.items():
            size = limits.total(total(layout.peak))
            yield name, size, plain + layout.seconds / limits.share

    def _make_planner(self, loss: Levers, cut: int, offload: bool) -> Planner:
        return self._constraints(offload).planner(self._program(loss, cut))

    def plain(self, levers: Levers) -> Plan:
        """The plan without recomputation."""
        found = self.plan(levers, None)
        assert isinstance(found, Plan)
        return found

    def priced(self, levers: Levers, plan: Plan) -> Candidate:
        """A plan with the bytes and seconds of the whole step."""
        limits, predicted = self.budget(levers), plan.predicted
        slices = levers.microbatches
        seconds = slices * (3 * predicted.seconds + predicted.recompute_seconds) / limits.share
        host = 2 * (self.problem.host_bytes(levers) + slices * predicted.host_bytes)
        projected = limits.total(plan.projected_bytes)
        return Candidate(levers, plan, projected, seconds + self.overhead(levers), host)

    def bound(self, levers: Levers) -> float:
        """No plan of these levers takes less time: the whole batch at once takes the fewest
        launches and the least traffic of parameters."""
        plain = self.plain(self.problem.as_is.replace(precision=levers.precision))
        return 3 * plain.predicted.seconds / self.problem.devices + self.overhead(levers)

    def overhead(self, levers: Levers) -> float:
        """Seconds of a step outside the loss and its gradient."""
        problem = self.problem
        params = bytes_of(problem.state(levers).params)
        # 8-bit moments are expanded to be updated: they move as many bytes as whole ones.
        moments = bytes_of(problem.state(levers.replace(moments=False)).opt_state)
        moved = 3 * params + 2 * moments  # parameters and gradients read, parameters written
        added = sum(lever.seconds(problem, levers) for lever, _ in levers.used())
        return moved / problem.device.memory_bandwidth + added

    def budget(self, levers: Levers, allowed: int | None = None) -> Budget:
        """A budget of the whole step on each device, of which the optimizer's state and what the
        levers add are reserved; the loss, its arguments and gradients are planned."""
        share = self._share(levers)
        reserved = bytes_of(self.problem.state(levers).opt_state) + sum(
            lever.reserved_bytes(self.problem, levers, share) for lever, _ in levers.used()
        )
        return Budget(allowed, reserved, share)

    def _share(self, levers: Levers) -> int:
        """Among how many GPUs the program that is planned is divided: all of them, but where each
        takes slices of its own part."""
        problem = self.problem
        if problem.devices == 1 or levers.microbatches == 1:
            return problem.devices
        sharding = problem.step(levers).slices_sharding(problem.state(levers), problem.batch)
        return problem.devices if sharding is None else 1
