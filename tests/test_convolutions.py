"""Copies of what transposed and dilated convolutions read, on GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem
from jaxmem.program.convolutions import NO_COPIES, ConvolutionCopies, copies_of

NUMBERS = ("NHWC", "HWIO", "NHWC")


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def transposed(stride, padding="SAME", **options):
    return lambda x, w: lax.conv_transpose(x, w, (stride, stride), padding, **options)


def dilated(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=NUMBERS
    )


# A convolution, the length of its window, features of its operand and of its result.
CASES = {
    "a window of 4": (transposed(2), 4, 64, 128),
    "few features": (transposed(2), 4, 128, 3),
    "a window of 2": (transposed(2), 2, 64, 64),
    "a window of 3": (transposed(2), 3, 64, 64),
    "valid": (transposed(2, "VALID"), 4, 64, 32),
    "a stride of 3": (transposed(3), 5, 32, 32),
    "a kernel that is reversed": (transposed(2, transpose_kernel=True), 4, 64, 64),
    "a stride of 1": (transposed(1), 3, 64, 64),
    "dilated": (dilated, 3, 64, 64),
}


def made(name):
    function, window, features, results = CASES[name]
    x, kernel = shape(32, 32, 32, features), shape(window, window, features, results)
    equations = jax.make_jaxpr(function)(x, kernel).jaxpr.eqns
    (equation,) = (one for one in equations if one.primitive.name == "conv_general_dilated")
    reversed_kernel = any(one.primitive.name == "rev" for one in equations)
    y = jax.eval_shape(function, x, kernel)
    return function, x, kernel, y, copies_of(equation, reversed_kernel)


def size(array):
    return array.size * array.dtype.itemsize


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_alone_has_its_copy_forward(name):
    function, x, kernel, _, copies = made(name)
    report = jaxmem.memory(jax.jit(function), x, kernel, target="h100", timeline=False)
    assert report.temp == pytest.approx(copies.forward * size(x), abs=4 * size(kernel) + 2**16)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_its_kernel_has_those_of_both(name):
    function, x, kernel, y, copies = made(name)

    def gradient(x, kernel, cotangent):
        return jax.vjp(lambda kernel: function(x, kernel), kernel)[1](cotangent)

    report = jaxmem.memory(jax.jit(gradient), x, kernel, y, target="h100", timeline=False)
    copied = copies.operand + copies.turned
    expected = copied * size(x) + copies.result * size(y)
    assert report.temp == pytest.approx(expected, rel=0.05, abs=4 * size(kernel) + 2**16)


def test_others_have_none():
    def convolution(padding):
        def function(x, w):
            return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=NUMBERS)

        equation = jax.make_jaxpr(function)(shape(2, 8, 8, 3), shape(3, 3, 3, 4)).jaxpr.eqns[0]
        return copies_of(equation, False)

    assert convolution("SAME") == convolution("VALID") == NO_COPIES
    # This one takes the place of the operand, if that is computed for it alone.
    assert convolution(((2, 0), (2, 0))) == ConvolutionCopies(uneven=100 / 64)
    empty = jax.make_jaxpr(transposed(2))(shape(2, 0, 8, 3), shape(3, 3, 3, 4))
    assert copies_of(empty.jaxpr.eqns[-1], False) == NO_COPIES


def generator(dtype):
    """DCGAN's, without the last activation."""

    def loss(weights, z):
        x = (z @ weights["z"]).reshape(-1, 4, 4, 256)
        for kernel in weights["layers"]:
            x = transposed(2)(x, kernel)
            x = jax.nn.relu(jax.nn.standardize(x, axis=(0, 1, 2)))
        return jnp.mean(transposed(2)(x, weights["image"]).astype("float32") ** 2)

    sizes = [(256, 128), (128, 128), (128, 64)]
    layers = [shape(4, 4, *one, dtype=dtype) for one in sizes]
    weights = {
        "z": shape(64, 4096, dtype=dtype),
        "layers": layers,
        "image": shape(4, 4, 64, 3, dtype=dtype),
    }
    return loss, (weights, shape(256, 64, dtype=dtype))


def atrous(dtype):
    def loss(weights, x):
        for kernel in weights:
            x = jax.nn.relu(dilated(x, kernel))
        return jnp.mean(x.astype("float32") ** 2)

    return loss, ([shape(3, 3, 64, 64, dtype=dtype)] * 6, shape(32, 64, 64, 64, dtype=dtype))


def decoder(dtype):
    def loss(weights, x):
        for matrix, kernel in weights:
            x = transposed(2)(x @ matrix, kernel)
        return jnp.mean(x.astype("float32") ** 2)

    one = shape(64, 64, dtype=dtype), shape(4, 4, 64, 64, dtype=dtype)
    return loss, ([one] * 3, shape(32, 16, 16, 64, dtype=dtype))


def strided(dtype):
    """Without a copy, where a convolution reads what another one made, it is half of it."""

    def loss(weights, x):
        for kernel in weights:
            x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS)
        return jnp.mean(x.astype("float32") ** 2)

    return loss, ([shape(3, 3, 32, 32, dtype=dtype)] * 3, shape(16, 256, 256, 32, dtype=dtype))


