"""One call that makes a step fit: the search over the levers together."""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxmem import _jax
from jaxmem._bytes import device_budget, format_bytes
from jaxmem._checks import check_callable, check_optimizer, is_count
from jaxmem._errors import BudgetError, CompileError, JaxmemError
from jaxmem._independence import reduction_of
from jaxmem._problem import Allowed, Problem
from jaxmem.loss_scale import LossScale
from jaxmem.memory import MemoryReport, memory
from jaxmem.offloading import offload
from jaxmem.optim import small_moments
from jaxmem.planning import COMPILER_OPTIONS, Plan, checked
from jaxmem.precision import Precision, precision as parse_precision
from jaxmem.remat import remat
from jaxmem.sharding import Sharding, shard
from jaxmem.targets import LocalDevice, Target, resolve
from jaxmem.train import TrainState, TrainStep, train_step

# What changes the mathematics, and is searched where it is allowed:
ALLOWED = {
    "precision": "compute in bfloat16, with other rounding",
    "moments": "keep the optimizer's moments in 8 bits, with other rounding",
    "statistics": "cut a batch whose loss is not proved to be a mean over its examples",
}
# What does not, and is searched unless it is to be kept:
KEPT = {
    "batch": "cut the batch into microbatches",
    "placement": "keep the optimizer's state, or residuals of a scan, in host memory",
    "residuals": "recompute residuals",
}

_CLOSE = 0.97  # of the budget: no need to look for less recomputation
_NEAR = 1.2  # times the budget: near enough to try plans in between
_ABOVE = 1.06  # times the most that was tried: projected to take more, it may compile to less
_GAIN = 0.005  # of a step's time: what is worth one more compilation
_MOST_SLICES = 64
# Compiled bytes over projected ones, at most, before anything was compiled: networks were within
# 15 % (benchmarks/projected.py), microbatches of a small one 26 % off.
_FIRST_ERROR = 1.3


