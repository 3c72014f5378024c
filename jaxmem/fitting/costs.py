"""What a step of some levers takes, by jaxmem's own arithmetic: plans, bytes and seconds."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem.fitting.levers import LEVERS, Levers
from jaxmem.fitting.sizes import bytes_of, slice_of, whole
from jaxmem.fitting.table import Candidate
from jaxmem.fitting.workload import Workload
from jaxmem.ground.budget import Budget
from jaxmem.ground.errors import BudgetError
from jaxmem.planning import Layout, Planner, baseline_policies, per_block_layouts
from jaxmem.program import Become, Program, inputs_in_another_order, with_gradients
from jaxmem.rematerialization import (
    Constraints,
    Limits,
    Plan,
    TracedFunction,
    WithOwnRegions,
    Written,
    own_regions_cost,
)

# Kept at a time. Chosen: a program of 2,000 kernels takes a few MB, a planner 50 MB. The search
# comes back to the settings that it looked at last. Half and twice change no answer, only what is
# made again.
_PROGRAMS, _PLANNERS = 16, 4


class Costs:
    """Plans of a workload's levers, each made once, with their bytes and seconds."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self._plans: dict[tuple, Plan | int] = {}
        self._lowest: dict[tuple, int] = {}  # bytes of a plan of these levers, at least
        self._program = functools.lru_cache(_PROGRAMS)(self._read)
        self._relaid = functools.cache(self._relaid_bytes)  # asked for with every budget
        self._planner = functools.lru_cache(_PLANNERS)(self._make_planner)
        self._plain_layout = functools.lru_cache(_PROGRAMS)(self._make_plain_layout)

    def plan(self, levers: Levers, budget: int | None) -> Plan | int:
        """The plan within a budget of the whole step (None: without recomputation), or the lowest
        budget that has one."""
        workload, limits = self.workload, self.budget(levers, budget)
        left = limits.available if limits.available is None else max(limits.available, 1)
        offload = workload.offload and budget is not None
        loss = _of_loss(levers)
        key, lowest = (loss, left, offload), self._lowest.get((loss, offload), 0)
        if left is not None and left < lowest:
            return limits.total(lowest)
        if key not in self._plans:
            constraints = self._constraints(offload, left or 2**62)
            program, plain = self._program(loss), self._plain_layout(loss)
            try:
                self._plans[key] = (
                    constraints.plan_without_recomputation(program, plain)
                    if left is None
                    else constraints.plan(program, self._planner(loss, offload), plain)
                )
            except BudgetError as error:
                self._plans[key] = self._lowest[loss, offload] = error.lowest or 0
        found = self._plans[key]
        return limits.total(found) if isinstance(found, int) else found

    def _constraints(self, offload: bool, left: int = 2**62) -> Constraints:
        limits = Limits(Budget(left), self.workload.device, offload)
        return Constraints(limits, "dp", self._keeps_regions)

    @property
    def _keeps_regions(self) -> bool:
        return "regions" in self.workload.keep

    def _traced(self, loss: Levers) -> TracedFunction:
        """The loss of one slice of the batch."""
        workload, step = self.workload.on(loss), self.workload.step(loss)
        state = workload.state(loss)
        args = (state.params, workload.batch, state.model_state, state.key)
        cut = loss.microbatches
        if step.slices_sharding(state, workload.batch) is not None:
            # Each device takes slices of its own part, with nothing of the others.
            args, cut = jax.tree.map(whole, args), cut * workload.devices
        params, batch, *others = args
        batch = jax.tree.map(lambda leaf: slice_of(leaf, cut), batch)
        return TracedFunction(
            step.loss,
            (params, batch, *others),
            {},
            0,
            open_regions=not self._keeps_regions,
            target=workload.device,
            gradient_bytes=list(map(bytes_of, jax.tree.leaves(workload.gradients(loss)))),
            gradients_become=_become(loss),
        )

    def _read(self, loss: Levers) -> Program:
        return self._traced(loss).program

    def program(self, levers: Levers) -> Program:
        """The loss with some levers."""
        return self._program(_of_loss(levers))

    def own_regions_cost(self) -> Written | None:
        """What the loss costs with its own regions, everything else as it is: bytes of the whole
        step; None: it has none, or they stay."""
        as_is = self.workload.as_is
        if not self.plain_plan(as_is).own_regions.count:
            return None
        found = own_regions_cost(self._traced(_of_loss(as_is)), self._constraints(False))
        return found and dataclasses.replace(found, bytes=self.budget(as_is).total(found.bytes))

    def baseline_policies(self) -> Iterator[tuple[str, int, float]]:
        """The policies of `jax.checkpoint` on every block of the loss, everything else as it is:
        name, projected bytes and predicted seconds of the whole step."""
        as_is = self.workload.as_is
        limits, constraints = self.budget(as_is), self._constraints(False)
        program = self.program(as_is)
        total = limits.reserve(constraints.budget_for(program).reserved).total
        plain = self.without_recomputation(as_is).seconds
        found = baseline_policies(constraints.as_run(program), constraints.rates)
        for name, layout in found.items():
            yield name, total(layout.peak), plain + layout.seconds

    def baseline_candidates(
        self, levers: Levers, seconds: float, budget: float
    ) -> Iterator[Candidate]:
        """What a line of the author's would do: the regions that the loss has, then, fastest first,
        one on every block or on the bodies of scans, then nothing; of it what takes less time than
        that and is projected to take no more bytes."""
        loss, slices = _of_loss(levers), levers.microbatches
        constraints, program = self._constraints(False), self._program(loss)
        planner, plain = self._planner(loss, False), self.without_recomputation(levers)
        limits = self.budget(levers).reserve(constraints.budget_for(program).reserved)
        found = [
            (plain.seconds + slices * layout.seconds, layout)
            for layout in per_block_layouts(planner, constraints.as_run(program), constraints.rates)
            if limits.total(layout.peak) <= budget
        ]
        if program.inlined_checkpoints:
            own = self._as_written(levers)
            if own.seconds < seconds and (own.projected or 0) <= budget:
                yield own
        for time, layout in sorted(found, key=lambda row: row[0]):
            if time < seconds:
                yield self.candidate_of(
                    levers, constraints.write(program, layout, self._plain_layout(loss))
                )
        if plain.seconds < seconds and (plain.projected or 0) <= budget:
            yield plain

    def _as_written(self, levers: Levers) -> Candidate:
        """The loss with its own regions."""
        own = WithOwnRegions(self._traced(_of_loss(levers)), self._constraints(False))
        return self.candidate_of(levers, own.projected())

    def _make_planner(self, loss: Levers, offload: bool) -> Planner:
        return self._constraints(offload).planner(self._program(loss))

    def _make_plain_layout(self, loss: Levers) -> Layout:
        return self._constraints(False).plain_layout(self._program(loss))

    def plain_plan(self, levers: Levers) -> Plan:
        """The plan without recomputation."""
        found = self.plan(levers, None)
        assert isinstance(found, Plan)
        return found

    def without_recomputation(self, levers: Levers) -> Candidate:
        """The levers without recomputation."""
        return self.candidate_of(levers, self.plain_plan(levers))

    def candidate_of(self, levers: Levers, plan: Plan) -> Candidate:
        """A plan with the bytes and seconds of the whole step."""
        limits, predicted = self.budget(levers), plan.predicted
        slices = levers.microbatches
        seconds = slices * (3 * predicted.seconds + predicted.recompute_seconds)
        host = 2 * (self.workload.host_bytes(levers) + slices * predicted.host_bytes)
        projected = limits.total(plan.projected_bytes)
        return Candidate(levers, plan, projected, seconds + self.overhead(levers), host)

    def bound(self, levers: Levers) -> float:
        """No plan of these levers takes less time."""
        changing = [lever for lever in LEVERS.values() if lever.changes_loss]
        workload, values = self.workload, levers.to_dict()
        least = workload.as_is.replace(
            **{
                lever.name: lever.fastest_loss_value(workload, values[lever.name])
                for lever in changing
            }
        )
        more = sum(lever.least_seconds(self, levers, least) for lever in changing)
        return 3 * (self.plain_plan(least).predicted.seconds + more) + self.overhead(levers)

    def argument_bytes(self, levers: Levers) -> int:
        """Bytes of the arguments: no plan of these levers takes fewer."""
        workload = self.workload.on(levers)
        state = workload.state(levers)
        return bytes_of(state.opt_state) - workload.host_bytes(levers) + bytes_of(state.params)

    def trained(self, params: Any) -> list[Any]:
        """The leaves of a tree of parameters that gradients are computed of: the rest is not read
        by the loss, or by a `jax.lax.stop_gradient` alone, or its gradient not by the update."""
        return [
            leaf
            for leaf, is_trained in zip(jax.tree.leaves(params), self._trained, strict=True)
            if is_trained
        ]

    @functools.cached_property
    def _trained(self) -> list[bool]:
        program = self._program(_of_loss(self.workload.as_is))
        found = with_gradients(program)
        return [value in found for value in sorted(program.differentiated or ())]

    def gradients(self, levers: Levers) -> list[Any]:
        """Abstract gradients as they lie, those that are computed."""
        return self.trained(self.workload.on(levers).gradients(levers))

    def relaid_bytes(self, levers: Levers) -> int:
        """Of parameters and batch in another order, which XLA lays them out in before a loop over
        slices, for a library; but for one slice, which the loss has."""
        return self._relaid(_of_loss(levers))

    def _relaid_bytes(self, loss: Levers) -> int:
        program = self._constraints(False).as_run(self._program(loss))
        params = program.differentiated or frozenset()
        return sum(
            program.sizes[value] * (1 if value in params else loss.microbatches - 1)
            for value in inputs_in_another_order(program)
        )

    def overhead(self, levers: Levers) -> float:
        """Seconds of a step outside the loss and its gradient."""
        workload = self.workload.on(levers)
        params = bytes_of(self.trained(workload.state(levers).params))
        moments = bytes_of(workload.state(levers).opt_state)
        moved = 3 * params + 2 * moments  # parameters and gradients read, parameters written
        added = sum(lever.seconds(self, levers) for lever, _ in levers.used())
        return moved / workload.device.memory_bandwidth + added

    def budget(self, levers: Levers, allowed: int | None = None) -> Budget:
        """A budget of the whole step on each device, of which the optimizer's state and what the
        levers add are reserved; the loss, its arguments and gradients are planned."""
        workload = self.workload.on(levers)
        reserved = bytes_of(workload.state(levers).opt_state) + sum(
            lever.reserved_bytes(self, levers) for lever, _ in levers.used()
        )
        return Budget(allowed, reserved)


def _become(loss: Levers) -> Become:
    """What becomes of a step's gradients. Where they are scattered (stage 3) XLA puts off those of
    weights, and holds cotangents until then (64 of 187 MiB of ten layers on eight devices): to
    count gradients from the beginning is nearer there (benchmarks/scale/stages.py)."""
    if loss.stage == 3:
        return "results"
    return "summands" if loss.microbatches > 1 else "updates"


def _of_loss(levers: Levers) -> Levers:
    """Those that the program of the loss depends on."""
    return levers.only(lambda lever: lever.changes_loss)
