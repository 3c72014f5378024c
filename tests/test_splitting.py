"""Matmuls whose sums XLA cuts into parts, as its estimate of their cost says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.program import compiled_by
from jaxmem.program.splitting import has_padded_parts, parts_of
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets import Matmul

# Batch, rows, columns, depth; none is padded. On a T4 cuBLAS has a workspace beside.
SHAPES = [
    (1, 64, 64, 128),
    (1, 128, 256, 2048),
    (1, 256, 1024, 8192),
    (1, 512, 512, 4096),
    (1, 768, 3072, 16384),
    (1, 1024, 1024, 8192),
    (1, 2048, 256, 512),
    (1, 8192, 64, 2048),
    (4, 128, 128, 1024),
    (8, 64, 256, 2048),
]
CASES = [
    ("h100", "float32"),
    ("a100-40gb", "bfloat16"),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("h100", "bfloat16"),
            ("a100-40gb", "float32"),
            ("b200", "float32"),
            ("rtx-4090", "float32"),
        )
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("target", "dtype"), CASES)
def test_parts_are_those_that_xla_makes(target, dtype, shape):
    batch, rows, columns, depth = shape
    left, right = ((batch, rows, depth), (batch, depth, columns))
    args = [jax.ShapeDtypeStruct(one, dtype) for one in (left, right)]
    compiled = jaxmem.memory(lambda x, w: jnp.tanh(x @ w), *args, target=target, timeline=False)
    found = compiled.temp // (4 * batch * rows * columns)  # summed in float32
    one = Matmul(*shape, itemsize=jnp.dtype(dtype).itemsize, summed=4)
    assert parts_of(one, jaxmem.target(target).rules) == max(found, 1)


def test_the_gradients_are_matmuls_of_the_same_three_lengths():
    one = Matmul(2, 3, 5, 7, 4, 4)
    assert dataclasses.astuple(one.of_left)[:4] == (2, 3, 7, 5)
    assert dataclasses.astuple(one.of_right)[:4] == (2, 7, 5, 3)


def test_parts_that_are_not_equally_long_are_padded():
    rules = jaxmem.target("h100").rules
    assert has_padded_parts(Matmul(1, 128, 128, 100_000, 4, 4), rules)
    assert not has_padded_parts(Matmul(1, 128, 128, 2**17, 4, 4), rules)
    assert not has_padded_parts(Matmul(1, 4096, 4096, 100_001, 4, 4), rules)  # in one part


def layers(activation):
    def loss(weights, x):
        for w in weights:
            x = x + activation(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.silu, jax.nn.softplus])
def test_small_layers_are_projected(activation, dtype):
    """Without the parts of the gradients they were a tenth to a fifth too low."""
    args = [jax.ShapeDtypeStruct((512, 512), dtype)] * 5, jax.ShapeDtypeStruct((4096, 512), dtype)
    loss = layers(activation)
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    assert plain == pytest.approx(compiled.device, rel=0.09)


def test_what_is_not_known_of_a_matmul_is_in_one_part():
    args = [jax.ShapeDtypeStruct((0, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")]
    traced = TracedFunction(lambda x, w: jnp.sum(x @ w), args, {}, 0, False)
    program = compiled_by(traced.program, jaxmem.target("h100").rules)
    assert all(not kernel.workspace for kernel in program.kernels)
