"""Scans inside scans: schedules inside the steps of schedules."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.loops import Schedule, cheapest

OUTER, INNER = 200, 50


def diffusion(size, outer=OUTER, inner=INNER, dtype="float32"):
    """Steps in time, of shorter ones each: the shape of a solver with sub-steps."""

    def loss(w, source):
        def substep(u, value):
            neighbours = jnp.roll(u, 1, 0) + jnp.roll(u, 1, 1) - 2 * u
            return jnp.tanh(0.9 * u + 0.1 * w * neighbours + value), None

        def step(u, values):
            u, _ = jax.lax.scan(substep, u, values)
            return u, jnp.sum(u)

        start = jnp.sin(jax.lax.broadcasted_iota(dtype, (size, size), 0))
        u, seen = jax.lax.scan(step, start, source)
        return jnp.sum(u**2) + jnp.sum(seen)

    shapes = [(size, size), (outer, inner)]
    return loss, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def evaluations(outer, inner):
    """Of substeps, by the schedules of both loops."""
    return INNER * outer.evaluations + OUTER * (inner.evaluations if inner else 0)


@pytest.mark.slow
def test_values_and_gradients_at_every_budget():
    loss, args = diffusion(4, 13, 7, "float64")
    values = [0.1 * jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(args)]
    expected = jax.value_and_grad(loss, (0, 1))(*values)
    least = jaxmem.plan(loss, *args, argnums=(0, 1), budget="1GiB")
    with pytest.raises(jaxmem.BudgetError) as found:
        jaxmem.plan(loss, *args, argnums=(0, 1), budget="1B")
    nested = 0
    for budget in np.geomspace(found.value.lowest, least.plain_bytes, 6):
        plan = jaxmem.plan(loss, *args, argnums=(0, 1), budget=f"{int(budget) + 1}B")
        nested += any(loop.loops for loop in plan.loops)
        assert jaxmem.Plan.from_json(plan.to_json()) == plan
        got = jax.jit(jax.value_and_grad(plan.apply(loss), (0, 1)))(*values)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
    assert nested


@pytest.mark.parametrize("budget", [14, 20, 40, 80, 160, 250])
def test_both_schedules_are_about_the_best_together(budget):
    """Against every pair of schedules, by the bytes of a state and of a substep's residuals."""
    loss, args = diffusion(512)
    plan = jaxmem.plan(loss, *args, budget=f"{budget}MiB", target="rtx-4090", compilations=0)
    (outer,) = plan.loops
    inner = outer.loops[0].schedule if outer.loops else None
    state, step = 2**20, 3 * 2**20

    def inside(schedule):
        """States and residuals of one outer step."""
        if schedule is None:
            return INNER * step
        residuals = 0 if schedule.single else max(schedule.tail, schedule.block) * step
        return (schedule.states + 1) * state + residuals

    with pytest.raises(jaxmem.BudgetError) as found:
        jaxmem.plan(loss, *args, budget="1MiB", target="rtx-4090", compilations=0)
    room = budget * 2**20 - (found.value.lowest - 3 * state)
    best = evaluations(outer.schedule, inner)
    several = {cheapest(INNER, state, step, n * 2**20) for n in range(4, INNER * 3)}
    single = {Schedule(INNER, INNER, 1, states) for states in range(1, INNER)}
    for one in several | single | {None}:
        states = (room - inside(one)) // state
        if states >= 1:
            outer_schedule = Schedule(OUTER, OUTER, 1, min(states, OUTER - 1))
            best = min(best, evaluations(outer_schedule, one))
    assert evaluations(outer.schedule, inner) <= 1.1 * best


def test_every_budget_down_to_a_few_states_has_a_plan():
    """Below one state for each loop, one for the step at hand and its derivative there is none."""
    loss, args = diffusion(512)
    with pytest.raises(jaxmem.BudgetError) as found:
        jaxmem.plan(loss, *args, budget="1MiB", target="rtx-4090", compilations=0)
    assert found.value.lowest < 14 * 2**20
    plan = jaxmem.plan(loss, *args, budget=found.value.lowest, target="rtx-4090", compilations=0)
    assert plan.projected_bytes <= found.value.lowest
    assert " 200 x scan (1 state kept, 99.50 forward passes more)" in str(plan)
    assert "   50 x scan (1 state kept, 24.50 forward passes more)" in str(plan)
    assert {choice.operation.count(" x ") for choice in plan.choices} == {0, 1, 2}


@pytest.mark.parametrize("budget", [160, 360])
def test_compiled_bytes_are_those_projected(budget):
    loss, args = diffusion(256, inner=400)
    plan = jaxmem.plan(loss, *args, budget=budget * 2**18, target="rtx-4090", compilations=2)
    assert plan.loops[0].loops[0].schedule
    assert 0.95 < plan.compiled_bytes / plan.projected_bytes < 1.05


@pytest.mark.slow
def test_of_three_loops_the_innermost_has_a_schedule_too():
    def loss(x):
        def run(x, depth):
            if not depth:
                return jnp.sin(x) * x
            return jax.lax.scan(lambda x, _: (run(x, depth - 1), None), x, length=12)[0]

        return jnp.sum(run(x, 3))

    x = jnp.linspace(-0.5, 0.5, 1024)
    with pytest.raises(jaxmem.BudgetError) as found:
        jaxmem.plan(loss, x, budget="1B")
    plan = jaxmem.plan(loss, x, budget=found.value.lowest)
    depth, loops = 0, plan.loops
    while loops:
        depth, loops = depth + bool(loops[0].schedule), loops[0].loops
    assert depth == 3
    np.testing.assert_allclose(jax.grad(plan.apply(loss))(x), jax.grad(loss)(x), rtol=1e-11)


