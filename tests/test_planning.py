"""The sqrt planner on programs small enough to check by hand or by trying every plan."""

import itertools

import numpy as np
import pytest

from jaxmem import BudgetError
from jaxmem.planning import plan_sqrt
from jaxmem.planning._sqrt import _Chain
from jaxmem.program import Operation, Program


def chain(sizes, flops=None, skips=()):
    """A chain of dear operations: value 0 is the input, operation i makes value i + 1.

    ``skips`` are pairs (value, operation that reads it too).
    """
    flops = flops or [10] * len(sizes)
    operations = []
    for index in range(len(sizes)):
        extra = tuple(value for value, reader in skips if reader == index)
        operations.append(
            Operation("dot_general", (index, *extra), (index + 1,), flops[index], False, "operands")
        )
    return Program(tuple(operations), (0, *sizes), 1, (len(sizes),))


def test_sixteen_equal_layers_make_about_four_regions():
    plan = plan_sqrt(chain([100] * 16))
    assert 3 <= len(plan.regions) <= 5
    # At most 3 values kept, and one region of 5 values with its cotangent.
    assert plan.projected_bytes <= 900 < plan.plain_bytes == 1600


def test_memory_grows_as_the_square_root():
    peaks = [plan_sqrt(chain([100] * n)).projected_bytes for n in (16, 64, 256)]
    assert peaks[1] / peaks[0] < 2.3
    assert peaks[2] / peaks[1] < 2.3


def test_one_operation_needs_no_region():
    assert plan_sqrt(chain([100])).regions == ()


def test_a_program_without_operations():
    plan = plan_sqrt(Program((), (8,), 1, (0,)))
    assert (plan.regions, plan.projected_bytes) == ((), 0)


def test_the_last_region_is_never_wrapped():
    for n in range(1, 30):
        plan = plan_sqrt(chain([100] * n))
        assert not plan.regions or plan.regions[-1].stop < n


def test_a_skip_is_kept_once_and_stays_alive():
    sizes = [100, 1, 1, 1, 1, 1, 1, 1]
    plan = plan_sqrt(chain(sizes, skips=[(1, 7)]))
    assert sum(region.kept_bytes for region in plan.regions) < 200


def every_row_of_regions(count):
    inner = range(1, count)
    for size in range(count):
        yield from itertools.combinations(inner, size)


@pytest.mark.parametrize("seed", range(40))
def test_no_row_of_regions_is_better(seed):
    """Against brute force over all rows of regions, with skips."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 9))
    sizes = [int(size) for size in random.integers(1, 100, count)]
    flops = [int(work) for work in random.integers(1, 50, count)]
    skips = [
        (int(value), int(reader))
        for value, reader in random.integers(1, count + 1, (2, 2))
        if value < reader < count
    ]
    program = chain(sizes, flops, skips)
    solver = _Chain(program)
    assert list(solver.cuts) == list(range(count + 1)), "after a dear operation one may cut"
    rows = list(every_row_of_regions(len(solver.cuts) - 1))
    peaks = {row: solver.peak(list(row)) for row in rows}
    best = min(peaks.values())
    plan = plan_sqrt(program)
    assert plan.projected_bytes == best
    # Within a budget: no row that fits leaves more at the end unwrapped.
    budget = (best + peaks[()]) // 2
    within = plan_sqrt(program, budget)
    assert within.projected_bytes <= budget
    wrapped = within.regions[-1].stop if within.regions else 0
    done = solver.flops[np.searchsorted(solver.cuts, wrapped)]
    for row, peak in peaks.items():
        if peak <= budget:
            assert done <= solver.flops[row[-1] if row else 0]


def test_the_budget_error_names_the_lowest_budget_and_the_operation():
    program = chain([100] * 8)
    least = plan_sqrt(program).projected_bytes
    with pytest.raises(BudgetError) as caught:
        plan_sqrt(program, least + 49, reserved=50)
    assert str(caught.value) == (
        f"No sqrt plan fits the budget of {least + 49} B with 50 B of it reserved; the lowest one "
        f"that does is about {least + 50} B ({least + 50} bytes), set by the backward pass of "
        "dot_general in the function. Raise the budget, shrink the batch, or accumulate gradients "
        "over microbatches."
    )


def test_a_long_program_is_planned_in_seconds():
    import time

    began = time.perf_counter()
    plan = plan_sqrt(chain([100] * 20_000))
    assert time.perf_counter() - began < 20
    assert plan.projected_bytes < plan.plain_bytes / 30
