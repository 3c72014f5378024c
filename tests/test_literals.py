"""Numbers of the program's own among operands and results: Python scalars that a function, a rule
or a body of a loop returns as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxmem
from tests.cases import slow_but

NUMBERS = (0.5, 10, True)
NO_TANGENT = np.zeros((), jax.dtypes.float0)


@jax.custom_vjp
def with_own_vjp(w, x, scale):
    """A loop inside, which no derivative is taken of, and settings handed on (as ott-jax does)."""
    x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
    return x * scale, *NUMBERS


with_own_vjp.defvjp(
    lambda w, x, scale: (with_own_vjp(w, x, scale), (w, x)),
    lambda kept, bars: (kept[0] * bars[0].sum(), bars[0] @ kept[0].T, 0.0),
)


@jax.custom_jvp
def with_own_jvp(w, x, scale):
    return jnp.tanh(x @ w) * scale, *NUMBERS


@with_own_jvp.defjvp
def _(primals, tangents):
    w, x, scale = primals
    y = jnp.tanh(x @ w)
    moved = (1 - y * y) * (x @ tangents[0] + tangents[1] @ w) * scale
    return (y * scale, *NUMBERS), (moved, 0.0, NO_TANGENT, NO_TANGENT)


def in_a_region(w, x, scale):
    return jax.checkpoint(lambda w, x: (jnp.tanh(x @ w) * scale, *NUMBERS))(w, x)


def in_a_scan(w, x, scale):
    def turn(carry, _):
        return (jnp.tanh(carry[0] @ w) * scale, 2.0, 7), (carry[0].sum(), 3.0, 7, carry[1])

    (x, carried, count), (sums, threes, sevens, ones) = jax.lax.scan(
        turn, (x, 1.0, 3), None, length=4
    )
    return x, carried + threes.sum() + ones.sum() + sums.sum(), count, sevens


def in_a_conditional(w, x, scale):
    def one(w, x):
        return jnp.tanh(x @ w) * scale, 0.5, 3

    return jax.lax.cond(x[0, 0] > 0, one, lambda w, x: (x, 0.5, 4), w, x)


def of_each_device(w, x, scale):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def run(w, x):
        return jnp.tanh(x @ w) * scale, jnp.float32(0.5), jnp.int32(3)

    outside = (rows, whole, whole)
    return jax.shard_map(run, mesh=mesh, in_specs=(whole, rows), out_specs=outside)(w, x)


def in_a_loop(w, x, scale):
    return jax.lax.fori_loop(0, 3, lambda _, c: (jnp.tanh(c[0] @ w) * scale, 0.5), (x, 1.0))


PLACES = [
    with_own_vjp, with_own_jvp, in_a_region, in_a_scan, in_a_conditional, of_each_device, in_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("outside", slow_but([""], ["", "in a scan"]))
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"planner": "sqrt"}, marks=pytest.mark.slow),
        pytest.param({"planner": "dots"}, marks=pytest.mark.slow),
        pytest.param({"regions": "keep"}, marks=pytest.mark.slow),
    ],
)
def test_numbers_that_are_handed_on(place, outside, options):
    def loss(w, x):
        x = jnp.tanh(x @ w)
        if outside:

            def turn(carry, _):
                first, *others = place(w, carry, 0.1)
                return first, others

            found, others = jax.lax.scan(turn, x, None, length=2)
        else:
            found, *others = place(w, x, 0.1)
        floats = [jnp.asarray(one, jnp.float32).sum() for one in jax.tree.leaves(others)]
        return jnp.sum(found**2) + sum(floats)

    w, x = jnp.eye(4) * 0.5, jnp.linspace(-1, 1, 24).reshape(6, 4)
    expected = jax.value_and_grad(loss, (0, 1))(w, x)
    planned = jaxmem.plan(loss, w, x, argnums=(0, 1), **options).apply(loss)
    found = jax.jit(jax.value_and_grad(planned, (0, 1)))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def types(results):
    return jax.tree.map(lambda one: (type(one), one.dtype, one.weak_type), results)


@pytest.mark.parametrize("share", [1.0, 0.0])
@pytest.mark.parametrize("planner", slow_but(["dp"], ["dp", "sqrt", "dots"]))
def test_results_have_the_types_that_jax_gives_them(share, planner):
    """Weak ones too, with and without `jax.jit`: what is computed of them has the same dtype."""

    def loss(w, x):
        x, stacked = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), (1.0, 3)), x, length=30)
        numbers = jnp.asarray(2), jnp.asarray(2.5), jnp.asarray(True), jax.lax.full((), 1.0)
        return jnp.sum(x**2), (stacked, numbers)

    with jax.enable_x64(True):
        args = jnp.eye(8, dtype=jnp.float32), jnp.ones((32, 8), jnp.float32)
        options = {"has_aux": True, "planner": planner}
        least = jaxmem.plan(loss, *args, **options)
        budget = least.projected_bytes + share * (least.plain_bytes - least.projected_bytes)
        planned = jaxmem.plan(loss, *args, budget=f"{int(budget)}B", **options).apply(loss)
        for how in (lambda f: f, jax.jit):
            for of in (lambda f: f, lambda f: jax.value_and_grad(f, has_aux=True)):
                assert types(how(of(planned))(*args)) == types(how(of(loss))(*args))


@pytest.mark.slow
def test_numbers_are_reduced():
    """As a sum over the log-determinants of layers is that have none (flowjax)."""

    def loss(w, x):
        def of_one(a):
            return a * jnp.sum(jnp.zeros(())) + jnp.max(jnp.full((), 2.0)) * a

        return jnp.mean(jnp.sin(x * w[:1])) + jax.vmap(of_one)(w[0]).sum()

    w, x = jnp.linspace(0.1, 1.0, 16).reshape(4, 4), jnp.ones((3, 4))
    for planner in "dp", "sqrt", "dots":
        for target in None, "h100", "v5e":
            plan = jaxmem.plan(loss, w, x, planner=planner, target=target, compilations=0)
            got = jax.grad(plan.apply(loss))(w, x)
            np.testing.assert_allclose(got, jax.grad(loss)(w, x), rtol=1e-12)
