"""What a scan may save and recompute of its body: a short menu, from most memory to least.

What the forward loop keeps for the backward one is stacked, so a value saved costs its bytes times
the length, and what is inside one iteration costs them once. With a schedule (`jaxmem.loops`) the
states of some iterations are kept, and those between are run again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set

import numpy as np

from jaxmem.planning.blocks import Blocks
from jaxmem.planning.chain import Solution
from jaxmem.planning.copies import exposed_seconds
from jaxmem.planning.options import Body, LoopOption, combine_menus, lower_hull
from jaxmem.planning.per_block import policies
from jaxmem.planning.rates import Rates, of_each
from jaxmem.planning.regions import Loop, Region, locate
from jaxmem.planning.simulation import peak_of_scan, simulate_block
from jaxmem.program import Program, dtype_of

# Chosen: they bound the time of planning. Half and twice, here and below:
# benchmarks/planner/sensitivity.py.
_SLOTS = 128
_LEVELS = 24
_SETS = 64
_KERNELS = 14  # the dearest ones of a body, whose subsets are tried
_OPTIONS = 200
_BODIES = 16  # ways to run a body that have schedules
# Ways to run the scans of a body are at least so many times apart in bytes. Chosen: the schedules
# of the loop around them fill what is left.
_MENU_RATIO = 1.5

Costs = tuple[float, float, float, float]  # FLOPs, bytes moved, seconds, price


def loop_options(program: Program, kernel: int, rates: Rates) -> list[LoopOption]:
    """The menu of one scan. With a link to the host residuals may wait there."""
    return loop_ways(program, kernel, rates).menu(rates.host)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopWays:
    """Ways to run a scan or a `jax.shard_map`: ``options`` that are complete; ``bodies``, ways to
    run an iteration of a scan, each with schedules of its own; and ``hosted``, such ways whose
    residuals wait in host memory."""

    options: Sequence[LoopOption]
    bodies: Sequence[Body] = ()
    hosted: Sequence[Body] = ()

    def menu(self, host: float) -> list[LoopOption]:
        """The options, then the Pareto front of residuals, bytes inside and price, the lowest price
        first; with a link to the host, of so many bytes a second, those that copy to it too."""
        hosted = self.hosted if host else ()
        found = [
            one.option() for one in [*self.bodies, *hosted] if one.loop.loops or not one.loop.whole
        ]
        bodies = _undominated(self.bodies)
        found += [option for one in bodies for option in one.menu(host)]
        own = (*bodies, *_undominated(hosted))
        return [
            *self.options,
            *_pareto([dataclasses.replace(option, bodies=own) for option in found]),
        ]


def loop_ways(program: Program, kernel: int, rates: Rates) -> LoopWays:
    """Ways to run a scan, as it is the first. Scans inside an iteration come with menus of their
    own."""
    operation = program.operation_of(kernel)
    body = operation.body
    assert body is not None
    plain = [plain_option(program, kernel)]
    if not is_differentiated(program, kernel):
        return LoopWays(plain)
    if any(inner.is_region for inner in body.operations):
        return LoopWays(plain)  # the user has placed regions: theirs it is
    iterations = [_Iteration(program, kernel, rates, inner) for inner in _body_options(body, rates)]
    first, *others = iterations
    bodies = first.save_levels()
    hosted: list[Body] = []
    if rates.host:
        for one in bodies:
            carried, saved = _hostable(one, first.body)
            for values in {carried, carried + saved} - {()}:
                hosted.append(_offloaded(one, values, first, rates))
    if others:  # where the inner ones take the fewest bytes, what is beside them counts
        bodies += others[-1].save_levels()
    bodies += [one.save_all() for one in iterations]
    return LoopWays(plain, bodies, hosted)


def _hostable(one: Body, body: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What an iteration may have in host memory of its carry, and of what it saves. Random keys
    stay: outside of `jax.jit` JAX does not stack those of host memory."""
    inside = [range(region.start + 1, region.stop + 1) for region in one.loop.regions]
    if body.rules.loops.hosts_in_regions:
        inside = []
    carried, saved = (
        tuple(value for value in values if not dtype_of(body, value).startswith("key<"))
        for values in (one.carried, one.loop.saved)
    )
    return carried, tuple(v for v in saved if not any(body.made[v] in span for span in inside))


