"""One region on each block of a model, as its author would place them: what a plan must not lose
to.

Blocks are stretches of kernels that repeat, whatever the modules are called, and stretches that one
module path made. Chen et al. (2016) recompute such a row of segments; the policies of
`jax.checkpoint` say what each of them saves.
"""

import itertools
from collections.abc import Callable, Sequence, Set

import numpy as np

from jaxmem.planning.regions import Region
from jaxmem.planning.repeating import Spans, repeating_blocks
from jaxmem.program import Operation, Program

# Of the price of all kernels: what a row of blocks has to cover to be worth a try. Chosen
# (benchmarks/planner/sensitivity.py).
_COVERED = 0.25
# The same: where what repeats covers less, the model may have other blocks, which are alike but not
# the same, and they are looked for. Chosen.
_MOST = 0.75
# Of the bytes of the largest value that a block hands on: what takes less is beside it, such as
# what a head adds to a loss. Chosen: half and twice change no row of 26 programs, those of
# tests/test_segments.py among them.
SMALL_BESIDE = 1 / 16


def block_partitions(program: Program, prices: Sequence[float]) -> list[Spans]:
    """Ways to see a program as a row of blocks: kernels from and to, in order."""
    ways = _repeating(program, prices, _crossing_kernels(program))
    whole, *others = (in_kernels(program, spans) for spans in ways)
    last = (program.operations[kernel.operations[-1]] for kernel in program.kernels)
    by_path = _by_path([operation.path for operation in last])
    found = dict.fromkeys([whole, by_path, *others])
    return [spans for spans in found if _is_row(spans, prices)]


def operation_block_partitions(program: Program, prices: Sequence[float]) -> list[Spans]:
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
    return len(spans) > 1 and _covered(spans, prices) >= _COVERED


def _covered(spans: Spans, prices: Sequence[float]) -> float:
    """The share of a program's price that blocks have."""
    return sum(sum(prices[a:b]) for a, b in spans) / (sum(prices) or 1.0)


def per_block_regions(program: Program, spans: Spans, saved: Set[int]) -> tuple[Region, ...]:
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


def _repeating(program: Program, prices: Sequence[float], crossing: np.ndarray) -> list[Spans]:
    """Ways to see a program as what repeats in it."""
    ways: list[dict[str, bool]] = [{}, {"whole": False}, {"finer": True}]
    found = [repeating_blocks(program, prices, crossing, **way) for way in ways]
    coarse = repeating_blocks(program, prices, crossing, coarse=True)
    # Where it has as many blocks it has the same.
    found = found if len(coarse) in map(len, found) else [*found, coarse]
    rows = (in_kernels(program, spans) for spans in found)
    if max(_covered(spans, prices) for spans in rows) >= _MOST:
        return found
    # Authors cut in front of a matmul or a convolution. (What crosses changes from block to block:
    # the fewest bytes may cross in the middle of one.)
    expensive = np.array([one.flops > 0 for one in program.operations] + [True])
    in_front = np.where(expensive, crossing, crossing + crossing.max())
    resized = repeating_blocks(program, prices, in_front, resized=True)
    return [*found, resized, _between_single_values(program)]


def _between_single_values(program: Program) -> Spans:
    """Stretches from one matmul or convolution in front of which one value crosses alone to the
    next, but for what is small: residual blocks, whatever they are made of. None where that is so
    in front of each: there is no block of several. (An input crosses from the first operation that
    reads it.)"""
    count, last = len(program.operations), last_read(program)
    total, largest = np.zeros(count + 1), np.zeros(count + 1)
    seen = set[int]()
    for number, operation in enumerate(program.operations):
        read = (value for value in operation.inputs if value < program.input_count)
        for value in {*read, *operation.outputs} - seen:
            across = slice(number + 1, last.get(value, number) + 1)
            total[across] += program.sizes[value]
            largest[across] = np.maximum(largest[across], program.sizes[value])
            seen.add(value)
    alone = total <= (1 + SMALL_BESIDE) * largest
    expensive = [number for number, one in enumerate(program.operations) if one.flops and number]
    cuts = [number for number in expensive if alone[number]]
    return tuple(itertools.pairwise([0, *cuts, count])) if cuts != expensive else ()


def _crossing_kernels(program: Program) -> np.ndarray:
    """For each place between two operations the bytes of the values in memory that the kernels
    complete there have made and others read."""
    change = [0] * (len(program.kernels) + 2)
    for kernel in program.kernels:
        for value in kernel.results:
            change[program.made[value]] += program.sizes[value]
            change[min(program.last_used[value], len(change) - 1)] -= program.sizes[value]
    return np.cumsum(change)[_complete(program)]


def _crossing(program: Program) -> np.ndarray:
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
    return np.cumsum(change)


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
