"""What the constants of the planner are worth: plans with each of them at half and at twice.

    python -m benchmarks.planner.sensitivity                    # all of them, minutes on one core
    python -m benchmarks.planner.sensitivity planning.variants._SLOTS  # these rows; the others stay

Budgets are a quarter and six tenths of the way from the least projected bytes to the plain ones,
with each constant as it is. "time" and "FLOPs" are what a plan adds to the step's, in percentage
points; "least" are the least projected bytes, beside the plain ones; "planning" is CPU time. Each
is the largest change over programs and budgets, and 0 below 0.05. A constant above 1 that is a
margin has its distance from 1 halved and doubled, as has one just below 1; a tuple all of its
entries. Rates and the fusion model (targets.shares, program) are what plans are
measured with: there a change is also one of the ruler, and FLOPs are the better witness. Programs:
four layers of a GPT, unrolled and as a scan, a DenseNet, the example's U-Net, an MLP mixer and, for
the bounds of long programs, 128 and 512 layers of tanh(x w), for schedules of loops two recurrences
of 1,000 and 343 steps. Nothing is compiled.

Of a search that compiles (rematerialization, and the rows of blocks that it tries) the compiler is
a stand-in, whose bytes are the projected ones times a random ratio within 6 % for each place where
plans peak, and within 0.5 % for each plan: "time" is the mean of what the found plans add over four
such compilers, with five compilations each, or one where FIRST_ERROR decides; the least projected
bytes are one more budget there, and "failed" counts searches that found none. `jaxmem.fit`'s search
(fitting) has the same compilers, with 15 % for each place, as far as its first projections were
off, six compilations, AdamW, and budgets of 0.35, 0.5 and 0.75 of the plain step: "time" is that of
the chosen steps there, beside the plain one's. The constants of the derivatives are not measured.

A constant that changes nothing at half and at twice is tried far off too: at a sixty-fourth and at
64 times, a margin at 32 times. One that changes nothing there either is needed by
programs that are not among these, which its comment or a test names.
"""

import contextlib
import dataclasses
import functools
import importlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._gpt import GPT
from benchmarks._models import DenseNet, classifier, unet
from benchmarks._record import record_parts
from benchmarks.speed.planner_time import chain
from jaxmem.fitting import search as fitting_search
from jaxmem.fitting.costs import Costs
from jaxmem.fitting.verdicts import key_of
from jaxmem.fitting.workload import Workload
from jaxmem.rematerialization.compiled_plans import CompiledPlans
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.corrections import Outcome
from jaxmem.rematerialization.search import PendingCompilation, Search as CompiledSearch
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets import resolve

SHARES = (0.25, 0.6)
COMPILERS, COMPILATIONS = 4, 5
UNROLLED, SCAN, DENSENET, UNET, MIXER, LONG, LONGEST, STEPS = (
    "GPT, unrolled", "GPT, scan", "DenseNet", "U-Net", "mixer", "128 layers", "512 layers", "steps",
)  # fmt: skip
SEARCH = "rematerialization.compiled_plans"
FIT = "fitting.search"
FIT_SHARES, FIT_COMPILATIONS = (0.35, 0.5, 0.75), 6
SHARES_OF_RATES = "targets.shares"
SEARCHED = (SCAN, MIXER)
BLOCKS = (UNROLLED, SCAN, MIXER)
FEW = (UNROLLED, SCAN, DENSENET, UNET, MIXER)


def gpt(form: str):
    net = GPT(width=1024, depth=4, heads=16, context=1024)

    def loss(params, batch):
        embedding, layers, head = params
        x = net.embed(embedding, batch[0])
        if form == "scan":
            x, _ = jax.lax.scan(lambda x, params: (net.block(params, x), None), x, layers)
        else:
            for layer in layers:
                x = net.block(layer, x)
        return net.loss(head, (x, batch[1]))

    def init(key):
        keys = jax.random.split(key, net.depth)
        layers = jax.vmap(net.layer)(keys) if form == "scan" else [net.layer(key) for key in keys]
        return net.embedding(key), layers, net.head(key)

    tokens = jax.ShapeDtypeStruct((8, net.context), jnp.int32)
    return loss, (jax.eval_shape(init, jax.random.key(0)), (tokens, tokens))


