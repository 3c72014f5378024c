"""Activations between matmuls: XLA has results of matmuls with two axes, and counts a read for each
operation that reads a view of one. What such an activation is made of is kept sooner."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from projections import planned_and_compiled, projected_and_compiled

import jaxmem
from jaxmem.program.expansions import operand_reads
from tests.cases import slow_but

WIDTH, ROWS = 256, 32768
ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "mish": jax.nn.mish,
    "silu": jax.nn.silu,
    "x tanh(x)": lambda x: x * jnp.tanh(x),
    "squared relu": lambda x: jax.nn.relu(x) ** 2,
    "tanh": jnp.tanh,
}


def network(activation, rows=(32, ROWS // 32), dtype="float32", layers=2):
    """The loss of residual perceptrons, and its arguments."""

    def loss(weights, x):
        for up, down in weights:
            x = x + ACTIVATIONS[activation](x @ up) @ down
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    weights = [tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)] * layers
    return loss, (weights, jax.ShapeDtypeStruct((*rows, WIDTH), dtype))


FAST = [
    ("rtx-3090", "float32", "gelu"),
    ("a100-80gb", "bfloat16", "gelu"),
    ("rtx-4090", "bfloat16", "exact gelu"),
]
CASES = [
    (target, dtype, name)
    for target in ("rtx-3090", "rtx-4090", "l4", "a100-80gb", "h100", "t4")
    for dtype in ("float32", "bfloat16")
    for name in ACTIVATIONS
    # Of bfloat16 GPUs without units for it compute in float32, and an RTX 3090 is at the bound.
    if (target, dtype) != ("t4", "bfloat16") and (dtype, name) != ("bfloat16", "mish")
]


@pytest.mark.parametrize("rows", [(32, ROWS // 32), (ROWS,)], ids=["three axes", "two axes"])
@pytest.mark.parametrize("case", slow_but(FAST, CASES), ids="-".join)
def test_what_is_read_through_a_view_is_kept(case, rows):
    """Of one GELU in float32 on an RTX 3090 compiled were 42 % more than projected, where the
    matmuls have three axes, and with two no more."""
    target, dtype, name = case
    projected, compiled = projected_and_compiled(*network(name, rows, dtype), target)
    assert abs(compiled / projected - 1) < 0.09


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_axes_of_a_matmul_are_no_matter_but_to_xla(axes):
    """More axes of rows are a view as two are."""
    rows = (*[2] * (axes - 1), ROWS >> (axes - 1))
    projected, compiled = projected_and_compiled(*network("gelu", rows), "rtx-3090")
    assert abs(compiled / projected - 1) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gelu", "exact gelu", "mish"])
@pytest.mark.parametrize(("target", "rows"), [("rtx-4090", 16384), ("l4", 8192)])
def test_what_the_cache_holds_is_read_faster(target, rows, name, dtype):
    """An RTX 4090 has 72 MiB of it, an L4 48; of float32 16,384 rows take 64."""
    loss, args = network(name, (32, rows // 32), dtype)
    projected, compiled = projected_and_compiled(loss, args, target)
    assert abs(compiled / projected - 1) < 0.09


def test_a_feed_forward_layer_of_two_axes_takes_less():
    """What docs/traps.md says: an array of the hidden size less for each layer."""

    def of_rows(weights, x):
        for up, down in weights:
            rows = x.reshape(-1, WIDTH)
            x = x + (jax.nn.gelu(rows @ up) @ down).reshape(x.shape)
        return jnp.mean(x**2)

    loss, args = network("gelu")
    three, two = (
        jaxmem.memory(jax.value_and_grad(one), *args, target="rtx-3090", timeline=False).device
        for one in (loss, of_rows)
    )
    assert three - two == pytest.approx(2 * 4 * WIDTH * ROWS * 4, rel=0.01)


@pytest.mark.parametrize("share", [0.7, None])
@pytest.mark.parametrize(("target", "dtype"), [("rtx-3090", "float32"), ("a100-80gb", "bfloat16")])
def test_plans_are_projected_as_they_compile(target, dtype, share):
    plan, compiled = planned_and_compiled(*network("gelu", dtype=dtype, layers=6), share, target)
    assert abs(compiled / plan.projected_bytes - 1) < 0.1


def test_a_plan_that_recomputes_what_is_kept_has_the_same_gradients():
    loss, (weights, x) = network("gelu", (2, 8), layers=4)
    keys = iter(jax.random.split(jax.random.key(0), 16))
    args = jax.tree.map(
        lambda one: 0.1 * jax.random.normal(next(keys), one.shape, "float64"), (weights, x)
    )
    plan = jaxmem.plan(loss, *args, target="rtx-3090", compilations=0)
    assert plan.recomputes
    gradients, expected = (jax.jit(jax.grad(fun))(*args) for fun in (plan.apply(loss), loss))
    chex.assert_trees_all_close(gradients, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda x: x**2, 1),
        (lambda x: x**3, 2),
        (lambda x: x**4, 1),
        (lambda x: x**-5, 2),
        (jnp.tanh, 1),
        (lambda x: jax.lax.erfc(x), 16),
        (jax.nn.softplus, 4),
        (jax.nn.silu, 2),
    ],
)
def test_how_often_an_operand_is_read(function, reads):
    (equation,) = jax.make_jaxpr(jax.jit(function))(1.0).jaxpr.eqns
    assert operand_reads(equation) == reads


def test_sums_of_sums_are_counted_in_no_time():
    def doubled(x):
        for _ in range(200):
            x = jnp.sin(x) + x
        return x

    (equation,) = jax.make_jaxpr(jax.jit(doubled))(1.0).jaxpr.eqns
    assert operand_reads(equation) == 64
