"""How often long loops run their steps again: against the optimum by exhaustive search."""

import functools
import itertools

import pytest

from jaxmem.loops import Schedule, cheapest, on_host
from jaxmem.loops.schedules import advances, reachable, repeats


@functools.cache
def fewest(blocks, states):
    """The fewest runs of blocks, by trying every place for the next state."""
    if blocks == 1:
        return 0
    if states == 1:
        return blocks * (blocks - 1) // 2
    return min(
        first + fewest(blocks - first, states - 1) + fewest(first, states)
        for first in range(1, blocks)
    )


@pytest.mark.parametrize("blocks", [1, 2, 3, 10, 37, 60])
def test_the_formula_is_the_optimum(blocks):
    for states in range(1, 12):
        assert advances(blocks, states) == fewest(blocks, states), states


def by_rule(schedule):
    """Runs of blocks where the next state is kept where the table says."""
    table = schedule.reachable

    @functools.cache
    def run(blocks, states):
        if blocks == 1:
            return 0
        if states == 1:
            return blocks * (blocks - 1) // 2
        most = int(sum(table[states] < blocks))
        first = min(table[states, most - 1], blocks - table[states - 1, most - 1])
        assert 1 <= first < blocks
        return first + run(blocks - first, states - 1) + run(first, states)

    return run(schedule.blocks, schedule.states)


@pytest.mark.parametrize("states", [1, 2, 3, 5, 8, 20])
def test_the_rule_of_the_table_reaches_the_optimum(states):
    for blocks in (1, 2, 3, 7, 20, 61, 150):
        schedule = Schedule(blocks, blocks, 1, min(states, blocks))
        assert by_rule(schedule) == advances(blocks, schedule.states)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 24, 61, 97])
@pytest.mark.parametrize(("state", "step"), [(1, 1), (3, 1), (1, 4), (1, 0), (0, 2)])
def test_within_bytes_no_schedule_is_much_better(length, state, step):
    """Every budget from the floor to the whole; all numbers of blocks, sizes and states."""
    state, step = max(state, 1), max(step, 1)
    every = [
        Schedule(length, blocks, block, states)
        for blocks in range(2, length + 1)
        for block in range(1, (length - 1) // (blocks - 1) + 1)
        for states in range(1, blocks + 1)
    ]
    floor, whole = state + step, length * step + state
    assert cheapest(length, state, step, floor - 1) is None
    for room in range(floor, whole, max((whole - floor) // 25, 1)):
        found = cheapest(length, state, step, room)
        assert found.bytes(state, step) <= room
        best = min(one.evaluations for one in every if one.bytes(state, step) <= room)
        assert found.evaluations <= 1.05 * best, (room, found)
    assert cheapest(length, state, step, whole).blocks == 1


def test_binomial_bounds():
    assert reachable(34, 3) == 7770 and repeats(7343, 34) == 3
    for states, most in ((64, 3), (34, 3), (12, 6)):
        assert repeats(7343, states) <= most
    # With the residuals of several steps at once, as much memory does with fewer.
    wave = {states: cheapest(7343, 2, 1, 2 * states) for states in (64, 34, 12)}
    assert [wave[states].repeats for states in (64, 34, 12)] == [2, 3, 5]
    assert [round(one.evaluations / 7343, 2) for one in wave.values()] == [1.7, 2.02, 4.18]


@pytest.mark.parametrize("length", [2, 17, 61, 7343])
def test_states_on_the_host_leave_the_device_to_residuals(length):
    for state, step in ((1, 1), (5, 1), (1, 3)):
        assert on_host(length, state, step, 2 * state + step - 1) is None
        for room in range(2 * state + step, 2 * state + length * step, max(length // 30, 1)):
            found = on_host(length, state, step, room)
            assert found.host and found.states == found.blocks - 1 and found.tail >= 1
            assert max(found.tail, found.block) * step + 2 * state <= room
            assert found.evaluations == length - found.tail
        assert on_host(length, state, step, 2 * state + length * step) is None


def test_more_bytes_never_take_more_evaluations():
    for length, state, step in itertools.product((61, 1000, 7343), (1, 5), (1, 3)):
        last = None
        for room in range(state + step, length * step, max(length // 40, 1)):
            now = cheapest(length, state, step, room).evaluations
            assert last is None or now <= 1.02 * last
            last = now


def test_a_million_steps_need_no_table_of_a_million():
    for room in (3, 10, 100, 10**4, 10**6):
        found = cheapest(10**6, 1, 1, room)
        assert found.bytes(1, 1) <= room and found.reachable.size < 10**6
