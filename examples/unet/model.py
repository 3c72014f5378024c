"""A U-Net (Ronneberger et al. 2015) with group norm; sides of images are multiples of 2^depth.

Its skips cross the whole network: what the first level makes is needed again by the last, which is
what makes it hard to recompute.
"""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
import optax


class Double(nn.Module):
    """Two 3x3 convolutions, each with group norm and relu."""

    features: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        return x


class UNet(nn.Module):
    """One logit for each pixel. ``features`` are those of the first level; each next has twice."""

    features: int = 64
    depth: int = 4
    block: Callable[..., nn.Module] = Double

    @nn.compact
    def __call__(self, x):
        skips = []
        for level in range(self.depth):
            x = self.block(self.features << level)(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = self.block(self.features << self.depth)(x)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.features << level, (2, 2), (2, 2))(x)
            x = self.block(self.features << level)(jnp.concatenate([skips[level], x], -1))
        return nn.Conv(1, (1, 1))(x)[..., 0]


def make_loss(net: UNet):
    """The loss of a batch of ``image [n, h, w, c]`` and ``mask [n, h, w]``, and how much of the
    union of mask and prediction they share."""

    def loss_fn(params, batch):
        logits = net.apply({"params": params}, batch["image"])
        mask = batch["mask"].astype(logits.dtype)
        loss = optax.sigmoid_binary_cross_entropy(logits, mask).mean(dtype=jnp.float32)
        found = (logits > 0).astype(jnp.float32)
        intersection, union = (found * mask).sum(), jnp.maximum(found, mask).sum()
        return loss, {"overlap": intersection / jnp.maximum(union, 1)}

    return loss_fn