@dataclasses.dataclass(frozen=True, slots=True)
class Levers:
    """One setting of what a step is made of beside its plan.

    ``precision`` is its text ("" : as the function has it); ``moments`` and ``host`` say whether
    the optimizer's state is in 8 bits and whether it is in host memory; ``stage`` is ZeRO's on the
    mesh (0: there is none).
    """

    precision: str
    microbatches: int
    moments: bool = False
    host: bool = False
    stage: int = 0

    def __str__(self):
        parts = [self.precision or "precision as it is"]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches")
        if self.moments:
            parts.append("8-bit moments")
        if self.host:
            parts.append("state on the host")
        if self.stage:
            parts.append(f"ZeRO stage {self.stage}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A step that was considered.

    Attributes:
        levers, plan: how it is made; None: not planned, since it cannot be the fastest.
        projected: device bytes of the whole step by jaxmem's own arithmetic, of a plan.
        seconds: predicted time of one step on the target; without a plan, at best.
        host: bytes that cross the link to the host in a step.
        compiled: device bytes by XLA, or None: not compiled.
        verdict: why it was chosen or refused.
    """

    levers: Levers
    plan: Plan | None
    projected: int | None
    seconds: float
    host: int = 0
    compiled: int | None = None
    verdict: str = ""

    @property
    def remat(self) -> str:
        """The plan in two words."""
        if self.plan is None:
            return ""
        if not _recomputes(self.plan):
            return "none"
        again = self.plan.recompute_seconds / max(3 * self.plan.seconds, 1e-30)
        away = self.plan.host_bytes
        where = f", {format_bytes(away)} on the host" if away else ""
        return f"{self.plan.planner}, +{again:.1%}{where}"


@dataclasses.dataclass(frozen=True, repr=False)
class Fitting:
    """What `fit` considered: ``TrainStep.fitting`` of the step that it returns.

    Attributes:
        chosen: the candidate that became the step; None: nothing fits, or nothing was compiled.
        considered: every candidate, by predicted time.
        refused: what was not searched, by name, and why.
        budget, target: what for.
        report: of the chosen step, or of the one with the fewest bytes.

    Predicted times are printed with their error on the target (`Target.time_error`), or as
    "unchecked".
    """

    chosen: Candidate | None
    considered: tuple[Candidate, ...]
    refused: dict[str, str]
    budget: int
    target: Target | LocalDevice
    report: MemoryReport | None = dataclasses.field(compare=False)

    def __str__(self):
        lines = [f"jaxmem.fit: {format_bytes(self.budget)} on {self.target}"]
        rows: list[tuple[str, ...]] = [("", "recompute", "projected", "compiled", "ms a step", "")]
        for one in self.considered:
            sizes = [
                format_bytes(n) if n is not None else "" for n in (one.projected, one.compiled)
            ]
            rows.append(
                (str(one.levers), one.remat, *sizes, _milliseconds(one, self.target), one.verdict)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for name, *cells, verdict in rows:
            numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *numbers, verdict]).rstrip())
        lines += [f"not searched: {name}: {why}" for name, why in self.refused.items()]
        known = "have not been compared with a real GPU's"
        if _time_error(self.target) is not None:
            known = "are as far from measured ones on such a GPU as is printed (in the median)"
        how = "roofline, and the host link with nothing overlapped"
        lines.append(f"times are predicted ({how}) and {known}")
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The table as plain data."""

        def row(one: Candidate) -> dict[str, Any]:
            fields = ("projected", "compiled", "seconds", "host", "verdict")
            levers = dataclasses.asdict(one.levers)
            return levers | {"remat": one.remat} | {name: getattr(one, name) for name in fields}

        return {
            "budget": self.budget,
            "target": str(self.target),
            "time_error": _time_error(self.target),
            "chosen": self.chosen and row(self.chosen),
            "considered": [row(one) for one in self.considered],
            "refused": self.refused,
        }


def fit(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
    model_state: Any = None,
    key: jax.Array | None = None,
    precision: str | Precision | None = None,
    loss_scale: LossScale | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    allow: str | Collection[str] = (),
    keep: str | Collection[str] = (),
    compilations: int = 6,
) -> TrainStep:
    """The training step of the least predicted time whose compiled bytes fit a budget.

    Searches rematerialization plans (with residuals of a scan in host memory, where that takes less
    time), microbatches and the optimizer's state in host memory together, on a mesh ZeRO's stages,
    and what ``allow`` names besides. A candidate's time is predicted: its kernels by roofline, the
    update and the sums of gradients by the bytes they move, transfers to the host and between GPUs
    by the links, with nothing overlapped but those of residuals. Candidates are compiled for the
    target in the order of their times; what the compiler says of one corrects the projected bytes
    of the next. So the first that fits is the one, unless a nearer plan takes less recomputation.

    Everything that was considered is printed, with bytes, time and the reason for each refusal;
    it stays in ``step.fitting``.

    Args:
        loss_fn, optimizer: as for `jaxmem.train_step`; the optimizer not offloaded yet, if its
            place is to be searched.
        params, batch, model_state, key: what the step takes, real or abstract
            (`jax.ShapeDtypeStruct`): nothing is allocated. ``params`` may be a Flax nnx module.
        budget: device bytes for the whole step, an int or text; None: what is usable on the target,
            which counts too where the budget is more (`JaxmemWarning`).
        target: the GPU, present or not; None: the attached one.
        precision, loss_scale: as for `jaxmem.train_step`; not changed.
        mesh: of GPUs of the target, real or abstract: ZeRO's stages 1 to 3 along its last axis
            (`jaxmem.shard`) are searched too, and the budget is each GPU's.
        allow: what may be done although it changes the mathematics: ``"precision"`` (bfloat16
            compute by `jaxmem.autocast`), ``"moments"`` (`jaxmem.optim.small_moments`),
            ``"statistics"`` (microbatches where a slice's loss is not proved to be its share of the
            whole one: under batch norm each slice is normalised by its own statistics; a mean over
            what a mask leaves becomes a mean of means). That a loss is a mean, or a sum, over
            examples is proved from its program, for every size of slice that is searched; the
            table names the operation that stands in the way. From ``key`` each slice draws other
            random numbers (dropout masks) than the whole batch would.
        keep: what may not be done although it does not: ``"batch"`` (no microbatches),
            ``"placement"`` (no transfers to host memory), ``"residuals"`` (no recomputation).
        compilations: how many at most. Where they end before the search does, the table says so;
            the only one goes to a plan with room for what projections miss.

    Returns:
        A `TrainStep` whose ``fitting`` is the table, and which is compiled with XLA's own
        rematerialization pass off, as it was here.

    Raises:
        BudgetError: nothing that was compiled fits: names the lowest bytes met, what holds them,
            and what else could be allowed; or the budget does not parse.
        JaxmemError: an unknown name in ``allow`` or ``keep``, a target that is no known GPU, or
            what `jaxmem.train_step` raises.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> def loss_fn(params, batch):
    ...     return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)
    >>> params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    >>> batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    >>> step = jaxmem.fit(
    ...     loss_fn, optax.adam(1e-3), params, batch, budget="2GiB", target="h200"
    ... )  # doctest: +ELLIPSIS
    jaxmem.fit: 2.00 GiB on h200: NVIDIA H200, 141.00 GiB (140.50 GiB usable)
    ...
    >>> print(step.fitting.chosen.levers)
    precision as it is
    """
    search = Search(
        loss_fn,
        optimizer,
        params,
        batch,
        budget=budget,
        target=target,
        model_state=model_state,
        key=key,
        precision=precision,
        loss_scale=loss_scale,
        mesh=mesh,
        allow=allow,
        keep=keep,
    )
    step = search.run(compilations)
    print(step.fitting)
    return step


def advise(
    step: TrainStep, state: TrainState, batch: Any, budget: int, target: Target | LocalDevice
) -> str:
    """What `fit` would do for a step, by projected bytes: nothing is compiled."""
    call = "jaxmem.fit(loss_fn, optimizer, params, batch, ...)"
    try:
        search = Search(
            step.functional(),
            step.optimizer,
            state.params,
            batch,
            budget=budget,
            target=target,
            model_state=state.model_state,
            key=state.key,
            precision=step.precision,
            loss_scale=step.loss_scale,
            mesh=step.sharding.mesh if step.sharding else None,
        )
        found = search.projected()
    except JaxmemError as error:
        return f"{call} searches the levers that make it fit; here it says: {error}"
    if found is None or found.projected is None:
        return f"{call} is not projected to fit either: {search.remedies()}"
    return (
        f"{call} would take {found.levers}, recompute {found.remat}: projected "
        f"{format_bytes(found.projected)}; {_milliseconds(found, target)} ms a step."
    )


class Search:
    """The search of `fit`: candidates by predicted time, corrected by what is compiled."""

    def __init__(
        self,
        loss_fn: Callable,
        optimizer: optax.GradientTransformation,
        params: Any,
        batch: Any,
        *,
        budget: int | str | None = None,
        target: str | Target | LocalDevice | None = None,
        model_state: Any = None,
        key: jax.Array | None = None,
        precision: str | Precision | None = None,
        loss_scale: LossScale | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        allow: str | Collection[str] = (),
        keep: str | Collection[str] = (),
    ):
        check_callable(loss_fn, "jaxmem.fit")
        check_optimizer(optimizer, "jaxmem.fit")
        self.loss_fn, self.optimizer = loss_fn, optimizer
        self.params, self.model_state, self.key = params, model_state, key
        self.batch = jax.tree.map(
            lambda leaf: _jax.abstract(leaf if hasattr(leaf, "shape") else jnp.asarray(leaf)), batch
        )
        self.precision = None if precision is None else parse_precision(precision)
        self.loss_scale = loss_scale
        self.allow = _names(allow, "allow", ALLOWED)
        self.keep = _names(keep, "keep", {**ALLOWED, **KEPT})
        both = sorted(self.allow & self.keep)
        if both:
            raise JaxmemError(f"jaxmem.fit is to allow {both[0]!r} and to keep it: name it once.")
        self.target = resolve(target)
        if mesh is not None:
            shard(mesh)  # checks it
        self.mesh, self.devices = mesh, mesh.size if mesh is not None else 1
        if self.target.count == 1:
            self.target = dataclasses.replace(self.target, count=self.devices)
        if self.target.count != self.devices:
            raise JaxmemError(
                f"The mesh has {self.devices} devices and the target {self.target.count}: pass "
                "one GPU as target, or as many."
            )
        gpu = self.target.gpu if isinstance(self.target, LocalDevice) else self.target
        if gpu is None:
            raise JaxmemError(
                f"jaxmem.fit plans for a GPU whose figures it knows, and {self.target.description} "
                "is none. Name one: target='h200' (python -m jaxmem targets lists them)."
            )
        self.gpu = dataclasses.replace(gpu, count=1)
        if mesh is not None:
            self.batch = shard(mesh).place_batch(self.batch)
        budget = "100%" if budget is None else budget
        self.budget = device_budget(budget, self.target.usable_bytes, self.target.name)
        self.refused: dict[str, str] = {}
        self.reduction: str | None = None  # what the loss is taken for where it is not proved
        self.steps: dict[Levers, TrainStep] = {}  # before they are planned
        self.states: dict[Levers, TrainState] = {}
        # Residuals of scans may wait in host memory; of partitioned programs nobody has tried it.
        self.offload = "placement" not in self.keep
        if self.offload and self.devices > 1:
            self.offload = False
            self.refused["residuals in host memory"] = "not tried on several devices"
        self.compilations = 0  # at most
        self.plans: dict[tuple, Plan | int] = {}
        self.seen: dict[Levers, Candidate] = {}  # the last plan of each
        # compiled bytes over projected ones by precision, microbatches, stage; the last one last
        self.ratios: dict[tuple[str, int, int], float] = {}
        self.compiled: dict[tuple, Candidate] = {}
        self.reports: dict[tuple, MemoryReport] = {}
        leaves = jax.tree.leaves(self.batch)
        if any(leaf.shape[:1] == (0,) for leaf in leaves):
            shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
            raise JaxmemError(f"The batch has no examples; its arrays are {shapes}.")
        self.options = list(self._options())

    def run(self, compilations: int) -> TrainStep:
        """The step that fits, after compiling so many candidates at most."""
        if not is_count(compilations):
            raise JaxmemError(
                f"jaxmem.fit takes compilations=, an int of 1 or more; got {compilations!r}."
            )
        self.compilations = compilations
        best: Candidate | None = None
        while len(self.compiled) < compilations:
            # After others failed the last one goes to what is the most likely to fit.
            last = 0 < len(self.compiled) == compilations - 1
            candidate = self._cheapest(best)
            if best is None and (candidate is None or last):
                candidate = self._smallest() or self._between()
            if candidate is None:
                break
            found = self._compile(candidate, compilations)
            fits = found.compiled is not None and found.compiled <= self.budget
            if fits and (best is None or found.seconds < best.seconds):
                best = found
        if best is None:
            raise self._too_small()
        step = self.step(best.levers, best.plan)
        step.fitting = self.fitting(best)
        return step

    def fitting(self, best: Candidate | None = None) -> Fitting:
        """The table of everything that was considered so far."""
        rows = list(self._verdicts(best))
        chosen = next((row for row in rows if row.verdict.startswith(_CHOSEN)), None)
        known = {key: report.device for key, report in self.reports.items()}
        key = _key(best) if best else min(known, key=known.__getitem__, default=None)
        rows.sort(key=lambda row: row.seconds)
        report = None if key is None else self.reports[key]
        return Fitting(chosen, tuple(rows), self.refused, self.budget, self.target, report)

    def projected(self) -> Candidate | None:
        """The candidate of the least predicted time that is projected to fit; nothing compiled."""
        return self._cheapest(None)

    # ---- the levers

    def _options(self) -> Iterator[Levers]:
        own = "" if self.precision is None else str(self.precision)
        precisions = [own]
        if self.precision is None or self.precision.compute.itemsize > 2:
            if self._may("precision") and not self.gpu.has_bfloat16:
                major, minor = self.gpu.compute_capability
                self.refused["precision"] = (
                    f"a GPU of compute capability {major}.{minor} has no bfloat16 arithmetic; "
                    "precision='fp16' with loss_scale=jaxmem.LossScale() is for it"
                )
            elif self._may("precision"):
                whole = self.precision or parse_precision("fp32")
                half = dataclasses.replace(whole, compute=jnp.dtype(jnp.bfloat16))
                precisions.append(str(half) if self.precision else "bf16")
        stages = [0] if self.mesh is None else [1, 2, 3]
        first = Levers(own, 1, stage=stages[0])
        plain = self.state(first)
        counts = _slices(self.batch, self.devices) if self._may("batch") else [1]
        if len(counts) > 1:
            counts = self._provable(counts, first)
        self._may("residuals")
        state = jax.tree.leaves(plain.opt_state)
        large = [leaf for leaf in state if leaf.ndim and leaf.size]
        placed = any(_jax.memory_space(leaf) is _jax.HOST for leaf in large)
        hosts = [False, True] if self._may("placement") and large and not placed else [False]
        moments = [False, True] if self._may("moments") and large and not placed else [False]
        for precision in precisions:
            for count in counts:
                for small in moments:
                    for host, stage in itertools.product(hosts, stages):
                        yield Levers(precision, count, small, host, stage)

    def _may(self, name: str) -> bool:
        if name in self.keep:
            self.refused[name] = "it is to be kept"
        elif name in ALLOWED and name not in self.allow:
            self.refused[name] = f"would {ALLOWED[name]}; allow=({name!r},)"
        return name not in self.refused

    def _provable(self, counts: list[int], levers: Levers) -> list[int]:
        """The counts of microbatches for which the loss of the batch is proved to be the mean, or
        the sum, of its slices'; all of them where that does not matter."""
        step, state = self.step(levers), jax.tree.map(_whole, self.state(levers))
        batch = jax.tree.map(_whole, self.batch)
        size = jax.tree.leaves(batch)[0].shape[0]
        # A slice of one example may make a program of its own, with axes that are gone.
        several = [count for count in counts if count * self.devices < size]
        for fewer in (counts, several) if len(several) > 1 else (counts,):
            parts = {size // (count * among) for count in fewer for among in (1, self.devices)}
            proof = reduction_of(
                step.plain_loss, batch, parts, state.params, state.model_state, state.key
            )
            if proof.reduction is not None:
                return fewer
        if "statistics" in self.allow:
            self.reduction = "mean"
            return counts
        kept = "it is to be kept" if "statistics" in self.keep else "allow=('statistics',)"
        self.refused["statistics"] = f"the loss cannot be cut: {proof.why}; {kept}"
        return [1]

    def step(self, levers: Levers, plan: Plan | None = None) -> TrainStep:
        """The step of some levers, with a plan or before it is planned."""
        if plan is not None:
            return self._make_step(levers, plan)
        if levers not in self.steps:
            self.steps[levers] = self._make_step(levers, None)
        return self.steps[levers]

    def _make_step(self, levers: Levers, plan: Plan | None) -> TrainStep:
        optimizer = self.optimizer
        if levers.moments:
            optimizer = small_moments(optimizer)
        sharding = self._sharding(levers)
        if sharding is not None:
            optimizer = sharding.optimizer(optimizer)
        if levers.host:
            optimizer = offload(optimizer)
        transform: Callable | None = functools.partial(remat, plan=plan)
        if plan is not None and not (_recomputes(plan) or plan.widens):
            transform = None
        step = train_step(
            self.loss_fn,
            optimizer,
            precision=levers.precision or None,
            remat=transform,
            microbatches=levers.microbatches,
            reduction=self.reduction,
            loss_scale=self.loss_scale,
            compiler_options=plan.compiler_options if plan else dict(COMPILER_OPTIONS),
            sharding=sharding,
        )
        step.abstract(self.params, model_state=self.model_state, key=self.key)
        return step

    def _sharding(self, levers: Levers) -> Sharding | None:
        if self.mesh is None or not levers.stage:
            return None
        return shard(self.mesh, stage=levers.stage)

    def state(self, levers: Levers) -> TrainState:
        """The abstract state of the levers' step."""
        alike = dataclasses.replace(levers, microbatches=1)
        if alike not in self.states:
            self.states[alike] = self.step(alike).abstract(
                self.params, model_state=self.model_state, key=self.key
            )
        return self.states[alike]

    # ---- candidates

    def _cheapest(self, best: Candidate | None) -> Candidate | None:
        """The least predicted time that is projected to fit and not compiled yet; None: nothing
        promises to be faster than ``best``."""
        found: Candidate | None = None
        limit = best.seconds if best else 1e30
        for levers in sorted(self.options, key=lambda levers: (self._bound(levers), str(levers))):
            if self._bound(levers) >= min(limit, found.seconds if found else math.inf):
                break
            if best and levers == best.levers and (best.compiled or 0) >= _CLOSE * self.budget:
                continue
            candidate = self._candidate(levers)
            if candidate is None or _key(candidate) in self.compiled:
                continue
            gain = limit - candidate.seconds
            if gain > _GAIN * limit and (found is None or candidate.seconds < found.seconds):
                found = candidate
        return found

    def _candidate(self, levers: Levers) -> Candidate | None:
        """The levers with the plan that is projected to fit; None: none is."""
        found = self._plan(levers, int(self.budget / self._ratio(levers)))
        lowest = found if isinstance(found, int) else None
        if isinstance(found, Plan) and "residuals" in self.keep and _recomputes(found):
            plain = self._plan(levers, None)
            assert isinstance(plain, Plan)
            lowest = self._priced(levers, plain).projected
        if lowest is not None or not isinstance(found, Plan):
            self.seen[levers] = Candidate(levers, None, lowest, self._bound(levers))
            return None
        self.seen[levers] = self._priced(levers, found)
        return self.seen[levers]

    def _smallest(self) -> Candidate | None:
        """The fewest projected bytes of what is not compiled yet: the state as small as may be, and
        the batch whole or in the most slices. None: there is no hope in it."""
        most = max((levers.microbatches for levers in self.options), default=1)
        least: Candidate | None = None
        smallest = max((_state_levers(levers) for levers in self.options), default=None)
        for levers in self.options:
            if _state_levers(levers) != smallest or levers.microbatches not in (1, most):
                continue
            found = self._plan(levers, None if "residuals" in self.keep else 1)
            found = self._plan(levers, found) if isinstance(found, int) else found
            assert isinstance(found, Plan)
            candidate = self._priced(levers, found)
            self.seen.setdefault(levers, candidate)
            if _key(candidate) in self.compiled:
                continue
            if least is None or self._expected(candidate) < self._expected(least):
                least = candidate
        tried = len(self.compiled) > 1
        hopeless = least and tried and self._expected(least) > _NEAR * self.budget
        return None if hopeless else least

    def _between(self) -> Candidate | None:
        """A plan between two that were compiled, or a little above them, of the levers that came
        nearest to the budget: bytes do not fall evenly with what is recomputed. None: it is too
        far off."""
        known = [one for one in self.compiled.values() if one.compiled and one.projected]
        nearest = min(known, key=lambda one: one.compiled or 0, default=None)
        if nearest is None or (nearest.compiled or 0) > _NEAR * self.budget:
            return None
        sizes = sorted(one.projected or 0 for one in known if one.levers == nearest.levers)
        sizes.append(int(_ABOVE * sizes[-1]))
        gaps = sorted(itertools.pairwise(sizes), key=lambda gap: gap[0] - gap[1])
        goals = [goal for low, high in gaps for goal in ((low + high) // 2, high)]
        for goal in goals:
            found = self._plan(nearest.levers, goal)
            if isinstance(found, Plan):
                candidate = self._priced(nearest.levers, found)
                if _key(candidate) not in self.compiled:
                    return candidate
        return None

    def _expected(self, candidate: Candidate) -> int:
        """Bytes that are expected of the compiler."""
        return int((candidate.projected or 0) * self._ratio(candidate.levers))

    def _plan(self, levers: Levers, budget: int | None) -> Plan | int:
        """The plan within a budget of the whole step (None: without recomputation), or the lowest
        budget that has one."""
        around, share = self._around(levers), self._share(levers)
        within = None if budget is None else max((budget - around) * share, 1)
        offload = self.offload and budget is not None
        key = (levers.precision, levers.microbatches, share, within, offload)
        if key not in self.plans:
            state = self.state(levers)
            cut = levers.microbatches * self.devices // share
            part = jax.tree.map(lambda leaf: _slice(leaf, cut), self.batch)
            params, *others = jax.tree.map(_whole, (state.params, state.model_state, state.key))
            try:
                problem = Problem(self.step(levers).loss, (params, part, *others), {}, 0)
                # Of a share of a program on several GPUs the budget may be more than one has.
                allowed = Allowed(2**62 if within is None else within, 0, self.gpu, "dp", offload)
                self.plans[key] = allowed.plan(problem.program)
            except BudgetError as error:
                self.plans[key] = error.lowest or 0
        found = self.plans[key]
        return -(-found // share) + around if isinstance(found, int) else found

    def _priced(self, levers: Levers, plan: Plan) -> Candidate:
        share = self._share(levers)
        projected = -(-plan.projected_bytes // share) + self._around(levers)
        seconds = levers.microbatches * (3 * plan.seconds + plan.recompute_seconds) / share
        host = 2 * (self._host_bytes(levers) + levers.microbatches * plan.host_bytes)
        return Candidate(levers, plan, projected, seconds + self._overhead(levers), host)

    def _bound(self, levers: Levers) -> float:
        """No plan of these levers takes less time: the whole batch at once takes the fewest
        launches and the least traffic of parameters."""
        whole = self._plan(Levers(levers.precision, 1, stage=self.options[0].stage), None)
        assert isinstance(whole, Plan)
        return 3 * whole.seconds / self.devices + self._overhead(levers)

    def _overhead(self, levers: Levers) -> float:
        """Seconds of a step outside the loss and its gradient."""
        state = self.state(levers)
        params = _bytes(state.params)
        # 8-bit moments are expanded to be updated: they move as many bytes as whole ones.
        moments = _bytes(self.state(dataclasses.replace(levers, moments=False)).opt_state)
        moved = 3 * params + 2 * moments  # parameters and gradients read, parameters written
        if levers.microbatches > 1:
            moved += 3 * levers.microbatches * _in_float32(state.params)
        transfers = 2 * self._host_bytes(levers)
        if self.devices > 1:
            # Gradients are summed and updates gathered; at stage 3 parameters once more.
            crossings = 3 if levers.stage == 3 else 2
            whole = _bytes(jax.tree.map(_whole, state.params))
            transfers += crossings * whole * (self.devices - 1) // self.devices
        return moved / self.gpu.memory_bandwidth + transfers / self.gpu.host_bandwidth

    def _share(self, levers: Levers) -> int:
        """Among how many GPUs the program that is planned is divided: all of them, but where each
        takes slices of its own part."""
        if self.devices == 1 or levers.microbatches == 1:
            return self.devices
        sharding = self.step(levers).slices_sharding(self.state(levers), self.batch)
        return self.devices if sharding is None else 1

    def _around(self, levers: Levers) -> int:
        """Bytes of a step on each GPU beside its share of the loss, the loss's arguments and
        gradients."""
        state = self.state(levers)
        around = _bytes(state.opt_state) - self._host_bytes(levers)
        if levers.microbatches > 1:
            batch = _bytes(self.batch)
            around += batch - batch // levers.microbatches + _in_float32(state.params)
        share = self._share(levers)
        if share > 1:  # of parameters and gradients a GPU may have more than its share
            whole, here = _bytes(jax.tree.map(_whole, state.params)), _bytes(state.params)
            spread = self._sharding(levers)
            gradients = whole // share if spread and spread.stage >= 2 else whole
            around += here + gradients - 2 * whole // share
            if spread and spread.stage == 3:  # XLA gathers all of them early and keeps them
                around += whole - here
        return around

    def _host_bytes(self, levers: Levers) -> int:
        leaves = jax.tree.leaves(self.state(levers).opt_state)
        return _bytes([leaf for leaf in leaves if _jax.memory_space(leaf) is _jax.HOST])

    def _ratio(self, levers: Levers) -> float:
        # What was not compiled borrows the last one, rounded up: fewer plans are made so. The only
        # one to be compiled has no other to learn from.
        alike = [ratio for key, ratio in self.ratios.items() if key[-1] == levers.stage]
        last = _FIRST_ERROR if self.compilations == 1 else 1.0
        last = math.ceil(alike[-1] * 50) / 50 if alike else last
        return self.ratios.get((levers.precision, levers.microbatches, levers.stage), last)

    # ---- compiling

    def _compile(self, candidate: Candidate, most: int) -> Candidate:
        levers = candidate.levers
        step = self.step(levers, candidate.plan)
        assert candidate.projected
        key, about = _key(candidate), f"{levers}; recompute {candidate.remat}"
        number = f"{len(self.compiled) + 1} of at most {most}"
        try:
            report = memory(step, self.state(levers), self.batch, target=self.target)
        except CompileError as error:
            lines = str(error).splitlines()
            why = f"XLA could not compile it: {lines[min(1, len(lines) - 1)]}"
            self.compiled[key] = dataclasses.replace(candidate, verdict=why)
            _tell(f"jaxmem: compiled {number}: {about}: {why}")
            self.options.remove(levers)
            return self.compiled[key]
        away = candidate.plan.host_bytes if candidate.plan else 0
        if away and report.host < away + self._host_bytes(levers):
            why = "XLA keeps on the device what was to wait in host memory"
            self.refused["residuals in host memory"], self.offload = why, False
            self.compiled[key] = dataclasses.replace(candidate, verdict=why)
            _tell(f"jaxmem: compiled {number}: {about}: {why}")
            return self.compiled[key]
        self.reports[key] = report
        self.compiled[key] = dataclasses.replace(candidate, compiled=report.device)
        ratio = report.device / candidate.projected
        place = (levers.precision, levers.microbatches, levers.stage)
        self.ratios.pop(place, None)  # so that it comes last
        self.ratios[place] = ratio * 1.01 if report.device > self.budget else ratio
        _tell(
            f"jaxmem: compiled {number} for {self.target.name}: {about}: "
            f"{format_bytes(report.device)} (projected {format_bytes(candidate.projected)})"
        )
        return self.compiled[key]

    # ---- what is said of it

    def _verdicts(self, best: Candidate | None) -> Iterator[Candidate]:
        """Every candidate with the reason for what became of it: what was compiled, and one row
        for each setting of the levers that was not."""
        for found in self.compiled.values():
            verdict = found.verdict
            if best and _key(found) == _key(best):
                verdict = f"{_CHOSEN}: {self._why(best)}"
            elif found.compiled is not None and found.compiled > self.budget:
                over = format_bytes(found.compiled - self.budget)
                verdict = f"compiled: {over} over the budget"
            elif best and found.compiled is not None:
                verdict = f"fits, {_slower(found, best):.1%} slower"
            yield dataclasses.replace(found, verdict=verdict)
        compiled = {found.levers for found in self.compiled.values()}
        if self.options:
            first = self.options[0]  # everything as it is
            plain = self._plan(first, None)
            assert isinstance(plain, Plan)
            row = self._priced(first, plain)
            if _key(row) not in self.compiled:
                compiled.add(first)
                yield dataclasses.replace(row, verdict=self._not_compiled(row, best))
        for levers in self.options:
            if levers not in compiled:
                unplanned = Candidate(levers, None, None, self._bound(levers))
                row = self.seen.get(levers, unplanned)
                yield dataclasses.replace(row, verdict=self._not_compiled(row, best))

    def _not_compiled(self, candidate: Candidate, best: Candidate | None) -> str:
        over = self._expected(candidate) - self.budget
        if candidate.projected is not None and over > 0:
            least = "at least " if candidate.plan is None else ""
            return f"not compiled: expected {least}{format_bytes(over)} over the budget"
        if best is None:
            return "not compiled"
        least = "at least " if candidate.plan is None else ""
        if candidate.seconds > best.seconds:
            return f"not compiled: {least}{_slower(candidate, best):.1%} slower"
        gain = -_slower(candidate, best)
        if gain <= _GAIN:
            return "not compiled: gains too little"
        most = "at most " if candidate.plan is None else ""
        return f"not compiled: {most}{gain:.1%} faster"

    def _why(self, best: Candidate) -> str:
        """Why the best one found was chosen: it is the fastest, or the search ended too early."""
        if len(self.compiled) < self.compilations or self._cheapest(best) is None:
            return "the least predicted time that fits"
        return (
            f"the least predicted time of {len(self.compiled)} compiled; faster ones are projected "
            f"to fit (compilations={self.compilations})"
        )

    def _too_small(self) -> BudgetError:
        fitting = self.fitting()
        report = fitting.report
        lines = [f"Nothing fits the budget of {format_bytes(self.budget)} on {self.target.name}."]
        lowest = None
        if report is not None:
            key = min(self.reports, key=lambda key: self.reports[key].device)
            lowest = report.device
            lines.append(
                f"The lowest compiled is {format_bytes(lowest)} ({lowest} bytes: "
                f"{self.compiled[key].levers}; recompute {self.compiled[key].remat}), held by "
                f"{holders(report)}."
            )
        if len(self.compiled) == self.compilations:
            lines.append(f"More compilations than {self.compilations} may find one that does.")
        lines.append(self.remedies())
        return BudgetError(" ".join(lines) + f"\n{fitting}", lowest)

    def remedies(self) -> str:
        """What else could be done, in words."""
        lines = []
        named = self.allow | self.keep
        more = [name for name in ALLOWED if name in self.refused and name not in named]
        if more:
            what = "; ".join(f"allow={name!r} to {ALLOWED[name]}" for name in more)
            lines.append(f"What else could be allowed: {what}.")
        kept = [name for name in self.refused if name in self.keep]
        if kept:
            lines.append(f"What is kept and need not be: {', '.join(map(repr, kept))}.")
        lines.append("Or raise the budget, shrink the batch, or shard over more GPUs.")
        return " ".join(lines)


_CHOSEN = "chosen"


def holders(report: MemoryReport, most: int = 3) -> str:
    """What holds the most bytes at the peak, by source line, in words."""
    if not report.has_timeline:
        held = {"arguments": report.argument, "temporary values": report.temp}
    else:
        held = dict(list(report.by_source.items())[:most])
    return ", ".join(f"{format_bytes(size)} by {line}" for line, size in held.items())


def _time_error(target: Target | LocalDevice) -> float | None:
    gpu = target.gpu if isinstance(target, LocalDevice) else target
    return gpu.time_error if gpu else None


def _milliseconds(candidate: Candidate, target: Target | LocalDevice) -> str:
    """The predicted time, and how far off it may be."""
    return f"{candidate.seconds * 1e3:.4g} {checked(_time_error(target))}"


def _slower(candidate: Candidate, best: Candidate) -> float:
    """By what share of the best one's time."""
    return candidate.seconds / max(best.seconds, 1e-30) - 1  # a program may do nothing


def _names(given: str | Collection[str], argument: str, known: dict[str, str]) -> frozenset[str]:
    if not isinstance(given, str | Collection):
        raise JaxmemError(f"jaxmem.fit takes {argument}=, names as text; got {given!r}.")
    names = frozenset([given] if isinstance(given, str) else given)
    unknown = sorted(names - known.keys())
    if unknown:
        raise JaxmemError(
            f"jaxmem.fit knows no {argument}={unknown[0]!r}; the names are "
            f"{', '.join(map(repr, known))}."
        )
    return names


def _slices(batch: Any, devices: int) -> list[int]:
    """Counts of microbatches: 1, and the next divisors of each device's part that are twice as
    many."""
    sizes = {leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        return [1]  # nothing to cut along
    size, counts = sizes.pop() // devices, [1]
    for count in range(2, min(size, _MOST_SLICES) + 1):
        if size % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return counts


def _slice(leaf: Any, count: int) -> jax.ShapeDtypeStruct:
    if count == 1:
        return _whole(leaf)
    return jax.ShapeDtypeStruct((leaf.shape[0] // count, *leaf.shape[1:]), leaf.dtype)


def _recomputes(plan: Plan) -> bool:
    return bool(plan.regions or plan.loops)


def _key(candidate: Candidate) -> tuple:
    plan = candidate.plan
    return (candidate.levers, plan and plan.regions, plan and plan.loops)


def _state_levers(levers: Levers) -> tuple:
    return (levers.host, levers.moments, levers.stage)


def _shape_here(leaf: Any) -> tuple[int, ...]:
    """An abstract array's shape on each device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _whole(leaf: Any) -> jax.ShapeDtypeStruct:
    """An abstract array on one device."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _bytes(tree: Any) -> int:
    """Of abstract arrays, on each device."""
    return sum(math.prod(_shape_here(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _in_float32(params: Any) -> int:
    """Bytes on each device of the gradients' sum over microbatches."""
    return sum(
        math.prod(_shape_here(leaf)) * max(leaf.dtype.itemsize, 4)
        for leaf in jax.tree.leaves(params)
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
