"""The bound on what any schedule recomputes: no schedule is below it."""

import heapq
import itertools
import math
import random

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.planning.bound import least_recomputed
from jaxmem.program import Graph, Node, Read, read_graph
from jaxmem.rematerialization.bounds import graph_of
from jaxmem.rematerialization.traced import TracedFunction


def graph(rows, outputs) -> Graph:
    """Nodes as (FLOPs, bytes, nodes that are read)."""
    nodes = [
        Node(flops, tuple(map(Read, reads)), (at,), True)
        for at, (flops, _, reads) in enumerate(rows)
    ]
    sizes = tuple(size for _, size, _ in rows)
    return Graph(tuple(nodes), sizes, tuple(range(len(rows))), tuple(map(Read, outputs)))


def chain(count: int) -> Graph:
    """Matmuls of 10,000 FLOPs and 1 byte forward, and back again, where each derivative reads what
    its matmul made; gradients of no bytes."""
    rows = [(10_000, 1, [at - 1] if at else []) for at in range(count)]
    for at in reversed(range(count)):
        rows.append((20_000, 0, [len(rows) - 1, at]))
    return graph(rows, [len(rows) - 1])


def least_by_search(graph: Graph, room: int) -> float:
    """FLOPs of the best schedule of all, by Dijkstra's search: a node of FLOPs runs when what it
    reads is there and has its result written; others are computed where they are read."""
    nodes, sizes = graph.nodes, graph.sizes
    wanted = {read.value for read in graph.outputs}

    def is_available(value: int, resident: frozenset) -> bool:
        if value in resident:
            return True
        return not nodes[value].flops and all(
            is_available(r.value, resident) for r in nodes[value].reads
        )

    begin = (frozenset(), frozenset(wanted))
    costs, queue, tie = {begin: 0.0}, [(0.0, 0, begin)], itertools.count(1)
    while queue:
        cost, _, (resident, left) = heapq.heappop(queue)
        if cost > costs[resident, left]:
            continue
        left = frozenset(value for value in left if not is_available(value, resident))
        if not left:
            return cost
        steps = [(0.0, resident - {value}) for value in resident]
        for value, node in enumerate(nodes):
            ready = all(is_available(read.value, resident) for read in node.reads)
            if value not in resident and ready:
                steps.append((node.flops, resident | {value}))
        for more, after in steps:
            new = (after, left)
            if sum(sizes[v] for v in after) <= room and cost + more < costs.get(new, math.inf):
                costs[new] = cost + more
                heapq.heappush(queue, (cost + more, next(tie), new))
    return math.inf


def random_graph(seed: int) -> Graph:
    draw = random.Random(seed)
    count = draw.randint(4, 8)
    rows = []
    for at in range(count):
        reads = draw.sample(range(at), min(at, draw.randint(1, 2)))
        if at and draw.random() < 0.7:
            reads = sorted({*reads, at - 1})
        rows.append((draw.choice([0, 1, 2, 5]), draw.randint(1, 3), reads))
    read = {value for *_, reads in rows for value in reads}
    return graph(rows, [at for at in range(count) if at not in read])