class Mixer(nn.Module):
    """Tolstikhin et al. 2021, four layers of the S/16."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(512, (16, 16), (16, 16))(x).reshape(x.shape[0], -1, 512)
        for _ in range(4):
            for turned, wide in ((True, 256), (False, 2048)):
                y = nn.LayerNorm()(x)
                y = y.swapaxes(1, 2) if turned else y
                y = nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(wide)(y)))
                x = x + (y.swapaxes(1, 2) if turned else y)
        return nn.Dense(1000)(nn.LayerNorm()(x).mean(1))


def steps():
    """Two recurrences, of 1,000 and of 343 steps, which checkpoints of their states decide."""

    def loss(weights, x):
        for w, length in zip(weights, (1000, 343), strict=True):
            x, _ = jax.lax.scan(
                lambda x, _, w=w: (jnp.sin(jnp.tanh(x @ w[0]) @ w[1]), None), x, length=length
            )
        return jnp.mean(x**2)

    weights = [[jax.ShapeDtypeStruct((256, 256), "float32")] * 2] * 2
    return loss, (weights, jax.ShapeDtypeStruct((512, 256), "float32"))


PROGRAMS: dict[str, Callable] = {
    STEPS: steps,
    UNROLLED: lambda: gpt("unrolled"),
    SCAN: lambda: gpt("scan"),
    DENSENET: lambda: classifier(DenseNet((2, 3, 2), 32), 64, 224),
    UNET: lambda: unet(16, 256),
    MIXER: lambda: classifier(Mixer(), 64, 224),
    LONG: lambda: chain(128),
    LONGEST: lambda: chain(512),
}


@functools.cache
def traced(name: str) -> TracedFunction:
    loss, args = PROGRAMS[name]()
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    return TracedFunction(*PROGRAMS[name](), {}, 0, has_aux)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Where a constant is, the programs and the planner that show what it does, and what its other
    values are: those of a number, or of its distance from 1."""

    module: str
    name: str
    programs: tuple[str, ...] = FEW
    planner: str = "dp"
    margin: bool = False
    most: float = float("inf")
    searched: bool = False  # whether a search with a compiler shows what it does
    compilations: int = COMPILATIONS  # of that search

    @property
    def key(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def of_fit(self) -> bool:
        return self.module.startswith("fitting.")

    @property
    def home(self):
        if self.module == SHARES_OF_RATES:
            return resolve("h200").shares
        return importlib.import_module(f"jaxmem.{self.module}")

    @property
    def value(self) -> Any:
        return getattr(self.home, self.name)

    def times(self, factor: float) -> Any:
        def one(value):
            if self.margin:
                return max(1 + (value - 1) * factor, 0.02)
            least = 1 if isinstance(value, int) else 0.0
            return max(min(type(value)(value * factor), self.most), least)

        value = self.value
        return tuple(map(one, value)) if isinstance(value, tuple) else one(value)

    @property
    def setting(self) -> tuple:
        return self.programs, self.planner, self.searched, self.compilations

    @contextlib.contextmanager
    def set(self, value):
        """Wherever it is: a constant without an underscore is imported by others too."""
        owners = [self.home]
        if not self.name.startswith("_") and self.module != SHARES_OF_RATES:
            known = [module for name, module in sys.modules.items() if name.startswith("jaxmem.")]
            owners = [module for module in known if hasattr(module, self.name)]
        before = self.value
        for owner in owners:
            vars(owner)[self.name] = value
        yield
        for owner in owners:
            vars(owner)[self.name] = before


def constants() -> list[Constant]:
    def of(module, *names, **fields):
        return [Constant(module, name, **fields) for name in names]

    return [
        *of(SHARES_OF_RATES, "matmul", "memory", "launch"),
        *of("planning.rates", "ARITHMETIC_WEIGHT"),
        *of("program.cotangents", "_REDUCED"),
        *of("program.stored", "_LARGE_SOURCES", "_SOURCES", "_CHAIN"),
        *of("program.readers", "SMALL"),
        *of("program.repeats", "_EXPENSIVE", "_EXPENSIVE_IN_MEMORY"),
        *of("planning.blocks", "_BLOCKS", programs=(LONG,)),
        *of("planning.derivative_fusion", "_SMALL"),
        *of("planning.events", "_MIN_REUSE"),
        *of("planning.blocks", "TINY"),
        *of("planning.blocks", "_SHARES", most=1.0),
        *of("planning.variants", "_SLOTS"),
        *of("planning.variants", "_HEADROOM", margin=True),
        *of("planning.variants", "_DEPTH", programs=(UNROLLED, UNET, LONG)),
        *of("planning.variants", "_EXTRA_MEMORIES", "_GUESSES", "_FLOOR_MEMORIES"),
        *of("planning.variants", "_REUSE_FRACTION", most=0.99),
        *of("planning.refining", "_TRIES", "_KERNELS", programs=(UNROLLED, UNET)),
        *of("planning.variants", "_SHRINK_FACTOR", "_MIN_PROGRESS", "PEAK_TOLERANCE", margin=True),
        *of(
            "planning.loops", "_SLOTS", "_LEVELS", "_SETS", "_KERNELS", "_OPTIONS", programs=(SCAN,)
        ),
        *of("planning.loops", "_BODIES", programs=(SCAN, STEPS)),
        *of("planning.loops", "_MENU_RATIO", programs=(SCAN, STEPS), margin=True),
        *of("planning.options", "_SCHEDULE_RATIO", programs=(STEPS,), margin=True),
        *of("planning.options", "_COMBINATIONS", programs=(STEPS,)),
        *of("loops.schedules", "_TRIED", programs=(STEPS,)),
        *of("planning.dots", "_GROUPS", "_STATISTICS", planner="dots"),
        *of("planning.sqrt", "_CANDIDATES", programs=(LONGEST,), planner="sqrt"),
        *of("planning.sqrt", "_TRIES", planner="sqrt"),
        *of("planning.repeating", "_ALIKE", "_INSIDE", programs=BLOCKS, searched=True, most=0.99),
        *of("planning.repeating", "_PERIODS", programs=BLOCKS, searched=True),
        *of("planning.repeating", "_PART", programs=BLOCKS, searched=True, margin=True),
        *of("planning.per_block", "_COVERED", "_MOST", programs=BLOCKS, searched=True, most=0.99),
        *of(
            "rematerialization.search",
            "MAX_OVERPROJECTION",
            programs=BLOCKS,
            searched=True,
            margin=True,
        ),
        Constant(
            *("rematerialization.corrections", "FIRST_ERROR", SEARCHED),
            margin=True,
            searched=True,
            compilations=1,
        ),
        *of(
            *("rematerialization.search", "ALTERNATIVE"),
            programs=SEARCHED,
            searched=True,
            margin=True,
        ),
        *of(SEARCH, "_MIN_SAVING", programs=SEARCHED, searched=True),
        *of(
            *(SEARCH, "_LEAST_SPREAD", "_SPREAD_RATIO", "_MOST_SPREAD"),
            programs=SEARCHED,
            searched=True,
        ),
        *of(
            *(SEARCH, "_OVER_BUDGET_STEPS", "_SAFETY_MARGIN"),
            programs=SEARCHED,
            searched=True,
            margin=True,
        ),
        *of(
            FIT,
            "_GOOD_ENOUGH",
            "_RETRY_RANGE",
            "_OVERPLAN",
            "_AFTER_MISS",
            programs=SEARCHED,
            margin=True,
        ),
        *of("fitting.verdicts", "MIN_GAIN", programs=SEARCHED),
    ]


@dataclasses.dataclass
class Plans:
    """For each budget what the plan adds to the step, in shares of it, or None; the least bytes
    (None: not looked for), and CPU seconds; searches that found nothing."""

    times: list[float | None]
    flops: list[float | None]
    least: float | None
    seconds: float
    failed: int = 0


def planned(name: str, planner: str, budgets: tuple[float, ...]) -> Plans:
    one = traced(name)
    program = one.read(one.flat)  # nothing of it is known yet
    constraints = Constraints.parse(None, 0, "h200", planner)
    began = time.process_time()
    plans = constraints.planner(program)
    found = [plans.cheapest_for(int(budget)) for budget in budgets]
    least = plans.cheapest_near_minimum()
    middle = plans.minimum_at_one_forward()
    seconds = time.process_time() - began
    found.append(middle)
    forward = constraints.rates.forward(program)
    return Plans(
        [layout and layout.seconds / (3 * forward) for layout in found],
        [layout and layout.flops / (3 * program.flops) for layout in found],
        least.peak,
        seconds,
    )


@functools.cache
def budgets(name: str, planner: str) -> tuple[tuple[float, ...], int]:
    """Those to plan for, and the plain bytes, with all constants as they are."""
    plans = Constraints.parse(None, 0, "h200", planner).planner(traced(name).program)
    low, high = plans.cheapest_near_minimum().peak, plans.plain.peak
    shares = SHARES if planner != "dots" else (0.0,)
    return tuple(low + share * (high - low) for share in shares), high


class StandIn(CompiledPlans):
    """A search whose compiler is random."""

    def __init__(self, traced, constraints, seed: int):
        super().__init__(traced, constraints, resolve("h200"))
        self.seed = seed

    def start(self, layout) -> PendingCompilation:
        return PendingCompilation("a stand-in", lambda: self.outcome(layout), lambda: None)

    def outcome(self, layout) -> Outcome:
        place = random.Random(f"{self.seed} {layout.peak_location}").uniform(0.94, 1.06)
        own = random.Random(f"{self.seed} {layout.regions} {layout.loops}").uniform(0.995, 1.005)
        total = self.constraints.budget_for(self.traced.program).total(layout.peak)
        compiled = int(total * place * own)
        plan = self.constraints.write(self.traced.program, layout, self.plain)
        self.plans[layout] = plan
        return Outcome("", layout.price, total, compiled, layout.peak_location)


def searched(name: str, compilations: int) -> Plans:
    one = traced.__wrapped__(name)  # nothing of it is known yet
    times, flops, failed = [], [], 0
    planner = Constraints.parse(None, 0, "h200", "dp").planner(one.program)
    began = time.process_time()
    for budget in (planner.cheapest_near_minimum().peak, *budgets(name, "dp")[0]):
        plans = []
        total = int(budget) + one.program.boundary_bytes
        for seed in range(COMPILERS):
            search = StandIn(one, Constraints.parse(total, 0, "h200", "dp"), seed)
            search.planner = planner
            try:
                plans.append(search.plan(compilations))
            except jaxmem.BudgetError:
                failed += 1
        found = [plan.predicted for plan in plans]
        times.append(sum(one.recompute_share for one in found) / max(len(found), 1))
        flops.append(
            sum(one.recompute_flops / (3 * one.flops) for one in found) / max(len(found), 1)
        )
    return Plans(times, flops, None, time.process_time() - began, failed)


class FitStandIn(fitting_search.LeverSearch):
    """A search of `fit` whose compiler is random."""

    def __init__(self, workload: Workload, costs: Costs, seed: int):
        super().__init__(workload)
        self.costs, self.seed = costs, seed

        over = fitting_search._AFTER_MISS
        self.compiled = CompiledSearch(workload.budget, FIT_COMPILATIONS, over)

    def chosen(self):
        """What it would return, or None."""
        self.compiled.run(self._rounds(), self._start)
        return self._best

    def _start(self, candidate) -> PendingCompilation:
        return PendingCompilation("a stand-in", lambda: self.outcome(candidate), lambda: None)

    def outcome(self, candidate) -> Outcome:
        where = fitting_search._ratio_key(candidate.levers)
        place = random.Random(f"{self.seed} {where}").uniform(0.85, 1.15)
        own = random.Random(f"{self.seed} {key_of(candidate)}").uniform(0.995, 1.005)
        compiled = int(candidate.projected * place * own)
        self.found[key_of(candidate)] = dataclasses.replace(candidate, compiled=compiled)
        return Outcome("", candidate.seconds, candidate.projected, compiled, where)


@functools.cache
def workload(name: str) -> tuple[Workload, Costs]:
    """With its plans, which none of the constants of the search changes."""
    loss, (params, *batch) = PROGRAMS[name]()

    def of_batch(params, batch):
        return loss(params, *batch)

    found = Workload(of_batch, optax.adamw(1e-3), params, tuple(batch), target="h200")
    return found, Costs(found)


def fitted(name: str) -> Plans:
    one, costs = workload(name)
    plain = costs.without_recomputation(one.as_is)
    began, times, failed = time.process_time(), [], 0
    for share in FIT_SHARES:
        one.budget = int(share * plain.projected)
        found = [FitStandIn(one, costs, seed).chosen() for seed in range(COMPILERS)]
        seconds = [best.seconds for best in found if best]
        failed += found.count(None)
        times.append(sum(seconds) / len(seconds) / plain.seconds if seconds else None)
    return Plans(times, [], None, time.process_time() - began, failed)


def plans_of(constant: Constant) -> list[Plans]:
    found = []
    for name in constant.programs:
        if constant.of_fit:
            found.append(fitted(name))
            continue
        at, _ = budgets(name, constant.planner)
        if constant.searched:
            found.append(searched(name, constant.compilations))
        else:
            found.append(planned(name, constant.planner, at))
    return found


@functools.cache
def _unchanged(module: str, programs, planner, searched, compilations) -> list[Plans]:
    chosen = {"searched": searched, "compilations": compilations}
    constant = Constant(module, "", programs, planner, **chosen)
    plans_of(constant)  # the first time takes longer
    return plans_of(constant)


def worst(constant: Constant, before: list[Plans], after: list[Plans]) -> str:
    plain = [
        0 if constant.of_fit else budgets(name, constant.planner)[1] for name in constant.programs
    ]

    def largest(changes) -> str:
        change = max(changes, key=abs, default=0.0)
        return f"{change:+.1%}" if abs(change) >= 5e-4 else "0"

    def of(field):
        pairs = zip(before, after, strict=True)
        each = (zip(getattr(a, field), getattr(b, field), strict=True) for a, b in pairs)
        return [(a, b) for pair in each for a, b in pair]

    def change(field):
        return largest(b - a for a, b in of(field) if a is not None and b is not None)

    both = list(zip(before, after, plain, strict=True))
    parts = [f"time {change('times')}"]
    if before[0].flops:
        parts.append(f"FLOPs {change('flops')}")
    if before[0].least is not None:
        parts.append(f"least {largest((b.least - a.least) / high for a, b, high in both)}")
    missing = sum(a is not None and b is None for a, b in of("times"))
    failed = sum(b.failed - a.failed for a, b, _ in both)
    parts += [f"{missing} do not fit"] * bool(missing) + [f"failed {failed:+d}"] * bool(failed)
    seconds = sum(one.seconds for one in after) / sum(one.seconds for one in before)
    return ", ".join([*parts, f"planning {seconds:.1f}x"])


def rows_of(key: str):
    constant = next(one for one in constants() if one.key == key)
    kind = FIT if constant.of_fit else "planning.dp"
    before = _unchanged(kind, *constant.setting)
    row = {"constant": key, "value": written(constant.value)}
    most = 32 if constant.margin else 64
    for head, factor in (("half", 0.5), ("twice", 2), ("far below", 1 / 64), ("far above", most)):
        value = constant.times(factor)
        if head.startswith("far") and changes(row["half"] + row["twice"]):
            row[head] = ""
            continue
        with constant.set(value):
            row[head] = f"{written(value)}: {worst(constant, before, plans_of(constant))}"
    print(row, flush=True)
    yield row


def changes(text: str) -> bool:
    """Whether anything but the time of planning did."""
    return any(word in text for word in ("%", "fit", "failed"))


def written(value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(written, value))})"
    return f"{value:.4g}"


def main():
    note = "\n\n".join(__doc__.split("\n\n")[2:])
    keys = [constant.key for constant in constants()]
    title = "What the constants of the planner are worth"
    record_parts(title, "constant", keys, rows_of, note)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
