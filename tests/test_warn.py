"""Warnings are on the user's own line, however deep they come from."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def printing(w, x):
    jax.debug.print("{}", jnp.mean(x))
    return loss(w, x)


def of_places(w, x):
    return jnp.sum(loss(w, x) * jnp.arange(len(x)))


def fitted(fun, batch=X, **options):
    return jaxmem.fit(fun, optax.sgd(1e-2), W, batch, target="h100", compilations=1, **options)


CALLS = {
    "memory without a target": lambda: jaxmem.memory(loss, W, X),
    "memory of prints": lambda: jaxmem.memory(printing, W, X, target="h100"),
    "plan of prints": lambda: jaxmem.plan(printing, W, X, target="h100", compilations=1),
    "fit of prints": lambda: fitted(printing, budget="1GiB"),
    "a budget above the device": lambda: jaxmem.plan(
        loss, W, X, target="h100", budget="1TiB", compilations=0
    ),
    "float16 without a scale": lambda: jaxmem.train_step(
        loss, optax.sgd(1e-2), precision="params=float32,compute=float16"
    ),
    "slices that are not proved": lambda: jaxmem.microbatch(of_places, 4)(W, X),
    "the same, traced": lambda: jax.jit(jaxmem.microbatch(of_places, 4))(W, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_warnings_are_on_the_line_of_the_call(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[name]()
    ours = [one for one in caught if issubclass(one.category, jaxmem.JaxmemWarning)]
    assert ours and {one.filename for one in ours} == {__file__}
