"""Closed-over arrays of one value: a mask of ones, a first state of zeros."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.jaxprs.flattening import traced_jaxpr
from tests.projections import projected_and_compiled

SHAPE = (8192, 2048)
ARGS = jax.ShapeDtypeStruct((1024, 2048), "float32"), jax.ShapeDtypeStruct((8192, 1024), "float32")


def masked(mask):
    def loss(w, x):
        y = jnp.tanh(x @ w)
        y = jnp.where(mask, y, 0.0) if mask.dtype == bool else y * mask
        return jnp.sum(y @ w.T)

    return loss


@pytest.mark.parametrize("make", [jnp.ones, jnp.zeros, np.ones, np.zeros])
def test_an_array_of_one_value_takes_no_memory(make):
    """As an input it would take 64 of 176 MiB more."""
    mask = make(SHAPE, "float32")
    projected, compiled = projected_and_compiled(masked(mask), ARGS, "h100")
    assert abs(compiled / projected - 1) < 0.06


def test_others_do():
    mask = np.ones(SHAPE, "float32")
    mask[-1, -1] = 2
    projected, compiled = projected_and_compiled(masked(mask), ARGS, "h100")
    assert abs(compiled / projected - 1) < 0.13
    ones, _ = projected_and_compiled(masked(np.ones(SHAPE, "float32")), ARGS, "h100")
    assert projected > ones + 64 * 2**20


def test_a_first_state_of_zeros_takes_no_memory():
    """As recurrent networks have it: closed over, at each call."""
    zeros = jnp.zeros((16384, 1024))

    def loss(w, xs):
        def step(h, x):
            h = jnp.tanh(h @ w + x)
            return h, None

        return jnp.sum(jax.lax.scan(step, zeros, xs)[0])

    shapes = (1024, 1024), (4, 16384, 1024)
    args = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    projected, compiled = projected_and_compiled(loss, args, "h100")
    assert abs(compiled / projected - 1) < 0.12


def constants_of(value):
    closed, _ = traced_jaxpr(lambda x: jnp.sum(x) * value, [jnp.ones(3)])
    return closed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "uint32", "complex64"])
def test_values_are_what_they_were(dtype):
    value = jnp.full((2, 5), 1, dtype)
    assert not constants_of(value).consts
    (found,) = jax.core.eval_jaxpr(constants_of(value).jaxpr, [], jnp.ones(3))
    chex.assert_trees_all_equal(found, jnp.sum(jnp.ones(3)) * value, strict=True)


@pytest.mark.parametrize(
    "value",
    [np.array([0.0, -0.0]), np.array([1.0, 2.0]), np.array([True, False]), np.ones(()), np.ones(1)],
    ids=str,
)
def test_values_that_differ_in_a_bit_stay(value):
    assert len(constants_of(value).consts) == 1 or not value.ndim or value.size < 2


def test_arrays_that_are_not_numbers_stay():
    keys = jax.random.wrap_key_data(jnp.zeros((3, 2), jnp.uint32))
    closed, _ = traced_jaxpr(lambda x: jax.random.uniform(keys[1]) * x, [jnp.ones(3)])
    assert len(closed.consts) == 1


def test_gradients_with_closed_over_arrays_of_one_value():
    """Under jit, of a plan with regions, in float64."""
    ones, rows = np.ones((6, 4)), jnp.zeros((6, 4))

    def loss(w, x):
        for _ in range(4):
            x = jnp.sin(x @ w + rows) * ones
        return jnp.sum(x**2)

    with jax.enable_x64(True):
        args = jax.random.normal(jax.random.key(0), (4, 4), "float64"), np.ones((6, 4))
        planned = jaxmem.plan(loss, *args, target="h100", compilations=0).apply(loss)
        expected = jax.value_and_grad(loss)(*args)
        for run in (planned, jax.jit(planned)):
            chex.assert_trees_all_close(jax.value_and_grad(run)(*args), expected, rtol=1e-12)
