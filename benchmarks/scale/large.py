"""Models that many GPUs are rented for: 70 billion on one node, and a mixture of 8 x 22 billion.

A Llama of 70 billion (`examples/llama`) on eight H100, whose parameters and AdamW's state take more
than all of their memory: state waits on the host. And a mixture of experts of the sizes of Mixtral
8 x 22B (Mistral AI 2024: 56 layers of 6,144, 8 experts of 16,384, two for each token, each expert
taking at most 1.25 times its even share) on 128 H100, each expert on devices of its own. The shape
of the mesh is chosen (`devices=`), `jaxmem.ops` are allowed, and for one row cuDNN's attention.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks._models import example
from benchmarks._record import record_parts

LLAMA = example("llama")


@dataclasses.dataclass(frozen=True)
class Mixture(LLAMA.Llama):
    """The gated network ``experts`` times, of which each token has the two that a router picks."""

    experts: int = 8
    picked: int = 2
    share: float = 1.25

    def shapes(self):
        found = super().shapes()
        for name in ("gate", "up", "down"):
            layers, *shape = found["blocks"][name]
            found["blocks"][name] = (layers, self.experts, *shape)
        found["blocks"]["router"] = (self.layers, self.width, self.experts)
        return found

    def network(self, y, layer):
        """Tokens go to their experts by a matmul with ones and zeros (GShard, Lepikhin et al.
        2020), those over an expert's share past it."""
        batch, length, _ = y.shape
        room = int(self.share * self.picked * length / self.experts)
        shares = jax.nn.softmax((y @ layer["router"]).astype(jnp.float32))
        best, which = jax.lax.top_k(shares, self.picked)
        best = (best / best.sum(-1, keepdims=True)).astype(y.dtype)
        chosen = jax.nn.one_hot(which.reshape(batch, -1), self.experts, dtype=jnp.int32)
        place = (jnp.cumsum(chosen, 1) - 1).reshape(batch, length, self.picked, self.experts)
        chosen = chosen.reshape(place.shape)
        place = jnp.where(chosen == 1, place, room)  # past the end: none
        sent = jax.nn.one_hot(place, room, dtype=y.dtype)  # [batch, length, picked, expert, room]
        back = jnp.einsum("blpec,blp->blec", sent, best)
        taken = jnp.einsum("blec,blw->ebcw", sent.sum(2), y)
        taken = jax.lax.with_sharding_constraint(taken, P("expert", P.UNCONSTRAINED))
        hidden = jax.nn.silu(jnp.einsum("ebcw,ewh->ebch", taken, layer["gate"]))
        hidden *= jnp.einsum("ebcw,ewh->ebch", taken, layer["up"])
        made = jnp.einsum("ebch,ehw->ebcw", hidden, layer["down"])
        return jnp.einsum("blec,ebcw->blw", back, made)


def experts(path: str, leaf):
    return 1 if any(f"'{name}'" in path for name in ("gate", "up", "down")) else None


# Sizes, devices, sequences, tokens of each, axes of the model's own.
CASES = {
    "70B on 8, 8 x 8,192": (LLAMA.SIZES["70b"], 8, 8, 8192, None),
    "70B on 64, 64 x 8,192": (LLAMA.SIZES["70b"], 64, 64, 8192, None),
    "70B on 64, by cuDNN": (LLAMA.SIZES["70b"], 64, 64, 8192, None),
    "8 x 22B on 128, 128 x 4,096": (
        Mixture(layers=56, width=6144, heads=48, keys=8, hidden=16384, words=32768),
        128,
        128,
        4096,
        {"expert": experts},
    ),
}


def rows(name: str):
    model, devices, batch, length, split = CASES[name]
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    start = time.perf_counter()
    given = model.loss, optax.adamw(1e-4), model.params(), tokens
    count = sum(leaf.size for leaf in jax.tree.leaves(model.params()))
    allow = ("operations", "kernels") if "cuDNN" in name else ("operations",)
    options = {"target": "h100", "devices": devices, "split": split, "allow": allow}
    fitting = jaxmem.fit(*given, **options).fitting
    chosen = fitting.chosen
    predicted = chosen.plan.predicted
    yield {
        "model": name,
        "parameters": f"{count / 1e9:.1f} billion",
        "chosen": chosen.name,
        "recomputed": f"{predicted.recompute_share:.1%} of a step",
        "FLOPs": f"{predicted.recompute_flops / (3 * predicted.flops):.1%}",
        "projected": jaxmem.format_bytes(chosen.projected),
        "compiled": jaxmem.format_bytes(chosen.compiled),
        "off": f"{chosen.compiled / chosen.projected - 1:+.1%}",
        "host, each GPU": jaxmem.format_bytes(chosen.report.host),
        "predicted step": f"{chosen.seconds:.1f} s",
        "answer": f"{time.perf_counter() - start:.0f} s",
    }


def main():
    about = __doc__.split("\n\n", 1)[1]
    record_parts("fit where many GPUs are needed", "model", list(CASES), rows, about)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
