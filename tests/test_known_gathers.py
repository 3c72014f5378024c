"""Gathers whose numbers are known: no scatter in the backward pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import jaxprs
from tests.cases import slow_but

ROWS = np.arange(6)


def rows_of(x):
    return jnp.arange(len(x))


TAKEN = {
    "the row's number": lambda x, y: x[rows_of(x), y],
    "the row's number, of NumPy": lambda x, y: x[np.arange(len(x)), y],
    "closed over": lambda x, y: x[ROWS, y],
    "counted from the end": lambda x, y: x[rows_of(x), y - x.shape[1]],
    "negative numbers of rows": lambda x, y: x[rows_of(x) - len(x), y],
    "of unsigned bytes": lambda x, y: x[rows_of(x).astype(jnp.uint8), y.astype(jnp.uint8)],
    "of columns": lambda x, y: x.T[y, rows_of(x)],
    "rows of matrices": lambda x, y: x.reshape(2, 3, 8)[
        jnp.arange(2)[:, None], jnp.arange(3)[None], y.reshape(2, 3)
    ],
    "columns of matrices": lambda x, y: jnp.moveaxis(x.reshape(2, 3, 8), 2, 1)[
        jnp.arange(2)[:, None], y.reshape(2, 3), jnp.arange(3)[None]
    ],
    "of a meshgrid": lambda x, y: x.reshape(2, 3, 8)[
        (*jnp.meshgrid(jnp.arange(2), jnp.arange(3), indexing="ij"), y.reshape(2, 3))
    ],
    "a diagonal": lambda x, y: jnp.diagonal(x[:, :6] * x[:, 2:]),
    "in a scan": lambda x, y: jax.lax.scan(
        lambda total, one: (total + one[rows_of(x), y], None), jnp.zeros(6), jnp.stack([x, x * x])
    )[0],
    "one by one": lambda x, y: jax.vmap(lambda row, at: row[at])(x, y),
}
OTHERS = {
    "some rows": lambda x, y: x[jnp.arange(4), y[:4]],
    "rows from the second on": lambda x, y: x[jnp.arange(5) + 1, y[:5]],
    "rows in reverse": lambda x, y: x[rows_of(x)[::-1], y],
    "one row again and again": lambda x, y: x[jnp.zeros(6, int), y],
    "a row twice": lambda x, y: x[jnp.asarray([0, 1, 2, 3, 4, 4]), y],
    "rows that are computed": lambda x, y: x[y - 1, y],
    "rows by columns": lambda x, y: x.reshape(2, 3, 8)[
        jnp.arange(2)[None], jnp.arange(2)[:, None], y[:4].reshape(2, 2)
    ],
    "of a longer matrix": lambda x, y: jnp.concatenate([x, x])[rows_of(x), y],
    "a diagonal above": lambda x, y: jnp.diagonal(x[:, :6], 1),
    "all columns of rows": lambda x, y: x[rows_of(x)][:, 1],
}

# The others take a minute together.
FAST = ["closed over", "in a scan", "one by one", "of a meshgrid", "rows in reverse", "a row twice"]


def data():
    x = jax.random.normal(jax.random.key(0), (6, 8))
    return x, jnp.asarray([1, 7, 3, 1, 5, 2])


@pytest.mark.parametrize("name", slow_but(FAST, [*TAKEN, *OTHERS]))
def test_values_and_gradients_are_the_same(name):
    take = TAKEN.get(name) or OTHERS[name]

    def loss(x, y):
        return jnp.sum(jnp.sin(take(jnp.cos(x), y)) ** 2)

    x, y = data()
    expected = jax.value_and_grad(loss)(x, y)
    for planned in (jaxmem.remat(loss), jaxmem.remat(loss, planner="sqrt")):
        for call in (jax.value_and_grad(planned), jax.jit(jax.value_and_grad(planned))):
            chex.assert_trees_all_close(call(x, y), expected, rtol=1e-12)
    tangents = jax.jvp(lambda x: jaxmem.remat(loss)(x, y), (x,), (jnp.sin(x),))
    chex.assert_trees_all_close(
        tangents, jax.jvp(lambda x: loss(x, y), (x,), (jnp.sin(x),)), rtol=1e-12
    )


@pytest.mark.parametrize("name", ["the row's number", "of columns", "rows of matrices"])
def test_elements_that_there_are_not_have_no_gradient(name):
    x, y = data()
    y = y.at[2].set(11)

    def gradient(fun):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(fun(jnp.cos(x), y)))))(x)

    for mode in ("fill", "clip"):
        takes = {
            "the row's number": lambda x, y, mode=mode: x.at[rows_of(x), y].get(mode=mode),
            "of columns": lambda x, y, mode=mode: x.T.at[y, rows_of(x)].get(mode=mode),
            "rows of matrices": lambda x, y, mode=mode: (
                x.reshape(2, 3, 8)
                .at[jnp.arange(2)[:, None], jnp.arange(3)[None], y.reshape(2, 3)]
                .get(mode=mode)
            ),
        }
        found, expected = gradient(jaxmem.remat(takes[name])), gradient(takes[name])
        chex.assert_trees_all_close(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", [*TAKEN, *OTHERS])
def test_which_gathers_say_so(name):
    take = TAKEN.get(name) or OTHERS[name]
    flat = jaxprs.flatten(lambda x, y: take(jnp.cos(x), y), data(), merge=True)
    if name == "in a scan":
        (scan,) = (step for step in flat.steps if step.primitive == "scan")
        flat = jaxprs.loop_of(scan.equation).body
    gathers = [step.equation for step in flat.steps if step.primitive == "gather"]
    found = [jaxprs.picked_axis(equation) is not None for equation in gathers]
    assert found == [name in TAKEN] * len(found) and gathers


@pytest.mark.parametrize(
    "target", ["h100", pytest.param("a100-40gb", marks=pytest.mark.slow), "v5e"]
)
def test_a_plan_has_no_scattered_logits(target):
    """They are an array of 128 MiB."""

    def loss(w, x, labels):
        logits = x @ w
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[jnp.arange(len(x)), labels])

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 4096), (8192, 256))]
    args.append(jax.ShapeDtypeStruct((8192,), jnp.int32))
    plan = jaxmem.plan(loss, *args, target=target, budget="100%", compilations=1)
    scattered = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    assert plan.compiled_bytes < scattered.device - 100 * 2**20
    assert plan.compiled_bytes == pytest.approx(plan.projected_bytes, rel=0.03)


@pytest.mark.slow
def test_under_transformations():
    x, y = data()

    def loss(x):
        return jnp.sum(jnp.sin(x)[rows_of(x), y] ** 3)

    def of_traced_rows(x):
        rows = rows_of(x)  # the planned function closes over them
        return jax.grad(jaxmem.remat(lambda x: jnp.sum(jnp.sin(x)[rows, y] ** 3)))(x)

    gradient = jax.grad(loss)(x)
    chex.assert_trees_all_close(jax.jit(of_traced_rows)(x), gradient, rtol=1e-12)
    mapped = jax.vmap(jax.grad(jaxmem.remat(loss)))(jnp.stack([x, x]))
    chex.assert_trees_all_close(mapped, jnp.stack([gradient, gradient]), rtol=1e-12)
    chex.assert_trees_all_close(
        jax.hessian(jaxmem.remat(loss))(x), jax.hessian(loss)(x), rtol=1e-12
    )


IMAGES = {
    "twice as large": lambda x: jax.image.resize(x, (2, 8, 12, 3), "nearest"),
    "three times": lambda x: jax.image.resize(x, (2, 12, 18, 3), "nearest"),
    "one axis": lambda x: jax.image.resize(x, (2, 8, 6, 3), "nearest"),
    "channels": lambda x: jax.image.resize(x, (2, 4, 6, 9), "nearest"),
    "by numbers": lambda x: x[:, np.arange(8) // 2],
    "by numbers, further back": lambda x: x[:, :, np.arange(12) // 2],
}
OTHER_IMAGES = {
    "smaller": lambda x: jax.image.resize(x, (2, 2, 3, 3), "nearest"),
    "by one and a half": lambda x: jax.image.resize(x, (2, 6, 9, 3), "nearest"),
    "tiled": lambda x: x[:, np.arange(8) % 4],
    "linear": lambda x: jax.image.resize(x, (2, 8, 12, 3), "linear"),
    "backwards": lambda x: x[:, np.arange(8)[::-1] // 2],
}


@pytest.mark.parametrize(
    "name", slow_but(["by numbers", "one axis", "tiled"], [*IMAGES, *OTHER_IMAGES])
)
def test_images_that_are_made_larger(name):
    resize = IMAGES.get(name) or OTHER_IMAGES[name]
    x = jax.random.normal(jax.random.key(0), (2, 4, 6, 3))

    def loss(x):
        return jnp.sum(jnp.sin(resize(jnp.cos(x))) ** 2)

    found = jax.jit(jax.value_and_grad(jaxmem.remat(loss)))(x)
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(x), rtol=1e-12)
    flat = jaxprs.flatten(resize, [x], merge=True)
    gathers = [step for step in flat.steps if step.primitive == "gather"]
    assert not gathers if name in IMAGES else gathers or name == "linear"


def test_lines_are_those_of_the_gather():
    flat = jaxprs.flatten(
        lambda x: jax.image.resize(x, (4, 4), "nearest"), [jnp.ones((2, 2))], merge=True
    )
    assert all(step.line.startswith("test_known_gathers.py:") for step in flat.steps)


@pytest.mark.slow
def test_decoders_of_images_have_no_scatter():
    """Each level twice as large, as in the decoders of diffusion models."""

    def loss(kernels, x):
        for number, kernel in enumerate(kernels):
            x = jax.nn.silu(
                jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
            if number < 2:
                batch, height, width, channels = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
        return jnp.mean(x**2)

    kernels = [(3, 3, 128, 128), (3, 3, 128, 64), (3, 3, 64, 32)]
    args = (
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in kernels],
        jax.ShapeDtypeStruct((16, 32, 32, 128), jnp.float32),
    )
    plan = jaxmem.plan(loss, *args, target="h100", budget="100%", compilations=1)
    # (An array of the last level that is repeated is projected, and is not there.)
    assert 0.8 < plan.compiled_bytes / plan.projected_bytes < 1.05
    plain = jaxmem.memory(
        jax.value_and_grad(loss), *args, target="h100", compiler_options=plan.compiler_options
    )
    assert plan.compiled_bytes < 0.8 * plain.device  # 194 of 266 MiB
    assert plan.changes and jaxmem.Plan.from_json(plan.to_json()).changes
