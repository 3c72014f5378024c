"""Parts of a step whose backward passes need nothing of each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.cases import slow_but


def network(layers, x):
    for inner, outer in layers:
        x = x + jnp.tanh(x @ inner) @ outer
    return x


def siamese(layers, x, y):
    return jnp.mean((network(layers, x) - network(layers, y)) ** 2)


def towers(layers, x, y):
    half = len(layers) // 2
    return jnp.mean((network(layers[:half], x) - network(layers[half:], y)) ** 2)


def coarse_and_fine(layers, x, y):
    """The fine network reads what the coarse one makes, and hands no cotangent on."""
    half = len(layers) // 2
    coarse = network(layers[:half], x)
    fine = network(layers[half:], jax.lax.stop_gradient(coarse))
    return jnp.mean((coarse - x) ** 2) + jnp.mean((fine - y) ** 2)


LOSSES = pytest.mark.parametrize("loss", [siamese, towers, coarse_and_fine])


def arguments(layers, width, hidden, rows, made):
    sizes = [(width, hidden), (hidden, width)]
    return [[made(size) for size in sizes]] * layers, made((rows, width)), made((rows, width))


@LOSSES
@pytest.mark.parametrize("share", [0.3, 0.5])
def test_projected_bytes_are_those_compiled(loss, share):
    """Side by side they took up to a quarter more than is projected."""
    made = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    args = arguments(12, 512, 2048, 8192, made)
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0)
    budget = max(int(share * plain.plain_bytes), int(1.05 * plain.projected_bytes))
    plan = jaxmem.plan(loss, *args, target="h100", compilations=0, budget=budget)
    compiled = jaxmem.memory(
        jax.value_and_grad(plan.apply(loss)),
        *args,
        target="h100",
        timeline=False,
        compiler_options=plan.compiler_options,
    ).device
    assert plan.regions
    assert -0.06 < plan.projected_bytes / compiled - 1 < 0.15


@LOSSES
@pytest.mark.parametrize("planner", slow_but(["dp"], ["dp", "sqrt"]))
def test_derivatives_are_those_of_the_function(loss, planner):
    keys = iter(jax.random.split(jax.random.key(0), 99))
    args = arguments(4, 3, 4, 5, lambda size: jax.random.normal(next(keys), size))
    planned = jaxmem.remat(loss, planner=planner, budget=None)
    for transform in (
        jax.grad,
        lambda f: jax.grad(f, argnums=(0, 1, 2)),
        lambda f: lambda *a: jax.jvp(f, a, a),
        lambda f: (
            lambda layers, x, y: jax.vmap(jax.grad(f), (None, 0, None))(
                layers, jnp.stack([x, -x]), y
            )
        ),
        lambda f: lambda layers, x, y: jax.hessian(lambda x: f(layers, x, y))(x),
    ):
        found, expected = (jax.jit(transform(f))(*args) for f in (planned, loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-12), found, expected)


@LOSSES
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float64", "float32"]))
def test_planned_functions_are_cut_and_cast(loss, dtype):
    """What is known of barriers is known of those in between."""
    keys = iter(jax.random.split(jax.random.key(0), 99))
    layers, x, y = arguments(4, 3, 4, 8, lambda size: jax.random.normal(next(keys), size, dtype))
    planned = jaxmem.remat(lambda layers, batch: loss(layers, *batch))
    assert "back_after" in str(jax.make_jaxpr(planned)(layers, (x, y)))
    if dtype == "float64":
        found = jaxmem.microbatch(planned, 4)(layers, (x, y))
        expected = jax.value_and_grad(loss)(layers, x, y)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-10, 1e-10), found, expected)
        return
    found = jax.grad(jaxmem.autocast(planned, "bf16"))(layers, (x, y))
    expected = jax.grad(jaxmem.autocast(loss, "bf16"))(layers, x, y)
    exact = jax.grad(loss)(*jax.tree.map(lambda one: one.astype("float64"), (layers, x, y)))
    for one, other, true in zip(*map(jax.tree.leaves, (found, expected, exact)), strict=True):
        # A plan may sum up in another order: it is rounded otherwise, and no worse. (Its error is
        # half and a quarter of the plain function's for `towers` and `coarse_and_fine`.)
        largest = np.abs(true).max()
        assert np.abs(one - true).max() <= 1.1 * np.abs(other - true).max() + 0.01 * largest
