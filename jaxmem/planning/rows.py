"""One region on each block of a model, as its author would place them: what a plan must not lose
to.

Blocks are stretches of kernels that repeat, whatever the modules are called, and stretches that one
module path made. Chen et al. (2016) recompute such a row of segments; the policies of
`jax.checkpoint` say what each of them saves.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np

from jaxmem.planning.regions import Region
from jaxmem.program import Operation, Program

Spans = tuple[tuple[int, int], ...]

# Of the price of all kernels: what a row of blocks has to cover to be worth a try. Chosen.
_COVERED = 0.25
# Of the price of a block in the dearest row: what blocks of other rows have to cost. Chosen.
_ALIKE = 0.2
# Times the price of a block: no more of it is a block in part, or the first one, which differs from
# the others in what it reads. Chosen.
_PART = 1.2
# Of the price of a block: what repeats inside of it has to cover to be blocks of its own, such as
# the layers of two towers. Chosen.
_INSIDE = 0.5
# Operations: above this, only periods up to so many are looked for (quadratic time). Chosen.
_PERIODS = 2000


def tilings(program: Program, prices: Sequence[float]) -> list[Spans]:
    """Ways to see a program as a row of blocks: kernels from and to, in order."""
    ways = _repeating(program, prices, _crossing_kernels(program))
    whole, *others = (in_kernels(program, spans) for spans in ways)
    last = (program.operations[kernel.operations[-1]] for kernel in program.kernels)
    by_path = _by_path([operation.path for operation in last])
    found = dict.fromkeys([whole, by_path, *others])
    return [spans for spans in found if _is_row(spans, prices)]


def tilings_of_operations(program: Program, prices: Sequence[float]) -> list[Spans]:
    """The same by operations from and to, as an author has them: with what kernels compute of a
    block in the next one."""
    by_path = _by_path([operation.path for operation in program.operations])
    found = dict.fromkeys([*_repeating(program, prices, _crossing(program)), by_path])
    return [spans for spans in found if _is_row(in_kernels(program, spans), prices)]


def in_kernels(program: Program, spans: Spans) -> Spans:
    """Stretches of operations as those of the kernels that they complete."""
    done = _complete(program)
    return tuple((done[a], done[b]) for a, b in spans if done[a] < done[b])


def _is_row(spans: Spans, prices: Sequence[float]) -> bool:
    """Whether those are several, and much of the program."""
    return len(spans) > 1 and sum(sum(prices[a:b]) for a, b in spans) >= _COVERED * sum(prices)


def row(program: Program, spans: Spans, saved: Set[int]) -> tuple[Region, ...]:
    """One region on each block, which saves of it what ``saved`` says."""
    regions = []
    for start, stop in spans:
        made = {
            value
            for kernel in program.kernels[start:stop]
            for value in kernel.results
            if value != kernel.residuals
        }
        regions.append(Region(start, stop, tuple(sorted(made & saved))))
    return tuple(regions)


def policies(program: Program) -> dict[str, frozenset[int]]:
    """What policies of `jax.checkpoint_policies` save, convolutions among the matmuls, and those of
    vectors, which are none to a compiler that makes sums of them."""

    def saved(wanted: Callable[[Operation], bool]) -> frozenset[int]:
        last = [program.operations[kernel.operations[-1]] for kernel in program.kernels]
        return frozenset(
            value
            for kernel, operation in zip(program.kernels, last, strict=True)
            if (kernel.flops or operation.contraction.vectors) and kernel.residuals is None
            if wanted(operation)
            for value in kernel.results
        )

    return {
        "nothing_saveable": frozenset(),
        "dots_with_no_batch_dims_saveable": saved(
            lambda operation: not operation.contraction.batched
        ),
        "dots_saveable": saved(lambda _: True),
    }


def _by_path(paths: Sequence[str]) -> Spans:
    """Stretches whose module path starts with the same two parts (``ResNet/Block_3``)."""

    def block(number: int) -> str:
        path = paths[number].split("/")
        return "/".join(path[:2]) if len(path) > 2 else ""

    groups = ((name, list(group)) for name, group in itertools.groupby(range(len(paths)), block))
    return tuple((numbers[0], numbers[-1] + 1) for name, numbers in groups if name)


def _repeating(program: Program, prices: Sequence[float], crossing: Sequence[int]) -> list[Spans]:
    """Ways to see a program as what repeats in it."""
    ways: list[dict[str, bool]] = [{}, {"whole": False}, {"finer": True}]
    return [_by_repeats(program, prices, crossing, **way) for way in ways]


def _by_repeats(
    program: Program,
    prices: Sequence[float],
    crossing: Sequence[int],
    whole: bool = True,
    finer: bool = False,
) -> Spans:
    """Stretches of operations that are the same again and again, the dearest row of them first,
    then those in what is left of the program before and after it; cut where the fewest bytes cross,
    of which ``crossing`` has those before each operation. If not ``whole``, what is left may be a
    part of a block: a row may begin and end with one. ``finer``: where most of a block is blocks
    that repeat, they are those."""
    kinds: dict[tuple, int] = {}
    kind = [kinds.setdefault(_kind(program, one), len(kinds)) for one in program.operations]
    signature = np.array(kind)
    price = np.zeros(len(kind) + 1)  # before each operation, of the kernels that are complete
    for kernel, of_kernel in zip(program.kernels, prices, strict=True):
        price[kernel.operations[-1] + 1] += of_kernel
    price = np.cumsum(price)

    def spans_between(start: int, stop: int, least: float) -> Iterator[tuple[int, int]]:
        found = _longest(signature[start:stop], price[start : stop + 1], least)
        if found is None:
            rest = price[stop] - price[start]
            if not whole and 0 < least <= rest <= _PART * least / _ALIKE:
                yield start, stop
            return
        first, period, count = found
        first += start
        # Where to cut: where the fewest bytes cross from the first block to the second. (What comes
        # before the first may be made of the program's inputs alone, which take no bytes.)
        room, second, begins = stop - first - count * period, first + period, first
        first += min(range(period), key=lambda at: (crossing[second + at], at > room, at))
        count -= first + count * period > stop
        each = (price[first + count * period] - price[first]) / count
        block = first, first + period
        parts = inside(*block) if finer else [block]
        blocks = [(a + at, b + at) for at in range(0, count * period, period) for a, b in parts]
        if blocks[0][0] == first and price[first] - price[begins] <= (_PART - 1) * each:
            blocks[0] = begins, blocks[0][1]  # with the little that is before the first cut
        else:
            begins = first
        yield from spans_between(start, begins, _ALIKE * each)
        yield from blocks
        yield from spans_between(first + count * period, stop, _ALIKE * each)

    def inside(start: int, stop: int) -> list[tuple[int, int]]:
        """The blocks of a block; itself, if most of it has none."""
        parts = list(spans_between(start, stop, 0.0))
        covered = sum(price[b] - price[a] for a, b in parts)
        is_row = len(parts) > 1 and covered >= _INSIDE * (price[stop] - price[start])
        return parts if is_row else [(start, stop)]

    return tuple(spans_between(0, len(kind), 0.0))


def _kind(program: Program, operation: Operation) -> tuple:
    """What two operations have in common that do the same."""
    sizes = program.sizes
    made = (sizes[value] for value in operation.outputs)
    return (operation.name, *made, -1, *(sizes[value] for value in operation.inputs))


def _longest(signature: np.ndarray, price: np.ndarray, least: float) -> tuple[int, int, int] | None:
    """The dearest stretch that consists of one period again and again, of a price of at least so
    much each: where it starts, the period, and how often; None: nothing repeats."""
    best, found = 0.0, None
    for period in range(1, min(len(signature) // 2, _PERIODS) + 1):
        same = np.concatenate([[False], signature[:-period] == signature[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, stops = edges[::2], edges[1::2]
        long = stops - starts >= period
        for start, stop in zip(starts[long], stops[long], strict=True):
            times = (stop - start) // period + 1
            covered = price[start + times * period] - price[start]
            # A shorter period that covers as much is the block.
            if covered > 1.02 * best and covered >= least * times:
                best, found = covered, (int(start), period, int(times))
    return found


def _crossing_kernels(program: Program) -> list[int]:
    """For each place between two operations the bytes of the values in memory that the kernels
    complete there have made and others read."""
    change = [0] * (len(program.kernels) + 2)
    for kernel in program.kernels:
        for value in kernel.results:
            change[program.made[value]] += program.sizes[value]
            change[min(program.last_used[value], len(change) - 1)] -= program.sizes[value]
    crossing = list(itertools.accumulate(change))
    return [crossing[done] for done in _complete(program)]


def _crossing(program: Program) -> list[int]:
    """For each place between two operations the bytes of the values, in memory or not, that are
    made before it and read after it."""
    change = [0] * (len(program.operations) + 1)
    last = last_read(program)
    for number, operation in enumerate(program.operations):
        for value in operation.outputs:
            if value in last:
                change[number + 1] += program.sizes[value]
                if last[value] < len(program.operations):
                    change[last[value] + 1] -= program.sizes[value]
    return list(itertools.accumulate(change))


def last_read(program: Program) -> dict[int, int]:
    """The last operation that reads each value that is read; of results the end."""
    reads = ((v, at) for at, one in enumerate(program.operations) for v in one.inputs)
    return dict(reads) | dict.fromkeys(program.outputs, len(program.operations))


def _complete(program: Program) -> list[int]:
    """For each place between two operations how many kernels are complete."""
    change = [0] * (len(program.operations) + 1)
    for kernel in program.kernels:
        change[kernel.operations[-1] + 1] += 1
    return list(itertools.accumulate(change))
