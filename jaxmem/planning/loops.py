"""What a scan may save and recompute of its body: a short menu, from most memory to least.

What the forward loop keeps for the backward one is stacked, so a value saved costs its bytes times
the length, and what is inside one iteration costs them once. With a schedule (`jaxmem.loops`) the
states of some iterations are kept, and those between are run again.
"""

import dataclasses

import numpy as np

from jaxmem.loops import IN_FLIGHT, Schedule, cheapest, on_host
from jaxmem.planning.blocks import Blocks
from jaxmem.planning.chain import Solution
from jaxmem.planning.rates import DEAR, Rates, of_each
from jaxmem.planning.regions import Loop, place_of
from jaxmem.planning.simulate import simulate_block
from jaxmem.program import Operation, Program

# Chosen: half and twice change what a GPT's scan recomputes by at most 0.4 points of the step's
# time (benchmarks/planner/sensitivity.py). They bound the time of planning.
_SLOTS = 128
_LEVELS = 24
_SETS = 64
_KERNELS = 14  # the dearest ones of a body, whose subsets are tried; 7 plan in 0.6 of the time
_OPTIONS = 200
# Of the time of a body: how much of it copies to and from the host may run beside. Chosen, until
# benchmarks/gpu_offload.py has run; a quarter and all of it change no plan of that scan.
_OVERLAP = 0.5
# The bytes of schedules in a menu are so many times apart. Chosen: a plan asks for the schedule of
# the bytes that are left to it anyway (`LoopOption.with_room`).
_STEP = 1.2
_BODIES = 12  # ways to run a body that have schedules


