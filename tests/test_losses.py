"""Losses of logits: how many arrays of their size a step holds."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem


def picked(values, labels):
    return jnp.take_along_axis(values, labels[:, None], -1)[:, 0]


def ones(labels, count=16000):
    return jax.nn.one_hot(labels, count, dtype=jnp.float32)


LOSSES = {
    "log_softmax of the label": lambda x, y: -picked(jax.nn.log_softmax(x), y),
    "logsumexp less the label's": lambda x, y: jax.nn.logsumexp(x, -1) - picked(x, y),
    "optax, labels": optax.softmax_cross_entropy_with_integer_labels,
    "one-hot": lambda x, y: -jnp.sum(ones(y) * jax.nn.log_softmax(x), -1),
    "optax, one-hot": lambda x, y: optax.softmax_cross_entropy(x, ones(y)),
    "smooth labels": lambda x, y: optax.softmax_cross_entropy(x, 0.9 * ones(y) + 0.1 / 16000),
    "entropy": lambda x, y: jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x), -1),
    "squares": lambda x, y: jnp.mean((x - ones(y)) ** 2, -1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_arrays_of_logits_are_counted(name):
    """Where rows are normalised and reduced again, a cotangent is not written over the logits."""

    def loss(params, x, labels):
        first, last = params
        return jnp.mean(LOSSES[name](jnp.tanh(x @ first) @ last, labels))

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = shaped(128, 128), shaped(128, 16000)
    args = params, shaped(4096, 128), jax.ShapeDtypeStruct((4096,), jnp.int32)
    plan = jaxmem.plan(loss, *args, target="h100", compilations=1)
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100").device
    assert plan.plain_bytes == pytest.approx(compiled, rel=0.05)
    assert plan.projected_bytes == pytest.approx(plan.compiled_bytes, rel=0.05)
