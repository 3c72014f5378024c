"""Planners on programs small enough to check by hand or by trying every plan."""

import dataclasses
import gc
import itertools
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.ground.budget import Budget
from jaxmem.planning import PLANNERS, Loop, Rates, Region, baseline_policies, simulate
from jaxmem.planning.dp import DP
from jaxmem.planning.loops import LoopOption, loop_options
from jaxmem.planning.options import combine_menus
from jaxmem.planning.regions import depth
from jaxmem.planning.sqrt import Sqrt, _Chain
from jaxmem.program import Operation, Program
from jaxmem.program.compiler_rules import apply_compiler_rules
from jaxmem.program.operations import Source
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.traced import TracedFunction

RATES = Rates(jaxmem.target("h200"))


def chain(sizes, flops=None, skips=()):
    """A chain of expensive operations: value 0 is the input, operation i makes value i + 1.

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
    planner = Sqrt(chain([100] * 16), RATES)
    layout = planner.cheapest_near_minimum()
    assert 3 <= len(layout.regions) <= 5
    # At most 3 values kept, and one region of 5 values with two cotangents.
    assert layout.peak <= 1000 < planner.plain.peak


def scanned(weights, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)


def mapped(weights, x):
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.PartitionSpec("data")
    inside = jax.shard_map(
        lambda x, weights: jnp.tanh(x @ weights[0]) @ weights[1],
        mesh=mesh,
        in_specs=(spread, jax.sharding.PartitionSpec()),
        out_specs=spread,
    )
    return jnp.sum(inside(x, weights) ** 2)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("loss", [scanned, mapped], ids=["scan", "shard_map"])
def test_a_plan_without_recomputation_is_the_one_for_a_budget_that_fits_everything(loss, offload):
    args = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
    target = jaxmem.target("h200", count=2)
    traced = TracedFunction(loss, args, {}, 0, target=target)
    constraints = Constraints(Limits(Budget(2**40), target, offload), "dp")
    found = constraints.plan_without_recomputation(traced.program)
    planned = constraints.plan(traced.program)
    assert (found.predicted, found.regions, found.loops) == (planned.predicted, (), planned.loops)


def test_memory_grows_as_the_square_root_by_sqrt_and_as_the_logarithm_by_dp():
    peaks = [Sqrt(chain([100] * n), RATES).cheapest_near_minimum().peak for n in (16, 64, 256)]
    assert peaks[1] / peaks[0] < 2.3
    assert peaks[2] / peaks[1] < 2.3
    peaks = [DP(chain([100] * n), RATES).cheapest_near_minimum().peak for n in (16, 64)]
    assert peaks[1] - peaks[0] <= 400  # two more levels of halves


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_ends_with_its_plan(planner):
    """It has tables of some 50 MB."""
    made = PLANNERS[planner](chain([10] * 8), RATES)
    ended = weakref.ref(made)
    made.cheapest_near_minimum(), made.cheapest_for(45)
    del made
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_operation_needs_no_region(planner):
    assert PLANNERS[planner](chain([100]), RATES).cheapest_near_minimum().regions == ()


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_program_without_operations(planner):
    layout = PLANNERS[planner](Program((), (8,), 1, (0,)), RATES).cheapest_near_minimum()
    assert (layout.regions, layout.peak) == ((), 0)


@pytest.mark.parametrize("planner", sorted(PLANNERS.keys() - {"dots"}))  # it saves all of these
def test_the_last_region_is_never_wrapped(planner):
    layouts = {
        n: PLANNERS[planner](chain([100] * n), RATES).cheapest_near_minimum() for n in range(1, 20)
    }
    stops = {n: layout.regions[-1].stop for n, layout in layouts.items() if layout.regions}
    assert stops, "none has regions"
    assert all(stop < n for n, stop in stops.items())


# ---- the layout, on paper


def test_the_layout_of_a_chain():
    """Backward from the last of four: all values but the output, its cotangent and its input's."""
    program = chain([10, 20, 30, 40])
    assert program.boundary_bytes == 2 * program.sizes[0] + 40
    plain = simulate(program, ())
    assert plain.peak == 10 + 20 + 30 + 40 + 30
    # With the first two in a region: 20 is kept, 10 is made again later.
    cost = simulate(program, (Region(0, 2),))
    assert cost.peak == 20 + 30 + 40 + 30
    assert cost.runs == {0: 2, 1: 1, 2: 1, 3: 1}
    # Saving what is made inside is not recomputing it.
    assert simulate(program, (Region(0, 2, saved=(1,)),)).runs[0] == 1
    assert simulate(program, (Region(0, 2, saved=(1,)),)).peak == plain.peak


