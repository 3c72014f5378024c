"""A GPT in plain functions, for the benchmarks: pre-norm, GELU, learned positions, untied head."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class GPT:
    width: int
    depth: int
    heads: int
    context: int
    vocabulary: int = 50304

    def layer(self, key):
        """The parameters of one layer, in fp32; their matmuls' are of 12 x width^2 numbers."""
        keys = jax.random.split(key, 4)
        width = self.width
        shapes = {"qkv": (width, 3 * width), "out": (width, width)}
        shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        return {"norm1": jnp.ones(width), "norm2": jnp.ones(width)} | {
            name: 0.02 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def embedding(self, key):
        tokens, positions = jax.random.split(key)
        return {
            "tokens": 0.02 * jax.random.normal(tokens, (self.vocabulary, self.width)),
            "positions": 0.02 * jax.random.normal(positions, (self.context, self.width)),
        }

    def head(self, key):
        return {
            "norm": jnp.ones(self.width),
            "out": 0.02 * jax.random.normal(key, (self.width, self.vocabulary)),
        }

    def parameters(self):
        """How many there are."""
        shapes = jax.eval_shape(
            lambda key: (self.embedding(key), self.layer(key), self.head(key)), jax.random.key(0)
        )
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in shapes]
        return sizes[0] + self.depth * sizes[1] + sizes[2]

    def embed(self, params, tokens):
        return params["tokens"][tokens] + params["positions"][: tokens.shape[-1]]

    def block(self, params, x):
        batch, length, width = x.shape
        qkv = _norm(x, params["norm1"]) @ params["qkv"]
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, self.heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(batch, length, width) @ params["out"]
        return x + jax.nn.gelu(_norm(x, params["norm2"]) @ params["up"]) @ params["down"]

    def loss(self, params, x_and_labels):
        x, labels = x_and_labels
        logits = (_norm(x, params["norm"]) @ params["out"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(
        x.dtype
    ) * scale
