"""The programs that a calibration runs: ladders of one kind of kernel, from small to large."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

LAUNCHES = 64  # kernels of the chain that is bound by their launches
# Chosen, here and below: from sizes that launches bound to those that fill a device, each about
# one and a half times the one before, or a power of two.
_SIDES = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_LENGTHS = tuple(2**power for power in range(18, 29))
_BATCHES = (2, 8, 32, 128, 512)
_LAYERS = ((56, 64), (28, 256), (28, 512))  # side of an image, and channels, as in ResNets
_HEAD = 64  # features of one head of attention


@dataclasses.dataclass(frozen=True)
class Probe:
    """A program to run, and the arrays that it takes."""

    name: str
    fun: Callable
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def bytes(self) -> int:
        """Those of its arguments."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.shapes)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Probes of one kind, by rising size; ``whole``: parts of networks, none of which the rates are
    fitted to."""

    name: str
    probes: tuple[Probe, ...]
    whole: bool = False


def empty_probe() -> Probe:
    """A program of one short kernel: its time is that of a call."""
    return Probe("empty", lambda x: x + 1, (_array("float32", 8),))


def launch_probe() -> Probe:
    """A chain of kernels that take no time but their launches. A compiler fuses elementwise
    operations; matmuls it does not."""

    def chain(x, w):
        for _ in range(LAUNCHES):
            x = x @ w
        return x

    return Probe("launches", chain, (_array("float32", 16, 16),) * 2)


def ladders() -> list[Ladder]:
    """What is measured, the kinds that matter most first."""
    exact = jax.lax.Precision.HIGHEST
    return [
        _ladder("matmul float32", _matmul(), "float32", _squares()),
        _ladder("elementwise float32", lambda x: x * 2 + 1, "float32", _vectors()),
        _ladder("matmul bfloat16", _matmul(), "bfloat16", _squares()),
        _ladder("convolution float32", _convolve, "float32", _images()),
        _ladder("layers, gradient", _layers, "float32", _squares(), whole=True),
        _ladder("reduction float32", _row_sums, "float32", _rows()),
        _ladder("matmul float32, highest", _matmul(exact), "float32", _squares()),
        _ladder("convolution block, gradient", _block, "float32", _images(), whole=True),
        _ladder("matmul float16", _matmul(), "float16", _squares()),
        _ladder("attention", _attention, "bfloat16", _sequences(), whole=True),
        _ladder("layer norm", _layer_norm, "float32", _rows(), whole=True),
        _ladder("convolution bfloat16", _convolve, "bfloat16", _images()),
    ]


def _ladder(name: str, fun: Callable, dtype: str, sizes: dict, whole: bool = False) -> Ladder:
    probes = (
        Probe(f"{name}, {size}", fun, tuple(_array(dtype, *shape) for shape in shapes))
        for size, shapes in sizes.items()
    )
    return Ladder(name, tuple(probes), whole)


def _array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _squares() -> dict[str, list]:
    return {f"{side} x {side}": [(side, side)] * 2 for side in _SIDES}


def _vectors() -> dict[str, list]:
    return {f"{length} elements": [(length,)] for length in _LENGTHS}


def _rows() -> dict[str, list]:
    return {f"{length} elements": [(length // 1024, 1024)] for length in _LENGTHS}


def _images() -> dict[str, list]:
    images = [(batch, side, side, count) for batch in _BATCHES for side, count in _LAYERS]
    images.sort(key=lambda image: math.prod(image) * image[-1])
    return {"x".join(map(str, image)): [image, (3, 3, image[-1], image[-1])] for image in images}


def _sequences() -> dict[str, list]:
    sizes = ((heads, length) for length in (256, 512, 1024, 2048, 4096) for heads in (8, 32))
    return {f"{heads} x {length}": [(heads, length, _HEAD)] * 3 for heads, length in sizes}


def _matmul(precision=None) -> Callable:
    return functools.partial(jnp.matmul, precision=precision)


def _convolve(x, kernel):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)


def _row_sums(x):
    return jnp.sum(x, axis=1)


def _layer_norm(x):
    centred = x - jnp.mean(x, axis=1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True) + 1e-5)


def _attention(query, key, value):
    scores = jnp.einsum("hqd,hkd->hqk", query, key) * _HEAD**-0.5
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, axis=-1), value)


@jax.grad
def _layers(w, x):
    return jnp.sum(jax.nn.gelu(jax.nn.gelu(x @ w) @ w))


@functools.partial(jax.grad, argnums=(0, 1))
def _block(x, kernel):
    x = _convolve(x, kernel)
    x = x - jnp.mean(x, axis=(0, 1, 2), keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=(0, 1, 2), keepdims=True) + 1e-5)
    return jnp.sum(_convolve(jax.nn.relu(x), kernel) ** 2)
