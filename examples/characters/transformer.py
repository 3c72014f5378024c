"""A small causal transformer over characters (Radford et al. 2019: norms first), in Flax nnx."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """Attention and a feed-forward network, each added to what it reads."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).reshape(batch, length, 3, self.heads, -1)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // self.heads) ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """Characters ``[batch, length]`` to logits ``[batch, length, characters]``."""

    def __init__(self, characters: int, length: int, rngs: nnx.Rngs, *, width=64, depth=2, heads=4):
        self.characters = nnx.Embed(characters, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, characters, rngs=rngs)

    def __call__(self, text):
        x = self.characters(text) + self.positions(jnp.arange(text.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def loss_fn(model, batch):
    """The mean over characters of -log p(next character), in nats; as `jaxmem.train_step` calls
    it."""
    logits = model(batch["text"][:, :-1])
    labels = batch["text"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
