"""Networks that the benchmarks plan: those of the examples, and others as their authors describe
them, in plain Flax.

Stride-2 convolutions pad symmetrically, as everywhere but in Flax's "SAME": cuDNN has no other
padding, and XLA would copy each input into a padded one.
"""

import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

GIB = 2**30
ROOT = pathlib.Path(__file__).parents[1]


@functools.cache
def example(name: str, file: str = "model"):
    """A file of an example as a module; its neighbours are importable, as for a script."""
    path = ROOT / "examples" / name / f"{file}.py"
    sys.path.insert(0, str(path.parent))
    return _module(f"{name}_{file}", path)


@functools.cache
def of_tests(name: str):
    """A file of the tests as a module: some have programs that are measured too."""
    sys.path.append(str(ROOT / "tests"))  # they read one another
    try:
        return _module(name, ROOT / "tests" / f"{name}.py")
    finally:
        sys.path.pop()


def _module(name: str, path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def classifier(net: nn.Module, batch: int, side: int, classes: int = 1000):
    """The loss of a classifier of images as a function of (params, state, batch), and abstract
    arguments for it; it returns (loss, new state)."""

    def loss(params, state, batch):
        variables = {"params": params, **state}
        logits, new = net.apply(variables, batch["image"], mutable=list(state))
        labels = jax.nn.one_hot(batch["label"], classes)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1)), new

    image = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)
    state = jax.eval_shape(lambda x: net.init(jax.random.key(0), x), image)
    params = state.pop("params")
    return loss, (params, state, {"image": image, "label": label})


def resnet50(batch: int, **changes):
    """The example's ResNet50, as `classifier`."""
    model = example("resnet50")
    net = model.ResNet(**changes)
    loss_fn = model.make_loss(net)

    def loss(params, state, batch):
        value, new, _ = loss_fn(params, batch, model_state=state)
        return value, new

    image = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)
    variables = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), image)
    given = {"image": image, "label": label}
    return loss, (variables["params"], variables["batch_stats"], given)


def unet(batch: int, side: int, **changes):
    """The example's U-Net, as `classifier`; it has no state."""
    model = example("unet")
    net = model.UNet(**changes)
    image = jax.ShapeDtypeStruct((batch, side, side, 1), jnp.float32)
    params = jax.eval_shape(lambda x: net.init(jax.random.key(0), x), image)["params"]
    mask = jax.ShapeDtypeStruct((batch, side, side), jnp.float32)
    return model.make_loss(net), (params, {"image": image, "mask": mask})


class _Convolution(nn.Module):
    """Convolution, batch normalisation, activation."""

    features: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    activation: Callable = nn.relu
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        half = self.kernel // 2
        x = nn.Conv(
            self.features,
            (self.kernel, self.kernel),
            self.stride,
            [(half, half)] * 2,
            feature_group_count=self.groups,
            use_bias=False,
            dtype=self.dtype,
        )(x)
        return self.activation(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))


class DenseLayer(nn.Module):
    growth: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for features, kernel in ((4 * self.growth, 1), (self.growth, 3)):
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            half = kernel // 2
            x = nn.Conv(
                features, (kernel, kernel), 1, [(half, half)] * 2, use_bias=False, dtype=self.dtype
            )(x)
        return x


class DenseNet(nn.Module):
    """DenseNet-121: Huang et al. 2017."""

    depths: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    classes: int = 1000
    block: Callable[..., nn.Module] = DenseLayer
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = _Convolution(2 * self.growth, 7, 2, dtype=self.dtype)(x)
        x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1)] * 2)
        for stage, depth in enumerate(self.depths):
            for _ in range(depth):
                x = jnp.concatenate([x, self.block(self.growth, dtype=self.dtype)(x)], -1)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            if stage < len(self.depths) - 1:
                x = nn.Conv(x.shape[-1] // 2, (1, 1), use_bias=False, dtype=self.dtype)(x)
                x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.classes)(x.mean((1, 2)).astype(jnp.float32))


class Inverted(nn.Module):
    """Mobile inverted bottleneck with squeeze and excitation."""

    features: int
    expand: int
    kernel: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        inside, wide = x.shape[-1], x.shape[-1] * self.expand
        y = x
        if self.expand > 1:
            y = _Convolution(wide, 1, activation=nn.swish, dtype=self.dtype)(y)
        y = _Convolution(wide, self.kernel, self.stride, wide, nn.swish, self.dtype)(y)
        gate = y.mean((1, 2), keepdims=True)
        gate = nn.swish(nn.Dense(max(inside // 4, 1), dtype=self.dtype)(gate))
        y = y * nn.sigmoid(nn.Dense(wide, dtype=self.dtype)(gate))
        y = _Convolution(self.features, 1, activation=lambda y: y, dtype=self.dtype)(y)
        return x + y if self.stride == 1 and inside == self.features else y


class EfficientNet(nn.Module):
    """EfficientNet-B0: Tan and Le 2019 (without stochastic depth)."""

    classes: int = 1000
    block: Callable[..., nn.Module] = Inverted
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = _Convolution(32, 3, 2, activation=nn.swish, dtype=self.dtype)(x)
        for expand, features, depth, stride, kernel in (
            (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
            (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
        ):  # fmt: skip
            for index in range(depth):
                step = 1 if index else stride
                x = self.block(features, expand, kernel, step, dtype=self.dtype)(x)
        x = _Convolution(1280, 1, activation=nn.swish, dtype=self.dtype)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)).astype(jnp.float32))


class Encoder(nn.Module):
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class ViT(nn.Module):
    """ViT-B/16: Dosovitskiy et al. 2021 (without dropout)."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    patch: int = 16
    classes: int = 1000
    block: Callable[..., nn.Module] = Encoder
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        side = (self.patch, self.patch)
        x = nn.Conv(self.width, side, side, "VALID", dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(first, (len(x), 1, 1)).astype(x.dtype), x], 1)
        place = self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        x = x + place.astype(x.dtype)
        for _ in range(self.depth):
            x = self.block(self.heads, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.classes)(x[:, 0].astype(jnp.float32))
