"""What matmuls compute as they read, held against what XLA has in memory."""

import types

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.program.operands import made_in_matmuls

ROWS, WIDTH = 16384, 256
NEWER = jax.__version_info__ >= (0, 12)


def clipped(z, bias):
    return jnp.clip(z, -1, 1)


def over_deviation(z, bias):
    return z * jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-6)


FUSED = {
    "relu": lambda z, bias: jax.nn.relu(z),
    "biased relu": lambda z, bias: jax.nn.relu(z + bias[None]),
    "biased sine": lambda z, bias: jnp.sin(30 * (z + bias[None])),
    "sines": lambda z, bias: jnp.sin(jnp.sin(z)),
    "error function": lambda z, bias: jax.lax.erf(z / 2),
    "biases that are computed": lambda z, bias: jax.nn.relu(z + jnp.exp(bias)[None]),
    "fractions": lambda z, bias: z - jnp.floor(z),
    "bounded": lambda z, bias: jax.lax.rsqrt(jnp.abs(z) + 1),
}
IN_MEMORY = {
    "leaky relu": lambda z, bias: jax.nn.leaky_relu(z),
    "silu": lambda z, bias: jax.nn.silu(z),
    "square": lambda z, bias: jnp.square(z),
    "selection": lambda z, bias: jnp.where(z > 0, z, 0),
    "clip": clipped,
    "relu6": lambda z, bias: jax.nn.relu6(z),
    "rows over their deviation": over_deviation,
}


def arrays_kept(layer, target, dtype, scanned):
    """Of each layer: projected, compiled, and kernels of the forward pass."""

    def loss(params, x):
        def step(x, params):
            weight, bias = params
            return layer(x @ weight, bias), None

        if scanned:
            return jnp.sum(jax.lax.scan(step, x, params)[0])
        for weight, bias in zip(*params, strict=True):
            x, _ = step(x, (weight, bias))
        return jnp.sum(x @ params[0][0])

    found = []
    for count in (3, 7):
        shapes = (count, WIDTH, WIDTH), (count, WIDTH), (ROWS, WIDTH)
        weight, bias, x = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        plan = jaxmem.plan(loss, (weight, bias), x, target=target, compilations=0)
        step = jax.jit(jax.value_and_grad(loss))
        compiled = jaxmem.memory(step, (weight, bias), x, target=target, timeline=False).device
        found.append((plan.plain_bytes, compiled))
    array = ROWS * WIDTH * jnp.dtype(dtype).itemsize
    return [(after - before) / 4 / array for before, after in zip(*found, strict=True)]


@pytest.mark.parametrize("name", FUSED)
def test_what_reads_one_value_is_never_in_memory(name):
    projected, compiled = arrays_kept(FUSED[name], "h100", jnp.float32, False)
    assert abs(projected - compiled) < 0.15 and projected < 1.5


@pytest.mark.parametrize("name", IN_MEMORY)
def test_what_reads_more_is_in_memory(name):
    projected, compiled = arrays_kept(IN_MEMORY[name], "h100", jnp.float32, False)
    assert abs(projected - compiled) < 0.15 and projected > 1.5


@jax.custom_jvp
def both(z):
    return jnp.sin(z), z


@both.defjvp
def _(primals, tangents):
    return both(*primals), (jnp.cos(primals[0]) * tangents[0], tangents[0])


def test_what_makes_two_results_is_no_chain():
    def loss(w, x):
        for _ in range(4):
            x = sum(both(x @ w))
        return jnp.sum(x)

    args = jnp.eye(8) / 2, jnp.ones((4, 8))
    plan = jaxmem.plan(loss, *args, target="a100-80gb", compilations=0)
    found = jax.grad(plan.apply(loss))(*args)
    assert jnp.allclose(found, jax.grad(loss)(*args), rtol=1e-12)


def test_a_program_without_types_has_no_chains():
    program = types.SimpleNamespace(sizes=(4, 4), types=(), operations=())
    assert made_in_matmuls(program, lambda operation: False) == [0, 1]


@pytest.mark.parametrize(
    ("target", "dtype", "scanned"),
    [
        ("a100-80gb", jnp.float32, False),
        ("rtx-3090", jnp.float16, False),
        ("t4", jnp.float32, False),
        pytest.param(
            "h100",
            jnp.float64,
            False,
            marks=pytest.mark.skipif(NEWER, reason="XLA of jax 0.12 fuses some in float64 too"),
        ),
        ("h100", jnp.float32, True),
        ("h100", jnp.bfloat16, True),
    ],
)
@pytest.mark.parametrize("name", ["biased relu", "biased sine", "relu"])
def test_on_other_gpus_in_other_dtypes_and_in_scans(name, target, dtype, scanned):
    projected, compiled = arrays_kept(FUSED[name], target, dtype, scanned)
    assert abs(projected - compiled) < 0.25


def test_what_is_spread_out_for_a_matmul_is_in_memory():
    """A factor of each particle times each row: XLA writes the products of all."""

    def loss(params, noise, x):
        middle, first, second = params

        def one(noise):
            y = jnp.tanh((middle + noise) @ first)
            return jnp.sum(jnp.square(x - jnp.tanh(x * y[None] @ second)))

        return jnp.mean(jax.vmap(one)(noise))

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    middle, noise, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH,), (16, WIDTH), (4096, WIDTH))
    )
    args = (middle, *weights), noise, x
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False).device
    assert abs(plain / compiled - 1) < 0.1
