"""`fit` of Llama-like models on several H100, which nobody has here.

Decoders of the sizes of Llama 3 (8 and 70 billion parameters) in plain JAX: a scan over the layers,
`jax.nn.dot_product_attention`, the loss in float32, parameters in float32 and layers in bfloat16,
AdamW. For each the step that `fit` chooses within the GPUs' memory, with plain attention and where
`jaxmem.ops` may take its place: what is projected beside what compiles, and what it recomputes, in
predicted time and as a share of the step's FLOPs.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import jaxmem
from benchmarks._record import record


@dataclasses.dataclass(frozen=True)
class Llama:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    keys: int = 8
    hidden: int = 14336
    words: int = 128256

    def params(self) -> dict:
        head = self.width // self.heads

        def stack(*shape):
            return jax.ShapeDtypeStruct((self.layers, *shape), jnp.float32)

        return {
            "embedding": jax.ShapeDtypeStruct((self.words, self.width), jnp.float32),
            "blocks": {
                "before": stack(self.width),
                "query": stack(self.width, self.heads * head),
                "key": stack(self.width, self.keys * head),
                "value": stack(self.width, self.keys * head),
                "out": stack(self.heads * head, self.width),
                "between": stack(self.width),
                "gate": stack(self.width, self.hidden),
                "up": stack(self.width, self.hidden),
                "down": stack(self.hidden, self.width),
            },
            "after": jax.ShapeDtypeStruct((self.width,), jnp.float32),
            "unembedding": jax.ShapeDtypeStruct((self.width, self.words), jnp.float32),
        }

    def loss(self, params, tokens):
        embedding = params["embedding"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(self.block, embedding[tokens], params["blocks"])
        x = normalized(x, params["after"])
        logits = (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - picked)

    def block(self, x, layer):
        layer = jax.tree.map(lambda leaf: leaf.astype(x.dtype), layer)
        batch, length, _ = x.shape
        y = normalized(x, layer["before"])
        query, key, value = (
            rotated((y @ layer[name]).reshape(batch, length, count, -1), name != "value")
            for name, count in (("query", self.heads), ("key", self.keys), ("value", self.keys))
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.reshape(batch, length, -1) @ layer["out"]
        y = normalized(x, layer["between"])
        return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"], None


def normalized(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rotated(x, turns: bool):
    """Rotary embeddings (Su et al. 2021)."""
    if not turns:
        return x
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


BIG = Llama(layers=80, width=8192, heads=64, hidden=28672)
# Name: model, devices, sequences, tokens of each.
CASES = {
    "8B on 8, 8 x 4,096": (Llama(), 8, 8, 4096),
    "8B on 8, 8 x 8,192": (Llama(), 8, 8, 8192),
    "70B on 64, 64 x 8,192": (BIG, 64, 64, 8192),
}


def row(name: str, allow: str) -> dict:
    model, devices, batch, length = CASES[name]
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    mesh = AbstractMesh((devices,), ("data",))
    start = time.perf_counter()
    found = {"model": name, "allowed": allow}
    given = model.loss, optax.adamw(1e-4), model.params(), tokens
    try:
        step = jaxmem.fit(*given, target="h100", mesh=mesh, allow=(allow,) if allow else ())
    except jaxmem.BudgetError as error:
        return found | {"chosen": str(error).splitlines()[0]}
    fitting, seconds = step.fitting, time.perf_counter() - start
    chosen = fitting.chosen
    predicted = chosen.plan.predicted
    return found | {
        "chosen": f"{chosen.levers}",
        "recomputed": f"{predicted.recompute_share:.1%} of a step",
        "FLOPs": f"{predicted.recompute_flops / (3 * predicted.flops):.1%}",
        "projected": jaxmem.format_bytes(chosen.projected),
        "compiled": jaxmem.format_bytes(chosen.compiled),
        "of the GPU": f"{chosen.compiled / fitting.budget:.0%}",
        "compilations": sum(1 for one in fitting.considered if one.compiled),
        "answer": f"{seconds:.0f} s",
    }


def main():
    rows = [row(name, allow) for name in CASES for allow in ("", "operations")]
    record("fit on several GPUs", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