# What they were off by without the copies, as they are and with a plan: 38 and 61 %, 15 and 17 %,
# 94 and 118 %. (Of the decoder, whose matmuls read the cotangents, XLA has one copy more.)
@pytest.mark.parametrize(
    ("network", "off"), [(generator, 0.08), (atrous, 0.08), (decoder, 0.33), (strided, 0.2)]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_networks_are_projected_with_them(network, off, dtype):
    loss, args = network(dtype)
    plan = jaxmem.plan(loss, *args, target="h100", compilations=0)
    for function, projected in ((loss, plan.plain_bytes), (plan.apply(loss), plan.projected_bytes)):
        report = jaxmem.memory(
            jax.value_and_grad(function),
            *args,
            target="h100",
            timeline=False,
            compiler_options=plan.compiler_options,
        )
        assert report.device == pytest.approx(projected, rel=off)


@pytest.mark.parametrize("target", ["h100", "rtx-3090"])
@pytest.mark.parametrize("width", [3, 5])
def test_a_padded_copy_of_what_is_there_waits_for_the_gradient_of_the_kernel(width, target):
    """The batch, say. It was counted for a moment of both passes: 29 % too low."""

    def loss(kernels, x):
        for kernel in kernels:
            x = lax.conv_general_dilated(
                x, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    args = [shape(width, 128, 128)] * 4, shape(32, 8192, 128)
    plan = jaxmem.plan(loss, *args, target=target, compilations=0)
    report = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    assert report.device == pytest.approx(plan.plain_bytes, rel=0.08)


@pytest.mark.parametrize("target", ["h100", "t4"])
def test_a_padded_copy_of_a_tanh_is_beside_it(target):
    """Its derivative reads the result: 40 % too low with the copy in its place."""

    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(
                lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS)
            )
        return jnp.mean(x**2)

    widths = [(16, 32), (32, 64), (64, 128)]
    args = [shape(3, 3, *one) for one in widths], shape(64, 128, 128, 16)
    plan = jaxmem.plan(loss, *args, target=target, compilations=0)
    report = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    assert report.device == pytest.approx(plan.plain_bytes, rel=0.05)


def test_a_convolution_along_no_axis_is_planned():
    """JAX takes it for a matmul."""

    def loss(kernel, x):
        return jnp.mean(lax.conv_general_dilated(x, kernel, (), ()) ** 2)

    kernel, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    plan = jaxmem.plan(loss, kernel, x)
    assert jnp.allclose(jax.grad(plan.apply(loss))(kernel, x), jax.grad(loss)(kernel, x))


@pytest.mark.parametrize("size", [127, 128])
def test_a_strided_convolution_of_images_has_one_copy_of_them(size):
    """Padded or not: of an odd size none was counted, 33 % too low."""

    def loss(kernels, x):
        for kernel in kernels:
            x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=NUMBERS)
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    args = [shape(3, 3, 32, 64), shape(3, 3, 64, 64)], shape(64, size, size, 32)
    plan = jaxmem.plan(loss, *args, target="rtx-3090", compilations=0)
    report = jaxmem.memory(jax.value_and_grad(loss), *args, target="rtx-3090", timeline=False)
    assert report.device == pytest.approx(plan.plain_bytes, rel=0.06)


def folded(x):
    rows, height, width, channels = x.shape
    return x.reshape(rows, height // 2, 2, width // 2, 2, channels)


TARGETS = ["h100", pytest.param("a100-40gb", marks=pytest.mark.slow)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", [jnp.sin, jax.nn.silu, jax.nn.softplus])
def test_nothing_is_written_over_what_a_library_convolves(function, target):
    """Its derivative reads that last: a cotangent was taken to be in its place."""

    def loss(kernel, x):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)
        return jnp.mean(function(y))

    args = shape(3, 3, 64, 64), shape(64, 64, 64, 64)
    plan = jaxmem.plan(loss, *args, budget="4GiB", target=target, compilations=1)
    assert plan.projected_bytes == pytest.approx(plan.compiled_bytes, rel=0.02)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: x[:, ::2, ::2],
        lambda x: folded(x).mean((2, 4)),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    ],
    ids=["slices", "means", "sums of windows"],
)
def test_the_cotangent_of_a_convolution_is_spread_out_in_memory(pool, target):
    """A library reads it, and no kernel that spreads it out: it was projected a quarter of it."""

    def loss(kernels, x):
        for kernel in kernels:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)
            x = pool(jax.nn.relu(x))
        return jnp.mean(x**2)

    args = [shape(5, 5, 3, 32), shape(5, 5, 32, 48), shape(5, 5, 48, 64)], shape(64, 64, 64, 3)
    plan = jaxmem.plan(loss, *args, budget="4GiB", target=target, compilations=1)
    assert plan.projected_bytes == pytest.approx(plan.compiled_bytes, rel=0.05)