@pytest.mark.parametrize("budget", ["1500B", "1900B", "3KiB"])
def test_a_scan_with_a_budget_of_its_own_has_one_inside(budget):
    w, source = jnp.cos(jnp.arange(16.0)).reshape(4, 4), jnp.sin(jnp.arange(81.0)).reshape(9, 9)

    def loss(scan, w, source, **options):
        def step(u, values):
            u, _ = jax.lax.scan(lambda u, x: (jnp.tanh(u * w + x), None), u, values)
            return u, jnp.sum(u)

        u, seen = scan(step, jnp.zeros((4, 4)), source, **options)
        return jnp.sum(u**2) + jnp.sum(seen)

    expected = jax.grad(loss, (1, 2))(jax.lax.scan, w, source)
    got = jax.grad(loss, (1, 2))(jaxmem.scan, w, source, budget=budget)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("planner", ["dp", "sqrt", "dots"])
def test_attention_in_blocks_with_a_running_maximum(planner):
    """JAX stacks less of the inner scan than it does of that scan alone: its maximum has no
    derivative, and a branch is never taken (EasyLM's blockwise attention)."""

    def attention(q):
        blocks = jnp.moveaxis(q.reshape(2, 4, 4, 2, 4), 1, 0)

        def of_block(block, _):
            def turn(carry, keys):
                total, before = carry
                scores = jnp.einsum("bqhd,bkhd->bqhk", block, keys)
                most = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
                most = jax.lax.stop_gradient(most)
                new = jnp.einsum("bqhk,bkhd->bqhd", jnp.exp(scores - most), keys)
                return total * jnp.exp(before - most) + new, most

            def step(carry, keys):
                skip = jnp.array(False)
                return jax.lax.cond(skip, lambda carry, keys: carry, turn, carry, keys), None

            first = jnp.zeros((2, 4, 2, 4)), jnp.full((2, 4, 2, 1), -jnp.inf)
            return jax.lax.scan(step, first, blocks)[0][0]

        _, out = jax.lax.scan(lambda _, x: ((), of_block(*x)), (), (blocks, jnp.arange(4)))
        return jnp.sum(out**2)

    q = jax.random.normal(jax.random.key(0), (2, 16, 2, 4))
    plan = jaxmem.plan(attention, q, planner=planner)
    assert 0 < plan.projected_bytes <= plan.plain_bytes
    expected = jax.value_and_grad(attention)(q)
    found = jax.jit(jax.value_and_grad(plan.apply(attention)))(q)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("read", ["", "first", "second", "first second"])
def test_two_scans_in_the_body_of_one_at_the_lowest_budget(same, read):
    """Of which the results are read, or not: what is not is not made, and not kept."""

    def turn(fun):
        def one(x, _):
            x = fun(x * 1.1)
            return x, jnp.sum(x)

        return one

    def step(x, _):
        x, first = jax.lax.scan(turn(jnp.tanh), x, length=3)
        y, second = jax.lax.scan(turn(jnp.tanh if same else jnp.sin), x, length=3)
        total = first.sum() * ("first" in read) + second.sum() * ("second" in read)
        return x + jnp.tanh(y), (first, total if read else None)

    def loss(x):
        x, (_, totals) = jax.lax.scan(step, x, length=3)
        return jnp.sum(x**2) + (jnp.sum(totals) if read else 0.0)

    x = jax.random.normal(jax.random.key(0), (32, 8))
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.plan(loss, x, budget="1B")
    lowest = caught.value.lowest
    expected = jax.value_and_grad(loss)(x)
    for fun in (
        jaxmem.plan(loss, x, budget=f"{lowest}B").apply(loss),
        jaxmem.remat(loss, budget=f"{lowest + 2048}B"),
    ):
        found = jax.jit(jax.value_and_grad(fun))(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "jitted"),
    [
        ("forward over reverse", False),
        pytest.param("forward over reverse", True, marks=pytest.mark.slow),
        pytest.param("reverse over reverse", False, marks=pytest.mark.slow),
        pytest.param("reverse over reverse", True, marks=pytest.mark.slow),
    ],
)
def test_second_derivatives_of_loops_in_loops(name, jitted):
    """Eagerly too, where the number of a turn is one of Python's."""
    weights, x = jax.random.normal(jax.random.key(0), (6, 6, 6)) / 5, jnp.ones((5, 6))

    def loss(weights, x):
        def layer(x, w):
            return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ w) + y / 2, x), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    plan = jaxmem.plan(loss, weights, x, budget=16_000)
    (outer,) = plan.loops
    assert outer.schedule and outer.loops[0].schedule

    def second(fun):
        gradient = jax.grad(lambda weights: fun(weights, x))
        if name == "forward over reverse":
            return jax.jvp(gradient, (weights,), (weights,))[1]
        return jax.grad(lambda weights: jnp.sum(gradient(weights) ** 2))(weights)

    got, expected = (
        (jax.jit(second, static_argnums=0) if jitted else second)(fun)
        for fun in (plan.apply(loss), loss)
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-9)