def test_nested_regions_run_again_once_a_level():
    program = chain([10] * 8)
    nested = (Region(0, 6, regions=(Region(0, 4, regions=(Region(0, 2),)),)),)
    runs = simulate(program, nested).runs
    assert [runs[k] for k in range(8)] == [4, 3, 3, 2, 2, 1, 1, 1]


def test_a_reduction_has_no_buffer_of_its_own_in_the_backward_pass():
    operations = (
        Operation("dot_general", (0,), (1,), 10, False, "operands"),
        Operation("reduce_sum", (1,), (2,), 0, True, "nothing"),
        Operation("dot_general", (2,), (3,), 10, False, "operands"),
    )
    program = Program(operations, (0, 6400, 10, 10), 1, (3,))
    # In the first derivative: the cotangent of the reduction's result, spread out where it is read.
    assert simulate(program, ()).peak <= 6400 + 3 * 10


def test_a_value_lies_in_the_memory_of_a_gradient_that_is_yet_to_come():
    """The gradient of the input is made last: of two values alive at once one lies in its memory,
    and beside the other there is the cotangent of the output."""
    operations = tuple(
        Operation("dot_general", (index,), (index + 1,), 10, False, "nothing") for index in range(4)
    )
    separate = Program(operations, (0, 40, 40, 40, 1), 1, (4,))
    reused = dataclasses.replace(separate, sizes=(64, 40, 40, 40, 1))
    assert simulate(separate, ()).peak == 80
    assert simulate(reused, ()).peak == 40 + 1
    assert reused.boundary_bytes == 64 + 64 + 1


def test_few_picked_elements_do_not_put_their_operand_into_memory():
    """The loss of a language model: fp32 logits are made for the reader of some of them, and its
    derivative scatters into as many."""
    operations = (
        Operation("dot_general", (0, 1), (2,), 10, False, "operands"),
        Operation("convert_element_type", (2,), (3,), 0, True, "nothing"),
        Operation("gather", (3,), (4,), 0, False, "operands"),
    )
    types = ("bfloat16[]",) * 3 + ("float32[]",) * 2
    program = Program(operations, (8, 8, 3200, 6400, 4), 2, (4,), types)
    gather = program.kernels[-1]
    assert (gather.sources, gather.operations, gather.derivative_workspace) == ((2,), (1, 2), 3200)
    many = dataclasses.replace(program, sizes=(8, 8, 3200, 6400, 3200))
    assert many.kernels[-1].sources == (3,)


def test_no_tree_is_too_deep_to_trace():
    planner = DP(chain([100] * 80), RATES)
    assert depth(planner.cheapest_near_minimum().regions) <= 16


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
    assert list(solver.cuts) == list(range(count + 1)), "after an expensive operation one may cut"
    rows = list(every_row_of_regions(len(solver.cuts) - 1))
    peaks = {row: solver.peak(list(row)) for row in rows}
    best = min(peaks.values())
    assert solver.least_peak() == best
    # Within a budget: no row that fits leaves more at the end unwrapped.
    budget = (best + peaks[()]) // 2
    ends = solver.least_recompute(budget)
    assert solver.peak(ends) <= budget
    done = solver.flops[ends[-1] if ends else 0]
    for row, peak in peaks.items():
        if peak <= budget:
            assert done <= solver.flops[row[-1] if row else 0]


