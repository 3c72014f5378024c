"""A decoder like Llama 3 in plain JAX: grouped attention, rotary embeddings, RMS norms, SwiGLU.

Layers are stacked, and a scan goes over them. Parameters are float32, layers compute in bfloat16,
the loss in float32. Nothing here knows of devices or of memory.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Llama:
    """``keys`` heads of keys and values serve ``heads`` heads of queries."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    keys: int = 8
    hidden: int = 14336
    words: int = 128256

    def shapes(self) -> dict:
        """Of the parameters, by name."""
        head = self.width // self.heads
        blocks = {
            "before": (self.width,),
            "query": (self.width, self.heads * head),
            "key": (self.width, self.keys * head),
            "value": (self.width, self.keys * head),
            "out": (self.heads * head, self.width),
            "between": (self.width,),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        return {
            "embedding": (self.words, self.width),
            "blocks": {name: (self.layers, *shape) for name, shape in blocks.items()},
            "after": (self.width,),
            "unembedding": (self.width, self.words),
        }

    def params(self) -> dict:
        """Abstract parameters: enough to plan with."""
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            self.shapes(),
            is_leaf=lambda shape: isinstance(shape, tuple),
        )

    def init(self, key: jax.Array) -> dict:
        """Parameters to train from: norms of one, matrices of variance 1 / rows."""
        shapes, tree = jax.tree.flatten(self.params())
        keys = jax.random.split(key, len(shapes))

        def made(path, shape, key):
            if any(name in str(path) for name in ("before", "between", "after")):
                return jnp.ones(shape.shape, shape.dtype)
            return jax.random.normal(key, shape.shape, shape.dtype) * shape.shape[-2] ** -0.5

        paths = [path for path, _ in jax.tree.leaves_with_path(self.params())]
        return jax.tree.unflatten(tree, map(made, paths, shapes, keys))

    def loss(self, params: dict, tokens: jax.Array) -> jax.Array:
        """The mean cross-entropy of each token (``int32 [batch, length]``) after those before."""
        embedding = params["embedding"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(self.block, embedding[tokens], params["blocks"])
        x = normalized(x, params["after"])
        logits = (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - picked)

    def block(self, x, layer):
        """One layer: attention, then the gated network."""
        layer = jax.tree.map(lambda leaf: leaf.astype(x.dtype), layer)
        batch, length, _ = x.shape
        y = normalized(x, layer["before"])
        query, key, value = (
            rotated(self.times(y, layer, name).reshape(batch, length, count, -1), name != "value")
            for name, count in (("query", self.heads), ("key", self.keys), ("value", self.keys))
        )
        mixed = self.mixed(query, key, value)
        x = x + self.times(mixed.reshape(batch, length, -1), layer, "out")
        y = normalized(x, layer["between"])
        return x + self.network(y, layer), None

    def network(self, y, layer):
        """The gated network of a layer."""
        hidden = jax.nn.silu(self.times(y, layer, "gate")) * self.times(y, layer, "up")
        return self.times(hidden, layer, "down")

    def times(self, x, layer, name):
        """A matmul of a layer; who gives its result a name for policies has their own."""
        return x @ layer[name]

    def mixed(self, query, key, value):
        """What attention makes of them; who spreads sequences over devices has their own."""
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def normalized(x, scale):
    """RMS norm (Zhang and Sennrich 2019), its mean in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rotated(x, rotates: bool):
    """Rotary embeddings (Su et al. 2021)."""
    if not rotates:
        return x
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


SIZES = {
    "tiny": Llama(layers=4, width=64, heads=4, keys=2, hidden=256, words=256),
    "1b": Llama(layers=16, width=2048, heads=32, hidden=8192),
    "8b": Llama(),
    "70b": Llama(layers=80, width=8192, heads=64, hidden=28672),
}
