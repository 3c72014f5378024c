"""The planner "dots": no matmul twice, and less kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.projections import projected_and_compiled

DEPTH = 6


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def network(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(norm(x) @ up) @ down
    return jnp.square(x).mean()


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([params[0][0]] * 3))
    return network(params, x)


def arguments(width, rows, dtype="float64"):
    keys = jax.random.split(jax.random.key(0), 2 * DEPTH + 1)
    pairs = [
        [jax.random.normal(key, (width, width), dtype) / width**0.5 for key in keys[at : at + 2]]
        for at in range(0, 2 * DEPTH, 2)
    ]
    return pairs, jax.random.normal(keys[-1], (rows, width), dtype)


@pytest.mark.parametrize("fun", [network, scanned])
def test_values_and_gradients_are_equal_and_no_matmul_is_done_twice(fun):
    args = arguments(16, 512)
    plan = jaxmem.plan(fun, *args, planner="dots")
    assert plan.regions and not plan.predicted.recompute_flops
    assert plan.projected_bytes < plan.plain_bytes
    plain = jax.jit(jax.value_and_grad(fun))(*args)
    planned = jax.jit(jax.value_and_grad(plan.apply(fun)))(*args)
    for one, other in zip(jax.tree.leaves(planned), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, 1e-10, atol=1e-14)


def test_compiled_it_keeps_what_matmuls_make():
    args = jax.eval_shape(lambda: arguments(1024, 8192, "float32"))
    plain = jaxmem.memory(jax.jit(jax.value_and_grad(network)), *args, target="h200")
    plan = jaxmem.plan(network, *args, planner="dots", target="h200")
    assert plan.compiled.flops == plain.work.flops
    kept = (2 * DEPTH + 5) * 8192 * 1024 * 4
    other_bytes = 2 * 2 * DEPTH * 1024**2 * 4 + 8192 * 1024 * 4
    assert plan.compiled_bytes < other_bytes + kept < plain.device


def test_a_budget_is_met_or_refused():
    args = arguments(16, 512)
    least = jaxmem.plan(network, *args, planner="dots")
    roomy = jaxmem.plan(network, *args, planner="dots", budget=least.plain_bytes)
    assert not roomy.regions
    tight = jaxmem.plan(network, *args, planner="dots", budget=least.projected_bytes)
    assert tight.regions == least.regions
    with pytest.raises(jaxmem.BudgetError, match="No dots plan fits the budget"):
        jaxmem.plan(network, *args, planner="dots", budget=least.projected_bytes - 1)


def test_a_function_without_matmuls_stays_plain():
    assert not jaxmem.plan(lambda x: jnp.sin(x).sum(), jnp.ones(8), planner="dots").regions


def of_a_matmul(w, x):
    x = x @ w
    return jnp.sum(jnp.tanh(jnp.einsum("bid,bjd->bij", x, x)))


def with_what_is_computed_of_it(w, x):
    x = x @ w
    return jnp.sum(jnp.tanh(jnp.einsum("bid,bjd->bij", x, jnp.sin(x))))


def of_rows_of_tables(tables, categories):
    """The interactions of features (DLRM: Naumov et al. 2019)."""
    rows = jnp.stack([table[categories[:, at]] for at, table in enumerate(tables)], 1)
    ones, others = jnp.tril_indices(26, -1)
    between = jnp.einsum("bid,bjd->bij", rows, rows)[:, ones, others]
    return jnp.mean(jnp.tanh(jnp.concatenate([rows[:, 0], between], -1)))


@pytest.mark.parametrize("target", ["h100", "rtx-4090", "t4"])
@pytest.mark.parametrize("loss", [of_a_matmul, with_what_is_computed_of_it, of_rows_of_tables])
def test_a_matmul_of_an_array_with_itself(loss, target):
    """Both gradients are there before they are added."""
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 64), (32768, 26, 64)]]
    if loss is of_rows_of_tables:
        tables = [jax.ShapeDtypeStruct((20000, 64), "float32")] * 26
        args = [tables, jax.ShapeDtypeStruct((32768, 26), "int32")]
    projected, compiled = projected_and_compiled(loss, args, target)
    assert abs(compiled / projected - 1) < 0.06