def _body_options(body: Program, rates: Rates) -> list[list[LoopOption]]:
    """Ways to run the scans of a body: as they are, then some with fewer and fewer bytes."""
    rates = dataclasses.replace(rates, host=0.0)  # one loop at a time copies to the host
    menus = [loop_options(body, scan, rates) for scan in body.scans]
    ways = combine_menus(menus) if menus else [[]]
    found = [ways[0]]
    for way in ways[1:]:
        if _bytes(way) * _MENU_RATIO <= _bytes(found[-1]) or way is ways[-1]:
            found.append(way)
    return found


def _bytes(way: list[LoopOption]) -> int:
    return sum(option.bytes for option in way)


def checkpointed(program: Program, kernel: int, rates: Rates) -> dict[str, list[LoopOption]]:
    """A scan as its author would checkpoint it, by the policies of `jax.checkpoint`: one region on
    its body, whose own scans are as they are or have one on theirs, or on theirs alone. Nothing
    parts it from what comes after: a plan is to have what that line has."""
    body = program.operation_of(kernel).body
    assert body is not None
    if not is_differentiated(program, kernel):  # a region changes nothing
        return {name: [plain_option(program, kernel)] for name in policies(body)}
    if any(inner.is_region for inner in body.operations):
        return {}
    scans = body.scans
    inner = {"": [plain_option(body, scan) for scan in scans]}
    menus = [checkpointed(body, scan, rates) for scan in scans]
    if menus and all(menus):
        inner |= {name: [menu[name][0] for menu in menus] for name in menus[0]}
    found: dict[str, list[LoopOption]] = {}
    for inside, way in inner.items():
        iteration = _Iteration(program, kernel, rates, way)
        if inside:
            found[inside].append(_unparted(iteration.save_all().option()))
        for name, saved in policies(iteration.body).items():
            if inside in ("", name):
                found.setdefault(name, []).append(_unparted(iteration.with_region(saved).option()))
    return found


def _unparted(option: LoopOption) -> LoopOption:
    loop = option.loop and dataclasses.replace(option.loop, parted=False)
    return dataclasses.replace(option, loop=loop)


