"""Max and min pooling in planned functions: the same values, and no scatter."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem

WINDOWS = [
    ((3, 3), (2, 2), ((1, 1), (1, 1))),
    ((2, 2), (2, 2), "VALID"),
    ((3, 2), (1, 2), "SAME"),
    ((2, 3), (3, 3), ((0, 1), (2, 0))),
    ((9, 9), (1, 1), "SAME"),  # too many slices: XLA's own derivative
]


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


@pytest.mark.parametrize("case", WINDOWS, ids=str)
@pytest.mark.parametrize("pool", [nn.max_pool, min_pool, lax_min_pool])
def test_gradients_are_those_of_plain_pooling(pool, case):
    loss, x = pooled(pool, *case), many_ties(0)
    planned, many = jaxmem.remat(loss), jnp.stack([x, many_ties(1)])
    for transform, of in (jax.value_and_grad, x), (lambda f: jax.vmap(jax.grad(f)), many):
        expected = jax.jit(transform(loss))(of)
        chex.assert_trees_all_close(
            jax.jit(transform(planned))(of), expected, rtol=1e-13, atol=1e-15
        )


@pytest.mark.parametrize("case", WINDOWS[:4], ids=str)
def test_forward_mode_is_the_gradient(case):
    planned = jaxmem.remat(pooled(nn.max_pool, *case))
    x, tangent = many_ties(2), many_ties(3)
    _, along = jax.jvp(planned, (x,), (tangent,))
    np.testing.assert_allclose(along, jnp.vdot(jax.grad(planned)(x), tangent), rtol=1e-12)


def test_an_operand_that_is_read_elsewhere():
    """A skip connection: XLA scatters into its cotangent."""

    def loss(x):
        skip = x * x - x
        return jnp.sum(jnp.sin(nn.max_pool(skip, (3, 3), (2, 2)))) + jnp.sum(jnp.cos(skip))

    x = many_ties(6)
    expected = jax.grad(loss)(x)
    np.testing.assert_allclose(jax.grad(jaxmem.remat(loss))(x), expected, rtol=1e-13, atol=1e-15)
    jaxpr = str(jax.make_jaxpr(jax.grad(jaxmem.remat(loss)))(x))
    assert "select_and_scatter_add" in jaxpr
    alone = pooled(nn.max_pool, *WINDOWS[0])
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(jaxmem.remat(alone)))(x))


def test_dilated_windows():
    """JAX has no gradient of these."""
    x = jax.random.normal(jax.random.key(4), (10,))

    def loss(x):
        return jnp.sum(jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (3,), (2,), ((1, 0),), window_dilation=(2,)
        ) ** 3)  # fmt: skip

    def by_hand(x):
        padded = jnp.concatenate([jnp.array([-jnp.inf]), x])
        return sum(jnp.max(padded[first : first + 5 : 2]) ** 3 for first in (0, 2, 4, 6))

    planned = jaxmem.remat(loss)
    np.testing.assert_allclose(planned(x), by_hand(x), rtol=1e-14)
    np.testing.assert_allclose(jax.grad(planned)(x), jax.grad(by_hand)(x), rtol=1e-14)


def test_second_derivatives():
    loss, x = pooled(nn.max_pool, *WINDOWS[0]), many_ties(5)

    def twice(fun):
        return jax.grad(lambda x: jnp.sum(jax.grad(fun)(x) ** 2))(x)

    np.testing.assert_allclose(twice(jaxmem.remat(loss)), twice(loss), rtol=1e-12, atol=1e-14)


def test_integers_are_pooled():
    x = jnp.arange(48).reshape(1, 4, 12, 1)

    def fun(x):
        return jax.lax.reduce_window(x, 0, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    np.testing.assert_array_equal(jaxmem.remat(fun)(x), fun(x))


def test_the_first_of_several_largest_has_the_cotangent():
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