def test_a_chain_by_hand():
    # When the fifth is there, the derivatives read all five: with two bytes two of them are, and
    # the others are made again.
    assert least_recomputed(chain(5), 5) == 0
    assert least_recomputed(chain(5), 2) == pytest.approx(30_000, rel=1e-3)
    assert least_recomputed(chain(5), 0) == pytest.approx(50_000, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_schedule_is_below_it(part):
    above = 0
    for seed in range(25 * part, 25 * (part + 1)):
        step = random_graph(seed)
        for room in range(2, 9):
            bound = least_recomputed(step, room)
            assert least_by_search(step, room) >= step.flops + bound - 0.01, (seed, room)
            above += bound > 0
    assert above > 8  # it says something


def test_more_bytes_never_need_more():
    step = graph_of(TracedFunction(layers, shapes(), {}, 0))
    bounds = [least_recomputed(step, room) for room in range(0, 8 << 20, 1 << 19)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[4] > bounds[-1] == 0


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def shapes(count=12, width=64, batch=1024, stacked=False):
    one = jax.ShapeDtypeStruct((width, width), jnp.float32)
    weights = jax.ShapeDtypeStruct((count, width, width), jnp.float32) if stacked else [one] * count
    return weights, jax.ShapeDtypeStruct((batch, width), jnp.float32)


def scanned(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return jnp.sum(x**2)


@pytest.mark.parametrize("room", [0, 1 << 19, 1 << 20])
def test_a_scan_is_bound_as_what_it_unrolls_to(room):
    unrolled = least_recomputed(graph_of(TracedFunction(layers, shapes(), {}, 0)), room)
    scan = least_recomputed(graph_of(TracedFunction(scanned, shapes(stacked=True), {}, 0)), room)
    assert 0 < scan <= unrolled * 1.001
    # Iterations are the same to it: what it loses is what one of them knows of its place.
    assert scan > 0.8 * unrolled


def test_iterations_that_a_scan_need_not_do_again_cost_nothing():
    """Only the last result is read: of the others nothing has to be there."""

    def last(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, weights)
        return jnp.sum(x**2)

    weights, x = shapes(stacked=True)
    step = graph_of(TracedFunction(lambda x, weights: last(weights, x), (x, weights), {}, 0))
    assert least_recomputed(step, 0) <= 2 * 1024 * 64 * 64 * 1.01


def test_what_is_computed_twice_counts_once():
    def twice(w, x):
        return jnp.sum((x @ w) * (x @ w))

    w, x = shapes(1)[0][0], shapes(1)[1]
    step = read_graph(jaxprs.flatten_jaxpr(jax.make_jaxpr(twice)(w, x)))
    assert step.flops == 2 * 1024 * 64 * 64


def test_dead_code_counts_nothing():
    def dead(w, x):
        (x @ w).sum()
        return x.sum()

    w, x = shapes(1)[0][0], shapes(1)[1]
    assert read_graph(jaxprs.flatten_jaxpr(jax.make_jaxpr(dead)(w, x))).flops == 0


def convolutions(weights, x):
    for w in weights:
        x = jax.nn.relu(jax.lax.conv(x, w, (2, 2), "SAME"))
    return jnp.sum(x)


def test_zeros_in_strided_derivatives_are_no_work():
    weights = [jax.ShapeDtypeStruct((8, 8, 3, 3), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((4, 8, 32, 32), jnp.float32)
    traced = TracedFunction(convolutions, (weights, x), {}, 0)
    # The first layer has no derivative by its input.
    first, second = (2 * 4 * 8 * side**2 * 9 * 8 for side in (16, 8))
    assert graph_of(traced).flops == pytest.approx(2 * first + 3 * second, rel=0.1)


@pytest.mark.parametrize(
    ("loss", "stacked"), [(layers, False), (scanned, True)], ids=["unrolled", "scan"]
)
def test_no_plan_is_below_it(loss, stacked):
    args = shapes(stacked=stacked)
    plain = jaxmem.plan(loss, *args).plain_bytes
    for share in (0.9, 0.7, 0.5, 0.4):
        plan = jaxmem.plan(loss, *args, budget=int(share * plain))
        bound = plan.bound
        assert bound.recompute_flops <= plan.predicted.recompute_flops
        assert bound.bytes == plan.budget
        assert bound.flops > 2.9 * plan.predicted.flops * (1 - 1 / 12)


def test_a_plan_prints_it():
    plan = jaxmem.plan(layers, *shapes(), budget="2500KiB")
    assert "above the least" not in str(plan)  # planning takes no longer for it
    share = (plan.bound.flops + plan.predicted.recompute_flops - plan.bound.recompute_flops) / (
        plan.bound.flops
    ) - 1
    said = f"at most {share:.1%} above the least FLOPs that any schedule within 2.44 MiB needs"
    assert said in str(plan)


def test_user_regions_are_no_part_of_it():
    def regions(weights, x):
        for w in weights:
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jnp.sum(x**2)

    plain, opened = (
        graph_of(TracedFunction(loss, shapes(), {}, 0, open_regions=True))
        for loss in (layers, regions)
    )
    assert plain.flops == opened.flops


def test_without_its_function_there_is_none():
    plan = jaxmem.plan(layers, *shapes(), budget="2500KiB")
    assert jaxmem.rematerialization.plan.Plan.from_json(plan.to_json()).bound is None


def test_of_no_scalar():
    plan = jaxmem.plan(lambda w, x: (jnp.tanh(x @ w), x), *shapes(1)[0], shapes()[1])
    assert plan.bound.recompute_flops == 0
