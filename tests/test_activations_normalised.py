"""Activations that are normalised: what is kept of them beside what they are of."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem


def layer_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def rms_norm(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def batch_norm(x):
    x = x - x.mean(0, keepdims=True)
    return x * lax.rsqrt((x**2).mean(0, keepdims=True) + 1e-5)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


NORMS = [layer_norm, rms_norm, batch_norm, unit, jax.nn.softmax]
exact_gelu = functools.partial(jax.nn.gelu, approximate=False)


def projected_and_compiled(activation, norm, target):
    def loss(weights, x):
        for weight in weights:
            x = norm(activation(x @ weight))
        return jnp.mean(x**2)

    args = (
        [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 5,
        jax.ShapeDtypeStruct((16384, 1024), jnp.float32),
    )
    plan = jaxmem.plan(loss, *args, target=target, compilations=0)
    report = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    return plan.plain_bytes, report.device


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", [jax.nn.gelu, exact_gelu, mish])
def test_what_is_normalised_is_in_memory_and_not_what_is_on_the_way_to_it(activation, norm):
    """Both were counted, an array a layer too many: 19 to 24 % too high."""
    projected, compiled = projected_and_compiled(activation, norm, "h100")
    assert projected == pytest.approx(compiled, rel=0.07)


# One array a layer was missing: 34 to 45 %.
@pytest.mark.parametrize(
    ("activation", "norm", "target"),
    [
        (jax.nn.silu, jax.nn.softmax, "h100"),
        (jax.nn.softplus, batch_norm, "rtx-3090"),
        (exact_gelu, rms_norm, "rtx-3090"),
        (mish, unit, "rtx-3090"),
        (jax.nn.gelu, layer_norm, "t4"),
        (jax.nn.softplus, rms_norm, "t4"),
        (exact_gelu, unit, "t4"),
        (mish, batch_norm, "t4"),
    ],
)
def test_what_several_kernels_would_compute_is_in_memory(activation, norm, target):
    projected, compiled = projected_and_compiled(activation, norm, target)
    assert projected == pytest.approx(compiled, rel=0.1)


@pytest.mark.parametrize(
    ("activation", "norm", "target"),
    [
        (jax.nn.silu, rms_norm, "h100"),
        (jax.nn.silu, batch_norm, "rtx-3090"),
        (jax.nn.gelu, rms_norm, "rtx-3090"),
        (jax.nn.silu, layer_norm, "t4"),
        (jnp.tanh, batch_norm, "t4"),
    ],
)
def test_what_is_cheap_is_not(activation, norm, target):
    projected, compiled = projected_and_compiled(activation, norm, target)
    assert projected == pytest.approx(compiled, rel=0.1)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm, unit, jax.nn.softmax])
@pytest.mark.parametrize("activation", [jax.nn.gelu, exact_gelu, mish])
def test_the_same_where_arithmetic_is_slower_beside_memory(activation, norm):
    """The dearest is kept; the norm of rows, one kernel, and its derivative compute the rest."""
    projected, compiled = projected_and_compiled(activation, norm, "a100-80gb")
    assert projected == pytest.approx(compiled, rel=0.08)
