"""More networks that no constant of the planner was chosen by, written here as papers describe
them: there is no package for jax with them that is installed beside this one. As in
`_held_out.py`, each is a function of a policy for its repeated blocks."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks._held_out import cross_entropy, shape


def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * (1 + scale)).astype(x.dtype)


def under(policy, block):
    return jax.checkpoint(block, policy=policy) if policy else block


def mamba(policy=None, batch=2, length=512, width=512, states=16, layers=6, words=32_000):
    """Mamba (Gu and Dao 2023), its selective scan as `jax.lax.associative_scan`."""
    inside, rank = 2 * width, width // 16

    def block(params, x):
        y, gate = jnp.split(norm(x, params["norm"]) @ params["in"], 2, -1)
        padded = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
        y = sum(padded[:, at : at + length] * params["conv"][at] for at in range(4))
        y = jax.nn.silu(y)
        dt, b, c = jnp.split(y @ params["select"], [rank, rank + states], -1)
        dt = jax.nn.softplus(dt @ params["dt"])
        decay = jnp.exp(-jnp.exp(params["log"]) * dt[..., None])
        added = (dt * y)[..., None] * b[:, :, None]

        def combine(one, two):
            return one[0] * two[0], two[0] * one[1] + two[1]

        _, state = jax.lax.associative_scan(combine, (decay, added), axis=1)
        y = jnp.einsum("blds,bls->bld", state, c) + y * params["skip"]
        return x + (y * jax.nn.silu(gate)) @ params["out"]

    block = under(policy, block)

    def loss(params, tokens):
        x = params["words"][tokens]
        for layer in params["layers"]:
            x = block(layer, x)
        return cross_entropy(norm(x, params["norm"]) @ params["words"].T, tokens)

    layer = {
        "norm": shape(width), "in": shape(width, 2 * inside), "conv": shape(4, inside),
        "select": shape(inside, rank + 2 * states), "dt": shape(rank, inside),
        "log": shape(inside, states), "skip": shape(inside), "out": shape(inside, width),
    }  # fmt: skip
    params = {"words": shape(words, width), "layers": [layer] * layers, "norm": shape(width)}
    return loss, (params, shape(batch, length, dtype=jnp.int32))


def attention(params, x, heads, groups, soft_cap=0.0):
    batch, length, width = x.shape
    size = width // heads
    q = (x @ params["q"]).reshape(batch, length, heads, size)
    k = (x @ params["k"]).reshape(batch, length, groups, size)
    v = (x @ params["v"]).reshape(batch, length, groups, size)
    q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(one, heads // groups, 2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / size**0.5
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(x.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width) @ params["o"]


def rotated(x):
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def projections(width, groups, heads):
    few = width * groups // heads
    return {"q": (width, width), "k": (width, few), "v": (width, few), "o": (width, width)}


def experts(policy=None, batch=8, length=1024, width=512, layers=8, of=8, best=2, words=32_000):
    """A mixture of experts (Jiang et al. 2024), top 2 of 8 by `jax.lax.ragged_dot`, in a scan."""
    hidden, heads = 4 * width, 8

    def mixture(params, x):
        flat = x.reshape(-1, width)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(flat @ params["router"]), best)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=of)
        rows = flat[order // best]
        gate = jax.lax.ragged_dot(rows, params["gate"], counts)
        up = jax.lax.ragged_dot(rows, params["up"], counts)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], counts)
        out = out * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(flat).at[order // best].add(out).reshape(x.shape)

    def block(params, x):
        x = x + attention(params, norm(x, params["norm1"]), heads, heads)
        return x + mixture(params, norm(x, params["norm2"]))

    block = under(policy, block)

    def loss(params, tokens):
        x = params["words"][tokens]
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
        return cross_entropy(x @ params["words"].T, tokens)

    shapes = projections(width, heads, heads) | {
        "norm1": (width,), "norm2": (width,), "router": (width, of), "gate": (of, width, hidden),
        "up": (of, width, hidden), "down": (of, hidden, width),
    }  # fmt: skip
    stacked = {name: shape(layers, *sizes) for name, sizes in shapes.items()}
    params = {"words": shape(words, width), "layers": stacked}
    return loss, (params, shape(batch, length, dtype=jnp.int32))


def gemma(policy=None, batch=4, length=1024, width=1024, layers=12, heads=8, words=32_000):
    """Gemma 2 (2024) in bfloat16: one group of keys and values, GeGLU, capped scores and logits, a
    scan over blocks under `jax.checkpoint`."""
    hidden = 4 * width

    def block(params, x):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        y = attention(params, norm(x, params["norm1"]), heads, 1, 50.0)
        x = x + norm(y, params["norm2"])
        y = norm(x, params["norm3"])
        y = (jax.nn.gelu(y @ params["gate"]) * (y @ params["up"])) @ params["down"]
        return x + norm(y, params["norm4"])

    block = under(policy, block)

    def loss(params, tokens):
        words = params["words"].astype(jnp.bfloat16)
        x = words[tokens] * width**0.5
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
        logits = (norm(x, params["norm"].astype(jnp.bfloat16)) @ words.T).astype(jnp.float32)
        return cross_entropy(30 * jnp.tanh(logits / 30), tokens)

    shapes = projections(width, 1, heads) | {f"norm{at}": (width,) for at in (1, 2, 3, 4)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    stacked = {name: shape(layers, *sizes) for name, sizes in shapes.items()}
    params = {"words": shape(words, width), "norm": shape(width), "layers": stacked}
    return loss, (params, shape(batch, length, dtype=jnp.int32))


class Residual(nn.Module):
    """Group norm, swish and convolution, twice, with the time of the noise in between."""

    features: int
    attends: bool = False

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm()(x)))
        y = y + nn.Dense(self.features)(nn.swish(time))[:, None, None]
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm()(y)))
        x = y + (x if x.shape[-1] == self.features else nn.Conv(self.features, (1, 1))(x))
        if self.attends:
            flat = nn.GroupNorm()(x).reshape(len(x), -1, self.features)
            x = x + nn.MultiHeadDotProductAttention(4)(flat, flat).reshape(x.shape)
        return x


class Denoiser(nn.Module):
    """The U-Net of diffusion models (Ho et al. 2020)."""

    block: type = Residual
    width: int = 128
    times: tuple[int, ...] = (1, 2, 2, 2)
    depth: int = 2

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * 1e4 ** (-jnp.arange(self.width // 2) / (self.width // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.Dense(4 * self.width)(nn.swish(nn.Dense(4 * self.width)(time)))
        x = nn.Conv(self.width, (3, 3))(x)
        kept = [x]
        for level, times in enumerate(self.times):
            for _ in range(self.depth):
                x = self.block(times * self.width, level >= 2)(x, time)
                kept.append(x)
            if level < len(self.times) - 1:
                x = nn.Conv(x.shape[-1], (3, 3), (2, 2), [(1, 1)] * 2)(x)
                kept.append(x)
        x = self.block(x.shape[-1], True)(x, time)
        for level, times in reversed(list(enumerate(self.times))):
            for _ in range(self.depth + 1):
                x = self.block(times * self.width, level >= 2)(
                    jnp.concatenate([x, kept.pop()], -1), time
                )
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
                x = nn.Conv(x.shape[-1], (3, 3))(x)
        return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm()(x)))


def diffusion(policy=None, batch=32, side=64):
    """A denoising U-Net with attention at its two lower resolutions, in Flax."""
    net = Denoiser(nn.remat(Residual, policy=policy) if policy else Residual)
    images, time = shape(batch, side, side, 3), shape(batch)
    params = jax.eval_shape(net.init, jax.random.key(0), images, time)

    def loss(params, images, time, noise):
        mixed = images * (1 - time[:, None, None, None]) + noise * time[:, None, None, None]
        return jnp.mean((net.apply(params, mixed, 1000 * time) - noise) ** 2)

    return loss, (params, images, time, images)


NETWORKS = {
    "Mamba (plain JAX)": mamba,
    "mixture of experts in a scan (plain JAX)": experts,
    "Gemma-like, scan over regions (plain JAX)": gemma,
    "diffusion U-Net (plain Flax)": diffusion,
}
