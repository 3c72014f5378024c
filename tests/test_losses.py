"""Losses of logits: how many arrays of their size a step holds."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem


def picked(values, labels):
    return jnp.take_along_axis(values, labels[:, None], -1)[:, 0]


def ones(values, labels):
    return jax.nn.one_hot(labels, values.shape[-1], dtype=jnp.float32)


LOSSES = {
    "log_softmax of the label": lambda x, y: -picked(jax.nn.log_softmax(x), y),
    "logsumexp less the label's": lambda x, y: jax.nn.logsumexp(x, -1) - picked(x, y),
    "optax, labels": optax.softmax_cross_entropy_with_integer_labels,
    "one-hot": lambda x, y: -jnp.sum(ones(x, y) * jax.nn.log_softmax(x), -1),
    "optax, one-hot": lambda x, y: optax.softmax_cross_entropy(x, ones(x, y)),
    "smooth labels": lambda x, y: optax.softmax_cross_entropy(x, 0.9 * ones(x, y) + 1e-5),
    "entropy": lambda x, y: jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x), -1),
    "squares": lambda x, y: jnp.mean((x - ones(x, y)) ** 2, -1),
}


def step(name, dtype=jnp.float32, classes=16000, right=False):
    """A loss of so many classes, and with it how often the largest logit is the label's."""

    def loss(params, x, labels):
        first, last = params
        logits = (jnp.tanh(x @ first) @ last).astype(jnp.float32)
        mean = jnp.mean(LOSSES[name](logits, labels))
        return (mean, jnp.mean(jnp.argmax(logits, -1) == labels)) if right else mean

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    params = shaped(128, 128), shaped(128, classes)
    return loss, (params, shaped(4096, 128), jax.ShapeDtypeStruct((4096,), jnp.int32))


def check(loss, args, tolerance, **options):
    plan = jaxmem.plan(loss, *args, target="h100", compilations=1, **options)
    step = jax.value_and_grad(loss, **options)
    compiled = jaxmem.memory(step, *args, target="h100", timeline=False).device
    assert plan.plain_bytes == pytest.approx(compiled, rel=tolerance)
    assert plan.projected_bytes == pytest.approx(plan.compiled_bytes, rel=tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_arrays_of_logits_are_counted(name):
    """Where rows are normalised and reduced again, a cotangent is not written over the logits."""
    check(*step(name), 0.05)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_of_a_large_vocabulary_too(name, dtype):
    """XLA sums rows of more than 16,384 up in parts, in kernels apart: there it is."""
    check(*step(name, dtype, classes=32000), 0.12)


@pytest.mark.parametrize("classes", [1024, 16000, 32000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_beside_the_largest_logit(dtype, classes):
    """XLA takes it with the maximum of the row, which is in no kernel with the sum then."""
    check(*step("one-hot", dtype, classes, right=True), 0.12, has_aux=True)


@pytest.mark.parametrize("classes", [16000, 32000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_the_next_token(dtype, classes):
    def loss(params, tokens):
        words, last = params
        logits = (jnp.tanh(words[tokens]) @ last).astype(jnp.float32)[:, :-1]
        label = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - label)

    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((classes, 128), (128, classes))]
    check(loss, (params, jax.ShapeDtypeStruct((8, 512), jnp.int32)), 0.05)
