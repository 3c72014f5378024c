"""What the results of a function do not depend on: `jax.jit` drops it, in loops too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem


def scanned(weights, x):
    """A second carry that is nowhere read, and a stack of it."""

    def body(carry, weight):
        x, other = carry
        x = jnp.tanh(x @ weight)
        other = other * 0.9 + jnp.sin(x) * jnp.exp(x)
        return (x, other), (x.mean(), jnp.exp(other))

    (x, _), (means, _) = jax.lax.scan(body, (x, x), weights)
    return jnp.mean(x**2) + means.sum()


def counted(weights, x):
    def body(number, carry):
        x, other = carry
        x = jnp.tanh(x @ weights[number])
        return x, other + jnp.exp(jnp.sin(x))

    return jnp.mean(jax.lax.fori_loop(0, len(weights), body, (x, x))[0] ** 2)


def jitted(weights, x):
    @jax.jit
    def both(weights, x):
        return scanned(weights, x), jnp.exp(x)

    return both(weights, x)[0]


def branching(weights, x):
    for weight in weights:
        x, _ = jax.lax.cond(
            x[0, 0] > 0,
            lambda x, weight=weight: (jnp.tanh(x @ weight), jnp.exp(x)),
            lambda x, weight=weight: (jnp.sin(x @ weight), x),
            x,
        )
    return jnp.mean(x**2)


FUNCTIONS = [scanned, counted, jitted, branching]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_is_in_no_projection(function):
    """These were projected 19 to 101 % too high."""
    args = (
        jax.ShapeDtypeStruct((8, 512, 512), jnp.float32),
        jax.ShapeDtypeStruct((8192, 512), jnp.float32),
    )
    plan = jaxmem.plan(function, *args, target="h100", compilations=0)
    report = jaxmem.memory(jax.value_and_grad(function), *args, target="h100", timeline=False)
    assert plan.plain_bytes == pytest.approx(report.device, rel=0.05)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_plans_are_those_of_the_function(function):
    args = (
        jax.random.normal(jax.random.key(0), (6, 8, 8)),
        jax.random.normal(jax.random.key(1), (64, 8)),
    )
    plain = jax.value_and_grad(function, argnums=(0, 1))
    plan = jaxmem.plan(function, *args, budget=int(0.8 * jaxmem.plan(function, *args).plain_bytes))
    planned = jax.value_and_grad(plan.apply(function), argnums=(0, 1))
    for run in (lambda one: one, jax.jit):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
            run(planned)(*args),
            run(plain)(*args),
        )


def test_effects_are_kept(capfd):
    """A print of what is read nowhere else is one."""

    def loss(x):
        jax.debug.print("seen {}", jnp.sum(jnp.exp(x)).round(1))
        return jnp.mean(jnp.tanh(x) ** 2)

    x = jnp.zeros(4)
    plan = jaxmem.plan(loss, x)
    jax.block_until_ready(jax.jit(jax.grad(plan.apply(loss)))(x))
    jax.effects_barrier()
    assert "seen 4.0" in capfd.readouterr().out


def test_arrays_that_nothing_reads_are_in_no_projection():
    """One that the function closes over, and one that it is called with: a batch has more than a
    loss reads."""
    table = jnp.ones((1024, 1024), jnp.float32)

    def loss(weights, batch):
        unused = (table * batch["ids"].sum()).sum()
        del unused
        return jnp.mean(jnp.tanh(batch["x"] @ weights) ** 2)

    weights = jax.ShapeDtypeStruct((64, 64), "float32")
    x, ids = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(512, 64), (2048, 1024)])
    plan = jaxmem.plan(loss, weights, {"x": x, "ids": ids}, budget="1MiB")
    assert plan.projected_bytes < 2**20
    given = jnp.ones((64, 64)), {"x": jnp.ones((512, 64)), "ids": jnp.ones((2048, 1024))}
    given = jax.tree.map(lambda one: one.astype("float32") / 10, given)
    gradient, expected = (jax.grad(fun)(*given) for fun in (plan.apply(loss), loss))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
