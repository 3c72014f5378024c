"""One element of each row in planned functions: the same values, and no scatter."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

pytestmark = pytest.mark.slow

ROWS, LENGTH = 6, 40


def labels(key=0, dtype=np.int32):
    found = np.random.default_rng(key).integers(-LENGTH, LENGTH, ROWS)
    return jnp.asarray(found % LENGTH if np.dtype(dtype).kind == "u" else found, dtype)


def by_take(x, at):
    return jnp.take_along_axis(x, at[:, None], -1)[:, 0]


def by_first_axis(x, at):
    return jnp.take_along_axis(x.T, at[None], 0)[0]


def by_clipping(x, at):
    return jnp.take_along_axis(x, at[:, None], -1, mode="clip")[:, 0] + jnp.take_along_axis(
        x, 3 * at[:, None], -1, mode="clip"
    ).sum(-1)


def out_of_range(x, at):
    return jnp.nan_to_num(jnp.take_along_axis(x, 2 * at[:, None], -1)[:, 0])


def by_row(x, at):
    return jax.vmap(lambda row, at: row[at])(x, at)


def of_one(x, at):
    return jnp.take_along_axis(x[:1, None], at[:1, None, None], -1).ravel()


def by_optax(x, at):
    return optax.softmax_cross_entropy_with_integer_labels(x, at % LENGTH)


FORMS = [by_take, by_first_axis, by_clipping, out_of_range, by_row, of_one, by_optax]


def loss_of(form):
    def loss(x, at):
        y = jnp.sin(x)
        return jnp.sum((1 + form(y, at)) ** 3) + jnp.mean(y * y)

    return loss


def x_of(key):
    return jax.random.normal(jax.random.key(key), (ROWS, LENGTH))


def scatters(fun, *args):
    """Whether the gradient scatters into an array of whole rows."""
    jaxpr = str(jax.make_jaxpr(jax.grad(fun))(*args))
    shapes = re.findall(r":f64\[([\d,]*)\] = scatter", jaxpr)
    return any(math.prod(map(int, shape.split(","))) >= LENGTH for shape in shapes if shape)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint32, np.int64])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_plain_function(form, dtype):
    loss, x, at = loss_of(form), x_of(0), labels(1, dtype)
    planned = jaxmem.remat(loss)
    many = jnp.stack([x, x_of(1)]), jnp.stack([at, labels(2, dtype)])
    for transform, args in (
        (jax.value_and_grad, (x, at)),
        (lambda f: jax.vmap(jax.grad(f)), many),
        (lambda f: jax.vmap(jax.grad(f), (0, None)), (many[0], at)),
        (lambda f: jax.vmap(jax.grad(f), (None, 0)), (x, many[1])),
    ):
        expected = jax.jit(transform(loss))(*args)
        chex.assert_trees_all_close(
            jax.jit(transform(planned))(*args), expected, rtol=1e-13, atol=1e-15
        )
    assert scatters(loss, x, at) and not scatters(planned, x, at)


@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_and_second_derivatives(form):
    loss, x, at = loss_of(form), x_of(2), labels(3)
    planned, tangent = jaxmem.remat(loss), x_of(3)
    _, along = jax.jvp(lambda x: planned(x, at), (x,), (tangent,))
    _, expected = jax.jvp(lambda x: loss(x, at), (x,), (tangent,))
    np.testing.assert_allclose(along, expected, rtol=1e-12)

    def twice(fun):
        return jax.grad(lambda x: jnp.sum(jax.grad(fun)(x, at) ** 2))(x)

    np.testing.assert_allclose(twice(planned), twice(loss), rtol=1e-12, atol=1e-14)


def test_one_of_a_few_is_picked_alike():
    """The value of the action that was taken, of four; of one, there is nothing to pick."""
    for few in (1, 2, 4):
        x, at = x_of(4)[:, :few], labels(5) % few
        loss = loss_of(by_take)
        found = jax.jit(jax.grad(jaxmem.remat(loss)))(x, at)
        np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(x, at), rtol=1e-13)


def two_of_each(x, at):
    return jnp.take_along_axis(x, at[:, None] + jnp.arange(2)[None], -1).sum(-1)


def any_rows(x, at):
    return x[at[:3]].sum()


def of_short_rows(x, at):
    return jnp.take_along_axis(x.reshape(-1, 8), at[:1, None] % 8, -1)


@pytest.mark.parametrize("form", [two_of_each, any_rows, of_short_rows])
def test_other_gathers_are_xlas(form):
    loss, x, at = loss_of(form), x_of(4), labels(5)
    planned = jaxmem.remat(loss)
    chex.assert_trees_all_close(
        jax.grad(planned)(x, at), jax.grad(loss)(x, at), rtol=1e-13, atol=1e-15
    )
    assert scatters(planned, x, at)


def test_integers_are_picked():
    x = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    np.testing.assert_array_equal(jaxmem.remat(by_take)(x, labels()), by_take(x, labels()))

    def loss(x, at):
        return jnp.sum(jnp.sin(x) * by_take(jnp.argsort(x * x), at)[:, None])

    x, at = x_of(5), labels(6)
    np.testing.assert_allclose(jax.grad(jaxmem.remat(loss))(x, at), jax.grad(loss)(x, at))


def test_narrow_integers_are_clipped():
    x = jax.random.normal(jax.random.key(7), (ROWS, 300))
    loss, at = loss_of(by_clipping), jnp.array([-100, 3, 40, 100, 127, -1], jnp.int8)
    np.testing.assert_allclose(jax.grad(jaxmem.remat(loss))(x, at), jax.grad(loss)(x, at))


def test_no_zeros_are_in_memory():
    """XLA's derivative scatters into 128 MiB of zeros, beside logits of 64 MiB in bfloat16, which
    its cotangent takes the place of."""

    def loss(w, x, at):
        logits = (x @ w).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, at[:, None], -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1, keepdims=True) - chosen)

    args = (
        jax.ShapeDtypeStruct((256, 8192), "bfloat16"),
        jax.ShapeDtypeStruct((4096, 256), "bfloat16"),
        jax.ShapeDtypeStruct((4096,), "int32"),
    )
    plan = jaxmem.plan(loss, *args, target="h200", budget="100%", compilations=0)

    def device(fun):
        return jaxmem.memory(
            jax.jit(jax.value_and_grad(fun)), *args, target="h200",
            compiler_options=plan.compiler_options, timeline=False,
        ).device  # fmt: skip

    assert device(loss) > 200 * 2**20
    assert device(plan.apply(loss)) < 75 * 2**20
    assert abs(device(plan.apply(loss)) / plan.projected_bytes - 1) < 0.01


def test_a_policy_knows_that_users_regions_scatter():
    """The derivative of a loss under `jax.checkpoint` is JAX's own."""

    def loss(params, x, at):
        w, head = params
        x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))(w, x)
        logits = (x @ head).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, at[:, None], -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1, keepdims=True) - chosen)

    args = (
        tuple(jax.ShapeDtypeStruct((256, size), "bfloat16") for size in (1024, 8192)),
        jax.ShapeDtypeStruct((4096, 256), "bfloat16"),
        jax.ShapeDtypeStruct((4096,), "int32"),
    )
    step = jax.jit(jax.value_and_grad(loss))
    device = jaxmem.memory(step, *args, target="h200", timeline=False).device
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.remat_policy(loss, *args, budget="1MiB")
    lowest = int(re.search(r"\((\d+) bytes projected", str(caught.value))[1])
    assert abs(lowest / device - 1) < 0.1, (lowest, device)