@pytest.mark.parametrize("seed", range(12))
def test_dp_is_no_worse_than_any_row_of_regions(seed):
    """Nothing saved inside: every row is one of the dp's own plans."""
    program = random_program(seed)
    planner = DP(program, RATES)
    count = len(program.kernels)
    for row in every_row_of_regions(count):
        regions = tuple(Region(*pair) for pair in itertools.pairwise((0, *row)))
        runs = simulate(program, regions)
        spent = sum((n - 1) * RATES.price(program.kernels[k]) for k, n in runs.runs.items())
        planned = planner.cheapest_for(int(runs.peak * 1.05))  # slots round up
        assert planned is not None
        assert planned.price <= spent + 1e-12
        assert planned.peak <= int(runs.peak * 1.05)


def random_program(seed, most=8):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, most + 1))
    sizes = [int(size) for size in random.integers(1000, 100000, count)]
    flops = [int(work) for work in random.integers(1, 10**9, count)]
    return chain(sizes, flops)


def test_dp_saves_what_is_dear_for_its_bytes():
    """Of two equal values the one that costs more is saved."""
    flops = [10**12, 10**9] * 8
    program = chain([10**8] * 16, flops)
    planner = DP(program, RATES)
    layout = planner.cheapest_for(int(0.62 * planner.plain.peak))
    again = [number for number, times in layout.runs.items() if times > 1]
    assert again
    assert all(flops[number] == 10**9 for number in again if number)


# ---- scans


def loop_program(length=16):
    """x -> scan(matmul, tanh, matmul) -> x."""
    body = (
        Operation("dot_general", (1, 0), (2,), 10**9, False, "operands"),
        Operation("tanh", (2,), (3,), 0, True, "result"),
        Operation("dot_general", (3, 0), (4,), 10**9, False, "operands"),
    )
    inner = Program(body, (10**4, 10**6, 10**6, 10**6, 10**6), 2, (4,))
    scan = Operation(
        "scan", (0, 1), (2, 3), 2 * 10**9 * length, False, "operands",
        body=inner, length=length, carry=(1,), residuals=3, derivative_workspace=3 * 10**6,
    )  # fmt: skip
    return Program((scan,), (10**4, 10**6, 10**6, 3 * 10**6 * length), 2, (2,))


def test_the_menu_of_a_scan():
    program = loop_program()
    menu = loop_options(program, 0, RATES)
    assert (menu[0].loop, menu[0].flops, menu[0].residuals) == (None, 0, 48 * 10**6)
    assert [option.price for option in menu] == sorted(option.price for option in menu)
    least = min(menu, key=lambda option: option.residuals)
    assert least.residuals == 2 * 10**6  # one state, and the one before the last step
    assert least.flops >= least.loop.schedule.evaluations * 2 * 10**9
    # A body that is recomputed needs its first matmul again, not the last.
    inside = next(o for o in menu if o.loop and not o.loop.schedule and not o.loop.saved)
    assert inside.flops == 16 * 10**9


@pytest.mark.parametrize("target", ["h200", "t4", "v5e"])
def test_other_residuals_of_loops_change_no_other_kernel(target):
    """Each way to run the loops has kernels that are made of the others', not read again."""

    def layer(x, w):
        y = jax.lax.scan(lambda y, _: (jnp.sin(y @ w), y.sum()), x, None, length=3)
        return jax.nn.gelu(y[0]) * jnp.tanh(x), y[1]

    def loss(weights, x):
        h, sums = jax.lax.scan(layer, jnp.cos(x), weights)
        h, _ = jax.lax.scan(lambda h, w: (h @ w + jnp.exp(h), None), h, weights)
        return jnp.sum(h.astype("float32") ** 2) + jnp.sum(sums)

    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in [(4, 64, 64), (32, 64)]]
    traced = TracedFunction(loss, args, {}, (0, 1), target=jaxmem.target(target))
    program = apply_compiler_rules(traced.program, jaxmem.target(target).rules)
    assert len(program.loops) == 2
    for count in range(1, 5):
        bytes_of_each = (10**count, 10 ** (5 - count), False)
        found = program.with_loops(dict.fromkeys(program.loops, bytes_of_each))
        fresh = dataclasses.replace(found)
        assert found != program
        for name in ("kernels", "made", "last_used", "active", "scans", "maps"):
            assert getattr(found, name) == getattr(fresh, name)
            assert name in vars(found)


