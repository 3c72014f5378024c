"""Convolutions whose gradients are such with examples and features exchanged: of windows that are
longer than what they slide along, or dilated."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from projections import projected_and_compiled


def shape(*lengths, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(lengths, dtype)


def convolve(x, kernel, stride, padding="VALID", apart=1):
    numbers = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC")
    strides, dilation = ((one,) * (x.ndim - 2) for one in (stride, apart))
    return lax.conv_general_dilated(
        x, kernel, strides, padding, rhs_dilation=dilation, dimension_numbers=numbers
    )


def network(*layers):
    def loss(kernels, x):
        for kernel, layer in zip(kernels, layers, strict=True):
            x = jnp.tanh(convolve(x, kernel, *layer))
        return jnp.mean(x**2)

    return loss


SAME, VALID = (1, "SAME"), (1,)
# A network, its kernels and images, with respect to what it is derived, a target.
CAPSULES = network(VALID, (2,)), [shape(9, 9, 1, 256), shape(9, 9, 256, 256)]
PATCHES = network((16,)), [shape(16, 16, 3, 768)]
CASES = {
    "a row is left": (*CAPSULES, shape(128, 28, 28, 1), 0, "h100"),
    "no row is left": (*CAPSULES, shape(128, 29, 29, 1), 0, "h100"),
    "channels first": (*CAPSULES, shape(128, 28, 28, 1), 0, "t4"),
    # The cotangent has 15 zeros between its elements: 8 GiB for a pixel.
    "patches and a pixel": (*PATCHES, shape(64, 225, 225, 3), 0, "h100"),
    "patches": (*PATCHES, shape(64, 224, 224, 3), 0, "h100"),
    "an image of 5": (
        network(SAME, (2,)),
        [shape(3, 3, 512, 512), shape(4, 4, 512, 1024)],
        shape(512, 5, 5, 512),
        (0, 1),
        "h100",
    ),
    "dilated": (
        network((1, "SAME", 2), (1, "SAME", 2), (1, "SAME", 2)),
        [shape(3, 3, 64, 64)] * 3,
        shape(32, 65, 65, 64),
        0,
        "h100",
    ),
    "along one axis": (
        network(SAME, (4,)),
        [shape(9, 128, 128), shape(25, 128, 512)],
        shape(2048, 50, 128),
        (0, 1),
        "h100",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exchanged_convolutions_have_copies(name):
    loss, kernels, images, argnums, target = CASES[name]
    projected, compiled = projected_and_compiled(loss, (kernels, images), target, argnums=argnums)
    assert projected == pytest.approx(compiled, rel=0.04)
