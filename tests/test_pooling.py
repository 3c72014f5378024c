"""Max and min pooling in planned functions: the same values, and no scatter."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from projections import projected_and_compiled

import jaxmem
from jaxmem.program.costs import overlaps

WINDOWS = [
    ((3, 3), (2, 2), ((1, 1), (1, 1))),
    ((2, 2), (2, 2), "VALID"),
    ((3, 2), (1, 2), "SAME"),
    ((2, 3), (3, 3), ((0, 1), (2, 0))),
    ((9, 9), (1, 1), "SAME"),  # too many slices: XLA's own derivative
]


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    """The derivative that is compiled for a platform, here on the CPU."""
    if request.param == "gpu":
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args)
        )
    return request.param


def many_ties(key):
    return jnp.round(2 * jax.random.normal(jax.random.key(key), (2, 9, 11, 3)))


def pooled(pool, window, strides, padding):
    def loss(x):
        return jnp.sum(jnp.sin(pool(x * x - x, window, strides, padding)) + x.mean())

    return loss


def min_pool(x, window, strides, padding):
    return -nn.max_pool(-x, window, strides, padding)


def lax_min_pool(x, window, strides, padding):
    return jax.lax.reduce_window(
        x, jnp.inf, jax.lax.min, (1, *window, 1), (1, *strides, 1),
        padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [*WINDOWS[::2], *(pytest.param(one, marks=pytest.mark.slow) for one in WINDOWS[1::2])],
    ids=str,
)
def test_gradients_are_those_of_plain_pooling(case, platform):
    losses = [pooled(pool, *case) for pool in (nn.max_pool, min_pool, lax_min_pool)]

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(transform, x, many):
        functions = list(map(transform, losses))
        return (
            [jax.value_and_grad(fun)(x) for fun in functions],
            [jax.vmap(jax.grad(fun))(many) for fun in functions],
        )

    args = many_ties(0), jnp.stack([many_ties(0), many_ties(1)])
    plain, planned = gradients(lambda fun: fun, *args), gradients(jaxmem.remat, *args)
    chex.assert_trees_all_close(planned, plain, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("case", WINDOWS[:4], ids=str)
def test_forward_mode(case, platform):
    """That of plain JAX on a CPU, which differs from its own gradient at ties; the gradient's on a
    GPU."""
    loss, x, tangent = pooled(nn.max_pool, *case), many_ties(2), many_ties(3)
    planned = jaxmem.remat(loss)
    _, along = jax.jvp(planned, (x,), (tangent,))
    _, plain = jax.jvp(loss, (x,), (tangent,))
    expected = plain if platform == "cpu" else jnp.vdot(jax.grad(planned)(x), tangent)
    np.testing.assert_allclose(along, expected, rtol=1e-12)


def test_padding_as_large_as_what_is_there(platform):

    def loss(x):
        z = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 0)))
        return jnp.sum(z * jnp.arange(1.0, z.size + 1).reshape(z.shape))

    x = jnp.full((1, 8, 7, 4), -jnp.inf)
    np.testing.assert_array_equal(jax.grad(jaxmem.remat(loss))(x), jax.grad(loss)(x))


VIEWS = {
    "reshape": lambda y: y.reshape(1, 16, 8, 1),
    "expand_dims": lambda y: y[None, :, :, None],
    "transpose": lambda y: y.T.reshape(1, 8, 16, 1),
    "flip": lambda y: y[None, ::-1, :, None],
    "slice": lambda y: jnp.pad(y, ((2, 2), (0, 0)))[None, 2:-2, :, None],
    "squeeze": lambda y: y[:, None].squeeze(1)[None, ..., None],
}
USES = {
    "tanh": lambda y, z: 0.0,
    "product": lambda y, z: jnp.sum(y * y * 0.5),
    "both": lambda y, z: jnp.sum(z.reshape(-1) * y.reshape(-1)[: z.size]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", VIEWS)
def test_an_operand_that_is_read_under_another_shape(view, use):
    """The compiler sees one buffer under two shapes."""

    def loss(w, x):
        y = jnp.tanh(x @ w)
        strides = (1, 1) if use == "both" else (2, 2)
        z = nn.max_pool(VIEWS[view](y), (2, 2), strides, "SAME")
        return jnp.sum(z**2) + USES[use](y, z)

    w = jax.random.normal(jax.random.key(0), (8, 8)) / 3
    x = jax.random.normal(jax.random.key(1), (16, 8))
    planned = jax.jit(jax.grad(jaxmem.remat(loss)))
    np.testing.assert_allclose(planned(w, x), jax.grad(loss)(w, x), rtol=1e-12, atol=1e-12)


def test_an_operand_that_is_read_elsewhere():
    """A skip connection: XLA scatters into its cotangent."""

    def loss(x):
        skip = x * x - x
        return jnp.sum(jnp.sin(nn.max_pool(skip, (3, 3), (2, 2)))) + jnp.sum(jnp.cos(skip))

    x = many_ties(6)
    expected = jax.grad(loss)(x)
    np.testing.assert_allclose(jax.grad(jaxmem.remat(loss))(x), expected, rtol=1e-13, atol=1e-15)
    alone = pooled(nn.max_pool, *WINDOWS[0])
    for fun, platform, scatters in [
        (loss, "cuda", True), (alone, "cuda", False), (loss, "cpu", True), (alone, "cpu", True)
    ]:  # fmt: skip
        traced = jax.jit(jax.grad(jaxmem.remat(fun))).trace(x)
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("select_and_scatter" in lowered) == scatters


def test_dilated_windows_have_no_gradient():
    """As in JAX, whose derivative this is."""

    def loss(x):
        return jnp.sum(jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (3,), (2,), ((1, 0),), window_dilation=(2,)
        ) ** 3)  # fmt: skip

    x, planned = jax.random.normal(jax.random.key(4), (10,)), jaxmem.remat(loss)
    np.testing.assert_array_equal(planned(x), loss(x))
    for fun in loss, planned:
        with pytest.raises(NotImplementedError, match="window dilation"):
            jax.grad(fun)(x)


def test_second_derivatives(platform):
    loss, x = pooled(nn.max_pool, *WINDOWS[0]), many_ties(5)

    def twice(fun):
        return jax.grad(lambda x: jnp.sum(jax.grad(fun)(x) ** 2))(x)

    np.testing.assert_allclose(twice(jaxmem.remat(loss)), twice(loss), rtol=1e-12, atol=1e-14)


def test_integers_are_pooled():
    x = jnp.arange(48).reshape(1, 4, 12, 1)

    def fun(x):
        return jax.lax.reduce_window(x, 0, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    np.testing.assert_array_equal(jaxmem.remat(fun)(x), fun(x))


def test_the_first_of_several_largest_has_the_cotangent(platform):
    x = jnp.zeros((1, 4, 4, 1))
    gradient = jax.grad(jaxmem.remat(lambda x: nn.max_pool(x, (2, 2), (2, 2)).sum()))(x)
    expected = np.zeros((4, 4))
    expected[::2, ::2] = 1
    np.testing.assert_array_equal(gradient[0, ..., 0], expected)


def test_no_places_and_no_zeros_are_in_memory():
    """XLA's derivative has four places of 6 MiB each, and zeros of 101 MiB, beside its operand or
    its cotangent of 98 MiB."""

    def loss(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return nn.max_pool(y, (3, 3), (2, 2), ((1, 1), (1, 1))).sum()

    args = (
        jax.ShapeDtypeStruct((3, 3, 16, 64), "float32"),
        jax.ShapeDtypeStruct((32, 112, 112, 16), "float32"),
    )
    plan = jaxmem.plan(loss, *args, target="h200", budget="100%", compilations=0)

    def report(fun):
        return jaxmem.memory(
            jax.jit(jax.value_and_grad(fun)), *args, target="h200",
            compiler_options=plan.compiler_options, timeline=False,
        )  # fmt: skip

    plain, planned = report(loss), report(plan.apply(loss))
    assert planned.work.flops == plain.work.flops
    assert planned.device < 0.65 * plain.device  # 153 of 249 MiB


def test_a_sharded_batch_stays_apart():
    """XLA gathers it for its own derivative in float16, and for none of ours."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=auto)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((64, 28, 28, 64), jnp.float16, sharding=rows)

    def loss(x):
        return jnp.sum(nn.max_pool(x * 2, (3, 3), (2, 2), padding="SAME") ** 2)

    target = jaxmem.target("a100-80gb", count=8)
    plain, planned = (
        jaxmem.memory(jax.grad(fun), x, target=target, timeline=False).collectives.count
        for fun in (loss, jaxmem.remat(loss))
    )
    assert plain["all-gather"] and "all-gather" not in planned


ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "silu": jax.nn.silu}