def test_a_schedule_has_the_room_that_is_left():
    program = loop_program(length=100)
    planner = DP(program, RATES)
    plain = planner.plain.peak
    prices = []
    for percent in range(90, 5, -5):
        budget = plain * percent // 100
        layout = planner.cheapest_for(budget)
        assert layout.peak <= budget
        prices.append(layout.price)
    assert prices == sorted(prices)


def every_split(bodies, room):
    """The prices of all that two bodies can do within so many bytes, from their own numbers."""
    for head, rest in itertools.permutations(bodies, 2):
        length = rest.length if rest.residual_bytes > head.residual_bytes else 0
        for first in range(2, length - 1):
            left = first * head.residual_bytes
            most = max(
                left + (length - first) * rest.residual_bytes + rest.inside, left + head.inside
            )
            if most <= room:
                yield first * head.recompute_cost[3] + (length - first) * rest.recompute_cost[3]


@pytest.mark.parametrize("host", [0.0, 1e9])
def test_the_first_iterations_keep_less_than_the_last_ones(host):
    """The lowest price that any two bodies and any place to part the iterations have."""
    program = loop_program()
    menu = loop_options(program, 0, dataclasses.replace(RATES, host=host))
    bodies = next(option.bodies for option in menu if option.bodies)
    plain = menu[0].bytes
    parted = 0
    for percent in range(95, 5, -6):
        room = plain * percent // 100
        found = menu[1].cheapest_for_bytes(room)
        best = min(every_split(bodies, room), default=np.inf)
        if found is None:
            assert best == np.inf
            continue
        assert found.bytes <= room
        assert found.price <= best * (1 + 1e-9)
        if head := found.loop.head:
            parted += 1
            assert found.price == pytest.approx(best)
            both = head.loop, found.loop
            waits = [10**6 * len(one.offloaded) for one in both]
            assert found.host == head.count * waits[0] + (16 - head.count) * waits[1]
    assert parted > 3


