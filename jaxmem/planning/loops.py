"""What a scan may save and recompute of its body: a short menu, from most memory to least.

What the forward loop keeps for the backward one is stacked, so a value saved costs its bytes times
the length, and what is inside one iteration costs them once.
"""

import dataclasses

import numpy as np

from jaxmem.planning.blocks import Blocks
from jaxmem.planning.chain import Solution
from jaxmem.planning.rates import DEAR, Rates
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


@dataclasses.dataclass(frozen=True, slots=True)
class LoopOption:
    """One way to run a scan: bytes of its residuals, on the device and on the host, and inside its
    derivative, the place where those peak, and what its backward pass runs again in all
    iterations, with its price (`Rates.price`)."""

    loop: Loop | None
    residuals: int
    inside: int
    place: tuple[int, ...]
    flops: int = 0
    moved: int = 0
    seconds: float = 0.0
    price: float = 0.0
    host: int = 0


def loop_options(program: Program, kernel: int, rates: Rates) -> list[LoopOption]:
    """The menu of one scan: as it is, then the Pareto front of residuals, bytes inside and price,
    the lowest price first. With a link to the host residuals may wait there."""
    operation = program.operation_of(kernel)
    body = operation.body
    assert body is not None
    plain = plain_option(program, kernel)
    found: list[LoopOption] = []
    if any(inner.is_region for inner in body.operations):
        return [plain]  # the user has placed regions: theirs it is
    seconds = [rates.seconds(inner) for inner in body.kernels]
    prices = [rates.price(inner) for inner in body.kernels]
    blocks = Blocks(body, prices, _LEVELS, _sets(body, prices), gradients=True)
    slot = max(plain.inside // _SLOTS + 1, 1)
    solution = Solution(blocks.chain(slot), 2 * _SLOTS)
    carry = sum(body.sizes[value] for value in operation.carry)
    for level, saved in enumerate(blocks.levels):
        for memory in _memories(solution, level):
            regions = blocks.regions(solution.inner(level, 0, solution.count, memory))
            cost = simulate_block(body, 0, len(body.kernels), saved, regions)
            stacked = carry + sum(body.sizes[value] for value in cost.read)
            runs = list(cost.runs.items())
            for segments in _segments(operation.length):
                # A loop over loops runs its body once more, and keeps the carries between them.
                more = range(len(body.kernels)) if segments > 1 else ()
                again = [*runs, *((k, 1) for k in more)]
                each = operation.length // segments
                loop = Loop(kernel, segments, tuple(sorted(cost.read)), regions)
                option = LoopOption(
                    loop,
                    each * stacked + segments * carry * (segments > 1),
                    cost.peak,
                    place_of(regions, cost.at),
                    operation.length * sum(body.kernels[k].flops * n for k, n in again),
                    operation.length * sum(body.kernels[k].moved * n for k, n in again),
                    operation.length * sum(seconds[k] * n for k, n in again),
                    operation.length * sum(prices[k] * n for k, n in again),
                )
                found.append(option)
                if rates.host and segments == 1:
                    for offloaded in (operation.carry, (*operation.carry, *loop.saved)):
                        found.append(_offloaded(option, offloaded, operation, sum(seconds), rates))
    return [plain, *_pareto(found)]


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


def _segments(length: int) -> list[int]:
    """How many scans to run one scan as: one, or about the root of its length."""
    parts = [n for n in range(2, length) if length % n == 0]
    return [1, *sorted(parts, key=lambda n: abs(n - length**0.5))[:1]]


def _pareto(options: list[LoopOption]) -> list[LoopOption]:
    front: list[LoopOption] = []
    for option in sorted(options, key=lambda o: (o.price, o.residuals + o.inside)):
        if all(o.residuals > option.residuals or o.inside > option.inside for o in front):
            front.append(option)
    if len(front) > _OPTIONS:
        front = [front[int(at)] for at in np.linspace(0, len(front) - 1, _OPTIONS)]
    return front
