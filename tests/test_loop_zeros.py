"""The zeros that loops fill: XLA of jax 0.10 makes them once for all loops, and copies them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.planning.simulation import simulate_in_time
from jaxmem.program import apply_compiler_rules, read_program, zeros_of_loops
from tests.projections import planned_and_compiled, projected_and_compiled

WIDTH, ROWS, TIMES = 512, 256, 128


def recurrence(weights, x):
    def step(state, x):
        state = jnp.tanh(state @ weights + x)
        return state, state

    return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)[1]


@jax.custom_vjp
def sums(weights, x):
    return jax.lax.scan(lambda sums, row: (sums + jnp.tanh(row @ weights),) * 2, x[0], x)[1]


def sums_forward(weights, x):
    return sums(weights, x), (weights, x)


def sums_backward(kept, cotangents):
    weights, x = kept

    def step(carry, given):
        row, cotangent = given
        later, gradient = carry
        later = later + cotangent
        inner = later * (1 - jnp.tanh(row @ weights) ** 2)
        return (later, gradient + row.T @ inner), inner @ weights.T

    start = jnp.zeros_like(x[0]), jnp.zeros_like(weights)
    (later, gradient), of_x = jax.lax.scan(step, start, (x, cotangents), reverse=True)
    return gradient, of_x.at[0].add(later)


sums.defvjp(sums_forward, sums_backward)


def stacked(layer, count=4):
    """A loss of layers that are loops over time."""

    def loss(weights, x):
        return jnp.mean(functools.reduce(lambda x, w: layer(w, x), weights, x) ** 2)

    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return loss, ([shape] * count, jax.ShapeDtypeStruct((TIMES, ROWS, WIDTH), jnp.float32))


def over_one_stack(weights, x):
    """Two loops over the same weights, whose gradients each of them stacks."""

    def through(x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    return jnp.mean(through(x) * through(2 * x))


ONE_STACK = (
    over_one_stack,
    (
        jax.ShapeDtypeStruct((12, 2048, 2048), jnp.float32),
        jax.ShapeDtypeStruct((1024, 2048), jnp.float32),
    ),
)
PROGRAMS = [
    pytest.param(*stacked(recurrence), id="layers of recurrences"),
    pytest.param(*stacked(sums), id="loops by a rule of one's own"),
    pytest.param(*ONE_STACK, id="loops over one stack"),
]


@pytest.mark.parametrize("target", ["h100", "t4"])
@pytest.mark.parametrize(("loss", "args"), PROGRAMS)
def test_what_loops_fill_is_projected(loss, args, target):
    """Zeros once more, stacks that no derivative reads, and gradients that each loop stacks were
    off by 12 to 28 %, some on one version of jax alone."""
    projected, compiled = projected_and_compiled(loss, args, target)
    assert projected == pytest.approx(compiled, rel=0.13)
    plan, compiled = planned_and_compiled(loss, args, None, target)
    assert plan.projected_bytes == pytest.approx(compiled, rel=0.15)


def program(loss, args, shares_zeros):
    """The program of a loss, differentiated by its weights."""
    flat = jaxprs.flatten(loss, list(args))
    weights = range(len(jax.tree.leaves(args[0])))
    rules = jaxmem.target("h100").rules
    loops = dataclasses.replace(rules.loops, shares_zeros=shares_zeros)
    return apply_compiler_rules(
        read_program(flat, {*weights}), dataclasses.replace(rules, loops=loops)
    )


def test_zeros_are_those_of_stacks_of_sums_and_of_first_states():
    loss, args = stacked(recurrence, 1)
    (zeros,) = zeros_of_loops(program(loss, args, True)).values()
    stack, state = f"float32[{TIMES}, {ROWS}, {WIDTH}]", f"float32[{ROWS}, {WIDTH}]"
    kinds = [kind for kind, _ in zeros.forward]
    assert set(kinds) == {stack, state}
    assert kinds.count(state) == 1
    assert [kind for kind, _ in zeros.backward] == [f"float32[{WIDTH}, {WIDTH}]"]
    assert dict(zeros.forward)[stack] == 4 * TIMES * ROWS * WIDTH
    assert zeros_of_loops(program(loss, args, False)) == {}


@pytest.mark.parametrize(("widths", "more"), [([512, 512], True), ([512, 128], False)])
def test_loops_share_zeros_of_one_shape(widths, more):
    def loss(weights, x):
        return sum(jnp.mean(recurrence(w, x[..., : len(w)]) ** 2) for w in weights)

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32) for width in widths]
    args = weights, jax.ShapeDtypeStruct((TIMES, ROWS, WIDTH), jnp.float32)
    (shared, at_once), (apart, own) = (
        simulate_in_time(program(loss, args, is_shared), ()) for is_shared in (True, False)
    )
    assert (sum(at_once.at_events) > sum(own.at_events)) == more
    assert shared.peak >= apart.peak
    assert shared.runs == apart.runs


def test_gradients_are_those_of_plain_code():
    loss, _ = stacked(sums)
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (8, 8)) / 3 for key in keys[:4]]
    x = jax.random.normal(keys[4], (5, 4, 8))
    plan = jaxmem.plan(loss, weights, x, target="h100", compilations=0)
    assert plan.regions
    for wrap in (lambda fun: fun, jax.jit):
        for one, other in zip(
            jax.tree.leaves(wrap(jax.value_and_grad(plan.apply(loss)))(weights, x)),
            jax.tree.leaves(jax.value_and_grad(loss)(weights, x)),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-10)