@dataclasses.dataclass(frozen=True, slots=True)
class LoopOption:
    """One way to run a scan: bytes of its residuals, on the device and on the host, and inside its
    derivative, the place where those peak, and what its backward pass runs again in all
    iterations, with its price (`Rates.price`); ``body`` are the figures of one iteration."""

    loop: Loop | None
    residuals: int
    inside: int
    place: tuple[int, ...]
    flops: int = 0
    moved: int = 0
    seconds: float = 0.0
    price: float = 0.0
    host: int = 0
    body: "_Body | None" = None

    @property
    def bytes(self) -> int:
        """Bytes on the device in its derivative."""
        return self.residuals + self.inside

    def with_room(self, room: int) -> "LoopOption | None":
        """The same body by the schedule with the fewest evaluations that takes so many bytes."""
        return self.body.scheduled(room) if self.body else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """A way to run the iterations of a scan: what one of them keeps (``step`` bytes, ``carried``
    among it: what it needs of the carry, which has ``state`` bytes) and has inside, what its
    derivative runs again, and what the iteration itself costs."""

    loop: Loop
    carried: tuple[int, ...]
    length: int
    state: int
    step: int
    inside: int
    place: tuple[int, ...]
    again: tuple[float, float, float, float]  # FLOPs, bytes moved, seconds, price
    forward: tuple[float, float, float, float]

    @property
    def bytes(self) -> int:
        return self.length * self.step + self.inside

    def option(self, schedule: Schedule | None = None) -> LoopOption:
        """The iterations one after the other, or by a schedule."""
        runs, inside, residuals = 0, self.inside, self.length * self.step
        if schedule:
            runs = schedule.evaluations
            residuals = schedule.states * self.state
            inside += self.state  # the one that the loop is at
            if (
                schedule.host or not schedule.single
            ):  # else the step's residuals are inside, or that state
                residuals += schedule.tail * self.step
                inside += max(schedule.block - schedule.tail, 0) * self.step
        flops, moved, seconds, price = (
            self.length * again + runs * forward
            for again, forward in zip(self.again, self.forward, strict=True)
        )
        loop = dataclasses.replace(self.loop, schedule=schedule)
        return LoopOption(
            loop, residuals, inside, self.place, int(flops), int(moved), seconds, price, body=self
        )

    def scheduled(self, room: int) -> LoopOption | None:
        """By a schedule whose residuals, and what is inside, take at most so many bytes."""
        left = room - self.inside - self.state
        states = min(left // max(self.state, 1), self.length)
        found = []
        schedule = cheapest(self.length, self.state, self.step, left)
        if schedule and schedule.blocks > 1:
            found.append(schedule)
        if states >= 1 and self.length > 1:
            found.append(Schedule(self.length, self.length, 1, states))
        best = min(found, key=lambda schedule: schedule.evaluations, default=None)
        return self.option(best) if best else None

    def on_host(self, room: int, host: float) -> LoopOption | None:
        """By a schedule whose states wait in host memory, copied at so many bytes a second."""
        left = room - self.inside - self.state
        schedule = on_host(self.length, self.state, self.step, left)
        if schedule is None:
            return None
        option = self.option(schedule)
        # There and back, with nothing beside: XLA does not copy while the loop of a block runs.
        # A second of it counts as much as one of the steps that it spares.
        exposed = 2 * schedule.states * self.state / host
        counts = self.forward[3] / self.forward[2] if self.forward[2] else DEAR
        return dataclasses.replace(
            option,
            residuals=schedule.tail * self.step,
            inside=option.inside + IN_FLIGHT * self.state,
            seconds=option.seconds + exposed,
            price=option.price + counts * exposed,
            host=schedule.states * self.state,
            body=None,
        )

    def menu(self, host: float) -> list[LoopOption]:
        """Schedules from the most bytes to the least; with a link to the host, of so many bytes a
        second, those with states there too."""
        found: list[LoopOption] = []
        for scheduled in (self.scheduled, *[lambda room: self.on_host(room, host)] * bool(host)):
            room = float(self.bytes)
            while option := scheduled(int(room)):
                found.append(option)
                room = min(room / _STEP, option.bytes - 1)
        return found


def loop_options(program: Program, kernel: int, rates: Rates) -> list[LoopOption]:
    """The menu of one scan: as it is, then the Pareto front of residuals, bytes inside and price,
    the lowest price first. With a link to the host residuals may wait there."""
    operation = program.operation_of(kernel)
    body = operation.body
    assert body is not None
    plain = plain_option(program, kernel)
    if any(inner.is_region for inner in body.operations):
        return [plain]  # the user has placed regions: theirs it is
    seconds, prices = of_each(body, rates.seconds), of_each(body, rates.price)
    blocks = Blocks(body, prices, _LEVELS, _sets(body, prices), gradients=True)
    slot = max(plain.inside // _SLOTS + 1, 1)
    solution = Solution(blocks.chain(slot), 2 * _SLOTS)

    def costs(runs) -> tuple[float, float, float, float]:
        return (
            sum(body.kernels[k].flops * n for k, n in runs),
            sum(body.kernels[k].moved * n for k, n in runs),
            sum(seconds[k] * n for k, n in runs),
            sum(prices[k] * n for k, n in runs),
        )

    forward = costs([(number, 1) for number in range(len(body.kernels))])
    state = sum(body.sizes[value] for value in operation.carry)
    bodies: list[_Body] = []
    for level, saved in enumerate(blocks.levels):
        for memory in _memories(solution, level):
            regions = blocks.regions(solution.inner(level, 0, solution.count, memory))
            cost = simulate_block(body, 0, len(body.kernels), saved, regions)
            carried = tuple(sorted(cost.read.intersection(operation.carry)))
            read = tuple(sorted(cost.read.intersection(saved)))
            step = sum(body.sizes[value] for value in (*carried, *read))
            bodies.append(
                _Body(
                    Loop(kernel, read, regions),
                    carried,
                    operation.length,
                    state,
                    step,
                    cost.peak,
                    place_of(regions, cost.at),
                    costs(cost.runs.items()),
                    forward,
                )
            )
    found = [one.option() for one in bodies]
    if rates.host:
        for one in bodies:
            for values in {one.carried, (*one.carried, *one.loop.saved)} - {()}:
                found.append(_offloaded(one.option(), values, operation, forward[2], rates))
    each = plain.residuals // max(operation.length, 1) + operation.results
    whole = Loop(kernel, whole=True)
    none = (0, 0, 0, 0)
    bodies.append(
        _Body(whole, (), operation.length, state, each, plain.inside, plain.place, none, forward)
    )
    for one in _undominated(bodies):
        found += one.menu(rates.host)
    return [plain, *_pareto(found)]


def _undominated(bodies: list[_Body]) -> list[_Body]:
    """The bodies that no other betters in bytes kept, bytes inside and price."""
    found: list[_Body] = []
    for one in sorted(bodies, key=lambda one: (one.again[3], one.step, one.inside)):
        if all(one.step < other.step or one.inside < other.inside for other in found):
            found.append(one)
    if len(found) > _BODIES:
        found = [found[int(at)] for at in np.linspace(0, len(found) - 1, _BODIES)]
    return found


def _offloaded(
    option: LoopOption, values: tuple[int, ...], scan: Operation, seconds: float, rates: Rates
) -> LoopOption:
    """An option with some of its residuals in host memory: a body's worth of them is on the
    device, and the next on its way. ``seconds`` are those of one run of the body."""
    assert scan.body is not None and option.loop is not None
    moved = sum(scan.body.sizes[value] for value in values)
    link = moved / rates.host
    beside = (seconds, 2 * seconds + option.seconds / scan.length)
    exposed = scan.length * sum(max(link - _OVERLAP * time, 0.0) for time in beside)
    loop = option.loop
    saved = tuple(value for value in loop.saved if value not in values)
    return dataclasses.replace(
        option,
        loop=dataclasses.replace(loop, saved=saved, offloaded=values),
        residuals=option.residuals - scan.length * moved,
        inside=option.inside + 2 * moved,
        seconds=option.seconds + exposed,
        price=option.price + DEAR * exposed,
        host=scan.length * moved,
        body=None,
    )


def plain_option(program: Program, kernel: int) -> LoopOption:
    """A scan as JAX differentiates it, and stacks what its derivative reads."""
    body = program.operation_of(kernel).body
    assert body is not None
    cost = simulate_block(body, 0, len(body.kernels), frozenset())
    return LoopOption(None, program.residual_bytes(kernel), cost.peak, (cost.at,))


def _sets(body: Program, prices: list[float]) -> list[frozenset[int]]:
    """Nothing, and those sets of results that no other set betters in both bytes and price spared:
    a body has few of them that matter, and each counts as often as it repeats."""
    dear = [
        (sum(body.sizes[v] for v in kernel.spared), prices[index], frozenset(kernel.spared))
        for index, kernel in enumerate(body.kernels)
        if kernel.residuals is None and kernel.spared
    ]
    # Ranks that the thresholds have are not all: what fits beside them may be smaller.
    front: list[tuple[int, float, frozenset[int]]] = [(0, 0.0, frozenset())]
    for size, price, values in sorted(dear, key=lambda entry: -entry[1])[:_KERNELS]:
        grown = front + [(b + size, p + price, held | values) for b, p, held in front]
        front = []
        for entry in sorted(grown, key=lambda entry: (entry[0], -entry[1])):
            if not front or entry[1] > front[-1][1]:
                front.append(entry)
    if len(front) > _SETS:
        front = [front[int(at)] for at in np.linspace(0, len(front) - 1, _SETS)]
    return [held for _, _, held in front]


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