@pytest.mark.parametrize("target", ["h100", pytest.param("t4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("activation", "length", "stride", "off"),
    [("relu", 3, 2, 0.02), ("relu", 2, 2, 0.02), ("tanh", 3, 2, 0.02), ("silu", 3, 1, 0.12)],
)
def test_what_xla_scatters_by_is_projected(activation, length, stride, off, target):
    """What each window has picked, and where it was; a `relu` is computed for the pooling alone."""

    def loss(kernels, x):
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            window, strides = (length, length), (stride, stride)
            x = nn.max_pool(ACTIVATIONS[activation](x), window, strides, "SAME")
        return jnp.mean(x**2)

    kernels = [jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)] * 3
    x = jax.ShapeDtypeStruct((32, 65, 65, 64), jnp.float32)
    projected, compiled = projected_and_compiled(loss, (kernels, x), target)
    assert projected == pytest.approx(compiled, rel=off)


@pytest.mark.parametrize(
    ("window", "stride", "dilation", "overlap"),
    [(2, 2, 1, False), (3, 2, 1, True), (2, 2, 2, True), (2, 3, 2, False), (1, 1, 3, False)],
)
def test_windows_with_gaps_reach_as_far_as_their_last_element(window, stride, dilation, overlap):
    def pooled(x):
        shape, strides, gaps = (1, window, 1), (1, stride, 1), (1, dilation, 1)
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, shape, strides, "VALID", window_dilation=gaps
        )

    (equation,) = jax.make_jaxpr(pooled)(jnp.ones((2, 16, 3))).jaxpr.eqns
    assert overlaps(equation) == overlap
