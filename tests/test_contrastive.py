"""Losses of the similarities of two batches, by rows and by columns, as CLIP has."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem

SIMILARITIES = 64 * 2**20


def normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def of_labels(logits):
    labels = jnp.arange(len(logits))
    losses = (
        optax.softmax_cross_entropy_with_integer_labels(each, labels) for each in (logits, logits.T)
    )
    return jnp.mean(sum(losses))


def of_diagonals(logits):
    return -sum(jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, axis))) for axis in (0, 1))


def of_rows_alone(logits):
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, 1)))


def losses(of_logits, temperature=True):
    def loss(params, left, right):
        first, second, scale = params
        logits = normalised(left @ first) @ normalised(right @ second).T
        return of_logits(logits * jnp.exp(scale) if temperature else logits)

    return loss


@pytest.mark.parametrize(
    ("of_logits", "temperature", "most"),
    [
        # The gradient of the temperature is summed up where the cotangent of the similarities is
        # written, by rows and by columns: over neither.
        (of_labels, True, 2.2),
        (of_diagonals, True, 2.2),
        # It is computed where the matmuls read it.
        (of_labels, False, 1.4),
        # It is written: by rows alone, beside the similarities.
        (of_rows_alone, False, 2.2),
    ],
)
@pytest.mark.parametrize("target", ["h100", pytest.param("a100-40gb", marks=pytest.mark.slow)])
def test_the_similarities_are_there_as_often_as_is_projected(target, of_logits, temperature, most):
    shapes = ((512, 256), (512, 256), ()), (4096, 512), (4096, 512)
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple) and all(isinstance(n, int) for n in node),
    )
    loss = losses(of_logits, temperature)
    plan = jaxmem.plan(loss, *args, target=target, budget="100%", compilations=1)
    assert plan.compiled_bytes == pytest.approx(plan.projected_bytes, rel=0.08)
    given = sum(leaf.size * 4 for leaf in jax.tree.leaves(args))
    assert (plan.compiled_bytes - 2 * given) / SIMILARITIES < most