class _Iteration:
    """One iteration of a scan whose own scans are decided."""

    def __init__(self, program: Program, kernel: int, rates: Rates, inner: list[LoopOption]):
        self.kernel, self.operation = kernel, program.operation_of(kernel)
        body = self.operation.body
        assert body is not None
        decided = dict(zip(body.scans, inner, strict=True))
        self.loops = tuple(option.loop for option in inner if option.loop)
        self.body = body.with_loops(
            {n: (o.residuals, o.inside, o.loop is not None) for n, o in decided.items()}
        )
        self.seconds = of_each(self.body, rates.seconds)
        self.prices = of_each(self.body, rates.price)
        self.inner = inner
        self.plain = plain_option(program, kernel)
        self.forward = self.costs([(number, 1) for number in range(len(body.kernels))])
        self.state = sum(body.sizes[value] for value in self.operation.carry)
        # What JAX stacks of the inner loops, and what their schedules have in its place.
        self.stacked = sum(body.residual_bytes(n) for n, o in decided.items() if o.loop)
        self.in_place = sum(option.residuals for option in inner if option.loop)

    def costs(self, runs, inner: list[LoopOption] | None = None) -> Costs:
        """Of kernels that run, as often as they do, and of what inner loops run again."""
        kernels, more = self.body.kernels, inner or []
        return (
            sum(kernels[k].flops * n for k, n in runs) + sum(one.flops for one in more),
            sum(kernels[k].moved * n for k, n in runs) + sum(one.moved for one in more),
            sum(self.seconds[k] * n for k, n in runs) + sum(one.seconds for one in more),
            sum(self.prices[k] * n for k, n in runs) + sum(one.price for one in more),
        )

    def peak_without_loop(
        self, saved: Set[int], regions: tuple[Region, ...] = ()
    ) -> Callable[[], int]:
        """What a body takes where no loop parts its derivative from it; asked for where a schedule
        has blocks of one turn."""

        @functools.cache
        def peak() -> int:
            body = self.body
            return simulate_block(body, 0, len(body.kernels), saved, regions, looped=False).peak

        return peak

    def save_all(self) -> Body:
        """All that its derivative reads is saved."""
        length, body = self.operation.length, self.body
        cost = simulate_block(body, 0, len(body.kernels), None)
        # JAX may stack less of a loop where it is in this one than where it is alone.
        others = max(self.plain.residuals // max(length, 1) - self.stacked, 0)
        each = others + self.operation.stacks.results + self.in_place
        return Body(
            Loop(self.kernel, whole=True, loops=self.loops), (), length, self.state, each,
            cost.peak, self.peak_without_loop(frozenset()), (cost.at,), self.costs([], self.inner),
            self.forward,
        )  # fmt: skip

    def save_levels(self) -> list[Body]:
        """A part is saved, for each level of what is saved and each memory inside."""
        body, prices = self.body, self.prices
        peak = simulate_block(body, 0, len(body.kernels), frozenset()).peak
        blocks = Blocks(body, prices, _LEVELS, _sets(body, prices), gradients=True)
        slot = max(peak // _SLOTS + 1, 1)
        solution = Solution(blocks.chain(slot), 2 * _SLOTS)
        return [
            self.with_region(
                saved, blocks.regions(solution.inner(level, 0, solution.count, memory))
            )
            for level, saved in enumerate(blocks.levels)
            for memory in _memories(solution, level)
        ]

    def with_region(self, saved: Set[int], regions: tuple[Region, ...] = ()) -> Body:
        """One region round everything, with others inside of it."""
        body, operation = self.body, self.operation
        cost = simulate_block(body, 0, len(body.kernels), saved, regions)
        carried = tuple(sorted(cost.read.intersection(operation.carry)))
        read = tuple(sorted(cost.read.intersection(saved)))
        return Body(
            Loop(self.kernel, read, regions, loops=self.loops),
            carried,
            operation.length,
            self.state,
            sum(body.sizes[value] for value in (*carried, *read)),
            cost.peak,
            self.peak_without_loop(saved, regions),
            locate(regions, cost.at),
            self.costs(cost.runs.items(), self.inner),
            self.forward,
        )


def _undominated(bodies: Sequence[Body]) -> list[Body]:
    """The bodies that no other betters in bytes kept, bytes inside and price. Of too many those
    that no two together better in what they keep and their price, and some of the others."""
    found: list[Body] = []
    for one in sorted(
        bodies, key=lambda one: (one.recompute_cost[3], one.residual_bytes, one.inside)
    ):
        if all(
            one.residual_bytes < other.residual_bytes or one.inside < other.inside
            for other in found
        ):
            found.append(one)
    if len(found) > _BODIES:
        hull = lower_hull(found, lambda one: (one.residual_bytes, one.recompute_cost[3]))[:_BODIES]
        others = [one for one in found if one not in hull]
        some = np.linspace(0, len(others) - 1, _BODIES - len(hull))
        found = [*hull, *(others[int(at)] for at in some)]
    return found


def _offloaded(one: Body, values: tuple[int, ...], iteration: "_Iteration", rates: Rates) -> Body:
    """A way to run an iteration with some of its residuals in host memory: one iteration's of them
    are on the device, and the next ones' on their way."""
    body, kept = iteration.body, {*one.carried, *one.loop.saved}
    moved = sum(body.sizes[value] for value in values)
    flops, bytes_moved, seconds, price = one.recompute_cost
    regions = one.loop.regions
    exposed = exposed_seconds(body, iteration.seconds, kept, regions, values, rates.host)
    saved = tuple(value for value in one.loop.saved if value not in values)
    return dataclasses.replace(
        one,
        loop=dataclasses.replace(one.loop, saved=saved, offloaded=values),
        residual_bytes=one.residual_bytes - moved,
        inside=one.inside + 2 * moved,
        peak_without_loop=lambda: one.peak_without_loop() + 2 * moved,
        recompute_cost=(flops, bytes_moved, seconds + exposed, price + one.waiting * exposed),
        host=moved,
    )


def plain_option(program: Program, kernel: int) -> LoopOption:
    """A scan as JAX differentiates it, and stacks what its derivative reads; or a `jax.shard_map`
    as it is."""
    operation = program.operation_of(kernel)
    body = operation.body
    assert body is not None
    if not is_differentiated(program, kernel):
        return LoopOption(None, 0, 0, ())
    if kernel in program.maps:
        return LoopOption(None, program.residual_bytes(kernel), operation.derivative_workspace, ())
    cost = peak_of_scan(program, kernel)
    # Between the passes, and so not beside what a turn takes. What a plan saves lies by rows.
    relaid = operation.stacks.relaid if program.rules.loops.row_major else 0
    inside = max(cost.peak, relaid)
    return LoopOption(None, program.residual_bytes(kernel), inside, (cost.at,))


def is_differentiated(program: Program, kernel: int) -> bool:
    """Whether a scan or a `jax.shard_map` has a derivative."""
    return any(program.active[value] for value in program.operation_of(kernel).outputs)


def _sets(body: Program, prices: list[float]) -> list[frozenset[int]]:
    """Nothing, and those sets of results that no other set betters in both bytes and price spared:
    a body has few of them that matter, and each counts as often as it repeats."""
    expensive = [
        (
            sum(body.sizes[v] for v in kernel.reusable_results),
            prices[index],
            frozenset(kernel.reusable_results),
        )
        for index, kernel in enumerate(body.kernels)
        if kernel.residuals is None and kernel.reusable_results
    ]
    # Ranks that the thresholds have are not all: what fits beside them may be smaller.
    front: list[tuple[int, float, frozenset[int]]] = [(0, 0.0, frozenset())]
    for size, price, values in sorted(expensive, key=lambda entry: -entry[1])[:_KERNELS]:
        grown = front + [(b + size, p + price, chosen | values) for b, p, chosen in front]
        front = []
        for entry in sorted(grown, key=lambda entry: (entry[0], -entry[1])):
            if not front or entry[1] > front[-1][1]:
                front.append(entry)
    if len(front) > _SETS:
        front = [front[int(at)] for at in np.linspace(0, len(front) - 1, _SETS)]
    return [chosen for _, _, chosen in front]


def _memories(solution: Solution, level: int) -> list[int]:
    """Memories worth trying for a region round everything: the least, the least that costs no more
    than all of it, and one between."""
    prices = solution.prices(level)
    fits = np.flatnonzero(np.isfinite(prices))
    if not len(fits):
        return []
    low, high = int(fits[0]), int(np.argmax(prices <= prices[-1]))
    return sorted({low, (low + high) // 2, high})


def _pareto(options: list[LoopOption]) -> list[LoopOption]:
    front: list[LoopOption] = []
    for option in sorted(options, key=lambda o: (o.price, o.residuals + o.inside)):
        if all(o.residuals > option.residuals or o.inside > option.inside for o in front):
            front.append(option)
    if len(front) > _OPTIONS:
        front = [front[int(at)] for at in np.linspace(0, len(front) - 1, _OPTIONS)]
    return front