def test_budgets_between_two_places_of_a_menu_are_used():
    planner = DP(loop_program(length=32), RATES)
    plain = planner.plain.peak
    for percent in range(45, 95, 7):
        layout = planner.cheapest_for(plain * percent // 100)
        assert 0.96 < layout.peak / (plain * percent // 100) <= 1


def scans_of_matmuls(count, dtype):
    """A program of some scans over 16 layers of two matmuls each."""

    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

    def loss(weights, x):
        for part in weights:
            x = jax.lax.scan(layer, x, part)[0]
        return jnp.sum(x.astype("float32") ** 2)

    weights = jax.ShapeDtypeStruct((count, 16, 2048, 2048), dtype)
    x = jax.ShapeDtypeStruct((8192, 2048), dtype)
    return TracedFunction(loss, (weights, x), {}, (0, 1)).program


@pytest.mark.parametrize("target", ["v5e", "rtx-3090", "h100"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_is_used_where_it_spares_time(target, count, dtype):
    """It took four times as long as to recompute: waiting counted less than arithmetic does where
    float32 is rounded. With it there are more ways to run a loop, of which fewer were tried."""
    program, device = scans_of_matmuls(count, dtype), jaxmem.target(target)
    without, hosted = (DP(program, Rates(device, link)) for link in (0.0, device.host_bandwidth))
    planned = 0
    for percent in range(95, 20, -3):
        budget = without.plain.peak * percent // 100
        other, layout = (planner.cheapest_for(budget) for planner in (without, hosted))
        if other is None:
            continue
        planned += 1
        assert layout.peak <= budget and layout.price <= other.price
        assert layout.host_bytes == 0 or layout.price < other.price
        # What the loops fill of a budget may be worth more than what they began with.
        if with_host := hosted._cheapest_for(budget):
            assert layout.price <= with_host.price
        # Prices follow seconds, but not to the letter: they know arithmetic better than traffic.
        assert layout.seconds <= 1.1 * other.seconds
    assert planned > 16


def test_several_scans_share_a_budget_by_what_a_byte_costs():
    """Each has a menu of its own; they are not tied by their places in it."""

    def option(residuals, price):
        return LoopOption(None, residuals, 0, (), price=price)

    expensive = [option(1000, 0), option(500, 100), option(100, 900)]
    cheap = [option(1000, 0), option(900, 30), option(300, 1), option(200, 2)]
    found = [[one.residuals for one in options] for options in combine_menus([expensive, cheap])]
    assert found == [[1000, 1000], [1000, 300], [1000, 200], [500, 200], [100, 200]]


def test_of_several_scans_an_entry_that_takes_no_byte_less_is_left_out():
    """Fewer residuals, and as much more inside."""

    def menu(*entries):
        return [LoopOption(None, *entry[:2], (0,), price=entry[2]) for entry in entries]

    expensive = menu((100, 0, 0), (80, 0, 1), (60, 40, 2), (50, 60, 3), (20, 60, 4), (20, 10, 9))
    found = [
        [one.bytes for one in options] for options in combine_menus([expensive, menu((40, 0, 0))])
    ]
    assert found == [[100, 40], [80, 40], [30, 40]]


def test_a_budget_chooses_from_the_menu():
    planner = DP(loop_program(), RATES)
    assert planner.cheapest_for(planner.plain.peak).loops == ()
    half = planner.cheapest_for(planner.plain.peak // 2)
    assert half.loops and half.peak <= planner.plain.peak // 2
    assert planner.cheapest_near_minimum().loops[0].schedule
    assert isinstance(half.loops[0], Loop)


def test_a_body_with_regions_of_the_user_is_left_alone():
    program = loop_program()
    body = program.operations[0].body
    own = dataclasses.replace(body.operations[0], name="checkpoint", body=body)
    body = dataclasses.replace(body, operations=(own, *body.operations[1:]))
    scan = dataclasses.replace(program.operations[0], body=body)
    program = dataclasses.replace(program, operations=(scan,))
    assert [option.loop for option in loop_options(program, 0, RATES)] == [None]


# ---- size


# (Near some budgets in between no plan of so few depths is found.)
@pytest.mark.parametrize("part", [3, 4.5, 5, 6])
def test_memories_whose_plans_are_nested_too_deep_do_not_hide_the_others(monkeypatch, part):
    monkeypatch.setattr("jaxmem.planning.variants._DEPTH", 6)
    random = np.random.default_rng(0)
    flops = [int(work) for work in random.integers(10**6, 10**9, 500)]
    planner = DP(chain([100_000] * 500, flops), RATES)
    budget = int(planner.plain.peak / part)
    assert 0.95 * budget <= planner.variants[0].cheapest_for(budget).peak <= budget


@pytest.mark.slow
def test_planning_time_grows_near_linearly():
    """In calls of Python, which no other load changes; seconds are in speed/planner_time.py."""
    calls = []

    def count_call(_frame, event, _argument):
        calls[-1] += event == "call"

    for count in (500, 5000):
        random = np.random.default_rng(0)
        flops = [int(work) for work in random.integers(10**6, 10**9, count)]
        program = chain([100_000] * count, flops)
        calls.append(0)
        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            planner = DP(program, RATES)
            layout = planner.cheapest_for(planner.plain.peak // 4)
        finally:
            sys.setprofile(before)
        assert layout.peak <= planner.plain.peak // 4
    assert calls[1] < 15 * calls[0], calls


def test_one_liners_need_blocks():
    """Stretches that repeat, or that one module path made."""
    assert list(baseline_policies(chain([1]), RATES)) == ["everything_saveable"]
    assert "nothing_saveable on each of 4 blocks" in baseline_policies(chain([1, 2, 3, 4]), RATES)
    assert "nothing_saveable on each of 3 blocks" in baseline_policies(chain([1] * 4), RATES)
    operations = [
        dataclasses.replace(op, source=Source(f"Net/Block_{index // 3}/Dense_{index % 3}"))
        for index, op in enumerate(chain([100] * 12).operations)
    ]
    program = dataclasses.replace(chain([100] * 12), operations=tuple(operations))
    found = {name: layout.peak for name, layout in baseline_policies(program, RATES).items()}
    assert len(found) == 4
    assert found["nothing_saveable on each of 4 blocks"] < found["everything_saveable"]
