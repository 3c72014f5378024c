"""`jax.linear_transpose` of what is planned, and what is built on it: linear solvers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.cases import slow_but

MATRICES = jnp.stack([jax.random.normal(jax.random.key(at), (8, 8)) / 3 for at in range(8)])
X = jax.random.normal(jax.random.key(9), (16, 8))


def chain(x):
    for matrix in MATRICES:
        x = jnp.roll(x @ matrix, 1, 0) * 2
    return x


def loop(x):
    return jax.lax.scan(lambda x, matrix: (x @ matrix, None), x, MATRICES)[0]


def loops(x):
    def outer(x, _):
        return loop(x) + x, x.sum()

    x, sums = jax.lax.scan(outer, x, length=3)
    return x * 1.0 + sums.sum()


def saved(x):
    """Weights that are made of what is closed over, inside and outside of regions."""
    for matrix in MATRICES:
        x = x @ (jnp.tanh(matrix) @ matrix)
    return x


def rolled(x):
    """The same, and nothing that an inner region makes of weights is made outside of it."""
    for matrix in MATRICES:
        x = jnp.roll(x @ (jnp.sin(matrix) @ matrix), 1, 0)
    return x


PLANNED = {
    "remat": jaxmem.remat,
    "sqrt": functools.partial(jaxmem.remat, planner="sqrt"),
    "dots": functools.partial(jaxmem.remat, planner="dots"),
    "kept": lambda fun: jaxmem.remat(jaxmem.remat(fun), regions="keep"),
    "plan": lambda fun: jaxmem.plan(fun, X).apply(fun),
    "tight": lambda fun: jaxmem.plan(fun, X, budget=_least(fun)).apply(fun),
}


def _least(fun):
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.plan(fun, X, budget=1)
    return caught.value.lowest


@pytest.mark.parametrize("planned", PLANNED)
@pytest.mark.parametrize("fun", slow_but([loop, saved], [chain, loop, loops, saved, rolled]))
def test_a_linear_function_is_transposed(fun, planned):
    (expected,) = jax.linear_transpose(fun, X)(jnp.cos(X))
    found = PLANNED[planned](fun)
    for run in (lambda fun: fun, jax.jit):
        (transposed,) = run(jax.linear_transpose(found, X))(jnp.cos(X))
        np.testing.assert_allclose(transposed, expected, rtol=1e-12)
    both = jax.vmap(jax.linear_transpose(found, X))(jnp.stack([jnp.cos(X), X]))[0]
    np.testing.assert_allclose(both[0], expected, rtol=1e-12)


def test_a_scan_is_transposed():
    def scanned(x):
        return jaxmem.scan(lambda x, matrix: (x @ matrix, None), x, MATRICES)[0]

    (expected,) = jax.linear_transpose(loop, X)(X)
    np.testing.assert_allclose(jax.linear_transpose(scanned, X)(X)[0], expected, rtol=1e-12)


@pytest.mark.slow
def test_gradients_of_a_solver_that_transposes():
    """What `jax.lax.custom_linear_solve` does of a matrix that is not symmetric."""
    strong = jnp.eye(8) * 4 + MATRICES[0]

    def solution(apply, b):
        def solve(apply, b):
            return jax.scipy.sparse.linalg.gmres(apply, b, tol=1e-14, maxiter=50)[0]

        return jnp.sum(jax.lax.custom_linear_solve(apply, b, solve, solve) ** 2)

    def apply(x):
        return jax.lax.scan(lambda x, _: (strong @ x, None), x, jnp.zeros(2))[0]

    expected = jax.grad(functools.partial(solution, apply))(X[0])
    found = jax.grad(functools.partial(solution, jaxmem.remat(apply)))(X[0])
    np.testing.assert_allclose(found, expected, rtol=1e-8)
