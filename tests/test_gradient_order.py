"""Which of a matmul's two gradients XLA makes first, and over what it writes."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from tests.projections import projected_and_compiled

ROWS, WIDTH = 4096, 256


def perceptrons(weights, x):
    """The gradient by a layer's second matrix reads what the cotangent is written over then."""
    for up, down in weights:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def gated_by_slices(weights, x):
    """The cotangent of what is cut into slices is written over nothing."""
    for up, down in weights:
        gate, value = jnp.split(x @ up, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * value) @ down[: up.shape[1] // 2]
    return jnp.mean(x**2)


def squeezed(weights, x):
    """Two factors of different lengths, one of which is spread out."""
    for up, down in weights:
        x = x * jax.nn.sigmoid(jnp.mean(x, 0) @ up)[None, :WIDTH] @ down[:WIDTH] + x
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss", [perceptrons, gated_by_slices, squeezed])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projected_bytes_are_those_compiled(loss, dtype):
    up, down = (jax.ShapeDtypeStruct(s, dtype) for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))
    args = [(up, down)] * 4, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    projected, compiled = projected_and_compiled(loss, args)
    assert projected == pytest.approx(compiled, rel=0.03)


def test_pairs_that_a_matmul_reads():
    """Each row times each: the matmul for the products' cotangent reads one factor spread out."""

    def loss(w, x, y):
        return jnp.mean(jnp.tanh((x[:, None] * y[None]) @ w) ** 2)

    rows = jax.ShapeDtypeStruct((128, WIDTH), "float32")
    args = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"), rows, rows
    step = jax.value_and_grad(loss, (0, 1, 2))
    compiled = jaxmem.memory(step, *args, target="h100", timeline=False).device
    plan = jaxmem.plan(loss, *args, target="h100", compilations=0, argnums=(0, 1, 2))
    assert plan.plain_bytes == pytest.approx(compiled, rel=0.03)
