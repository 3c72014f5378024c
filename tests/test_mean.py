"""Losses that are a mean over examples, and those that are not."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem._mean import reduction_of


def why_no_mean(loss, batch, *args):
    proof = reduction_of(lambda params, b, s, k: loss(b, params), batch, [4, 2, 1], args[0])
    return proof.why or proof.reduction


X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
Y = jax.ShapeDtypeStruct((8,), jnp.int32)
W = jax.ShapeDtypeStruct((16, 10), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def each(batch, w):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y)


def chunked(batch, w):
    return jnp.mean(jaxmem.ops.softmax_cross_entropy(batch[0], w, batch[1]))


def dropped(batch, w):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch[0].shape)
    return jnp.mean(each((batch[0] * kept, batch[1]), w))


def regularised(batch, w):
    return jnp.mean(each(batch, w)) + 0.1 * jnp.sum(w**2)


def recurrent(batch, w):
    def body(carry, x):
        hidden, loss = carry
        hidden = jnp.tanh(hidden + x[:, None] * w[:1])
        return (hidden, loss + jnp.mean(hidden**2)), None

    start = jnp.zeros((len(batch[0]), 10)), 0.0
    return jax.lax.scan(body, start, batch[0].T)[0][1]


def beside_metrics(batch, w):
    losses = each(batch, w)
    metrics = jnp.sum(losses / jnp.max(losses))
    return jnp.mean(losses), metrics


@jax.custom_vjp
def squared(x):
    return jnp.sum(x**2)


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * x * g,))


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch, w: jnp.mean(each(batch, w)),
        lambda batch, w: jnp.sum(each(batch, w)) / len(batch[0]),
        lambda batch, w: jnp.sum(each(batch, w)) * jnp.float32(1 / len(batch[0])),
        lambda batch, w: jnp.mean(each(batch, w) * (batch[1] > 0)),
        lambda batch, w: jnp.mean(jax.vmap(lambda x: jnp.sum((x @ w) ** 2))(batch[0])),
        lambda batch, w: jnp.mean(jax.checkpoint(each)(batch, w)),
        lambda batch, w: squared(batch[0] @ w) / len(batch[0]),
        lambda batch, w: jnp.vdot(batch[0] @ w, batch[0] @ w) / len(batch[0]),
        lambda batch, w: beside_metrics(batch, w)[0],
        chunked,
        dropped,
        regularised,
        recurrent,
    ],
)
def test_a_mean_is_told(loss):
    assert why_no_mean(loss, (X, Y), W) is None


def standard(x):
    return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)


def normalised(batch, w):
    hidden = batch[0] @ w
    return jnp.mean(standard(hidden) ** 2)


def normalised_in_a_loop(batch, w):
    def body(x, _):
        return standard(x), None

    return jnp.mean((jax.lax.scan(body, batch[0], None, 3)[0] @ w) ** 2)


def contrastive(batch, w):
    hidden = batch[0] @ w
    return jnp.mean(jax.nn.logsumexp(hidden @ hidden.T, -1))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda batch, w: jnp.sum(each(batch, w)), "it is a sum over examples, not a mean"),
        (lambda batch, w: squared(batch[0] @ w), "it is a sum over examples, not a mean"),
        (
            lambda batch, w: jnp.sum(each(batch, w) * (batch[1] > 0)) / jnp.sum(batch[1] > 0),
            "it is no plain mean over examples (div at test_mean.py:",
        ),
        (lambda batch, w: jnp.sqrt(jnp.mean(each(batch, w))), "it is no plain mean over examples"),
        (lambda batch, w: jnp.max(each(batch, w)), "it is no plain mean over examples (reduce_max"),
        (
            lambda batch, w: jnp.sum(each(batch, w)) + 0.1 * jnp.mean(each(batch, w)),
            "it is no plain mean over examples (add at test_mean.py:",
        ),
        (normalised, "its examples see one another (sub at test_mean.py:"),
        (normalised_in_a_loop, "its examples see one another (sub at test_mean.py:"),
        (contrastive, "its examples see one another (dot_general at test_mean.py:"),
        (
            lambda batch, w: jnp.mean(batch[0].reshape(4, 2, 16) @ w),
            "it cannot be traced with twice the batch (",
        ),
        (
            lambda batch, w: jnp.mean(jnp.sin(batch[0]) if len(batch[0]) > 8 else batch[0]),
            "it is no plain mean over examples (its program is another with twice the batch)",
        ),
    ],
)
def test_what_is_no_mean_is_told(loss, why):
    assert (why_no_mean(loss, (X, Y), W) or "").startswith(why)
