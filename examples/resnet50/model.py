"""ResNet v1.5 (He et al. 2015, stride in the 3x3 convolution) as torchvision and MegEngine have it.

ResNet50 is ``ResNet(sizes=(3, 4, 6, 3))``. Fewer or narrower blocks make a model that trains on a
CPU in a minute.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax


class Block(nn.Module):
    """A bottleneck block: 1x1, 3x3 and 1x1 convolutions round a shortcut."""

    features: int
    stride: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, not train, momentum=0.9, dtype=self.dtype)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        # The same padding on both sides: 'SAME' would pad one side only when the stride is 2, and
        # cuDNN then needs a padded copy of its input.
        y = nn.relu(norm()(conv(self.features, (3, 3), strides, padding=1)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images ``[batch, height, width, 3]`` to logits ``[batch, classes]`` in float32."""

    sizes: Sequence[int] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    block: Callable[..., nn.Module] = Block
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.width, (7, 7), (2, 2), padding=3, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.sizes):
            for index in range(blocks):
                stride = 2 if stage and not index else 1
                x = self.block(self.width * 2**stage, stride, self.dtype)(x, train)
        x = nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))
        return x.astype(jnp.float32)


def make_loss(model: ResNet) -> Callable:
    """The loss of a training step, as `jaxmem.train_step` calls it."""

    def loss_fn(params, batch, *, model_state):
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, batch["image"], True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        return loss, new["batch_stats"], {"accuracy": accuracy}

    return loss_fn
