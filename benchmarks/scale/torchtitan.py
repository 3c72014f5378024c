"""The published table of torchtitan, and what `fit` chooses for the same model within its bytes.

Llama 3.1 on H100 (github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md;
GiB a GPU as its allocator reserved them): the same sizes, sequence, batch and sharding, in plain
JAX (`examples/llama`), parameters and AdamW in float32, layers in bfloat16, with `jaxmem.ops` in
the place of attention and cross-entropy. The budget is what torchtitan took. Their rows with float8
are compiled in bfloat16 here, which takes no fewer bytes. Theirs with context parallelism pass keys
around a ring; here heads and sequence change places (all-to-all). Recomputed is in FLOPs of a
step's matmuls: of theirs a whole forward pass of the layers, or every second matmul of it
(selective: key, out and up of seven); of ours the logits too, which `jaxmem.ops` makes again.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec as P

import jaxmem
from benchmarks._models import example
from benchmarks._record import record_parts

LLAMA = example("llama")
EIGHT, SEVENTY = LLAMA.SIZES["8b"], LLAMA.SIZES["70b"]
H100 = dataclasses.replace(
    jaxmem.target("h100"), name="h100-96gb", memory_bytes=96 * 10**9, memory_bandwidth=2.4e12
)
# Of a layer the axis of its stacked parameters that tensor parallelism cuts.
CUT = {"query": 2, "key": 2, "value": 2, "gate": 2, "up": 2, "out": 1, "down": 1}


@dataclasses.dataclass(frozen=True)
class Spread(LLAMA.Llama):
    """The same model, told how the residual stream lies: its sequence along ``along``."""

    along: str = "model"

    def block(self, x, layer):
        x = jax.lax.with_sharding_constraint(x, P("data", self.along, None))
        return super().block(x, layer)


@dataclasses.dataclass(frozen=True)
class Context(Spread):
    """The sequence in pieces; in attention each device has all of it, of some heads."""

    along: str = "context"

    def mixed(self, query, key, value):
        heads, rows = P("data", None, self.along, None), P("data", self.along, None, None)
        query, key, value = (
            jax.lax.with_sharding_constraint(one, heads) for one in (query, key, value)
        )
        mixed = jaxmem.ops.attention(query, key, value, is_causal=True)
        return jax.lax.with_sharding_constraint(mixed, rows)


def tensor_parallel(path: str, leaf):
    return next((axis for name, axis in CUT.items() if f"'{name}'" in path), None)


def sequences(path: str, leaf):
    return 1 if path.startswith("batch") else None


@dataclasses.dataclass(frozen=True)
class Case:
    """Theirs: GiB of each GPU, tokens per second of each, and what was recomputed."""

    gib: float
    tokens: int
    model: LLAMA.Llama
    mesh: dict
    sequences: int
    length: int = 8192
    full: bool = False
    split: dict | None = None


def _data(count: int) -> dict:
    return {"data": count}


def _long(data: int, context: int, tokens: int, gib: float) -> Case:
    model = Context(**dataclasses.asdict(EIGHT)) if context > 1 else EIGHT
    split = {"context": sequences} if context > 1 else None
    mesh = {"data": data, "context": context} if context > 1 else _data(data)
    return Case(gib, tokens, model, mesh, data, 32768 * context, True, split)


def _seventy(gib: float, tokens: int) -> Case:
    model, split = Spread(**dataclasses.asdict(SEVENTY)), {"model": tensor_parallel}
    return Case(gib, tokens, model, {"data": 32, "model": 8}, 512, 8192, True, split)


CASES = {
    "8B, 8 GPUs, FSDP": Case(82.4, 5762, EIGHT, _data(8), 16),
    "8B, 8 GPUs, FSDP, torch.compile": Case(77.0, 6667, EIGHT, _data(8), 16),
    "8B, 8 GPUs, within 62 GiB": Case(62.0, 6667, EIGHT, _data(8), 16),
    "8B, 128 GPUs, FSDP": Case(67.0, 5605, EIGHT, _data(128), 256),
    "8B, 128 GPUs, FSDP, torch.compile": Case(62.0, 6514, EIGHT, _data(128), 256),
    "8B, 8 GPUs, FSDP 8, 32,768 tokens": _long(8, 1, 3890, 83.9),
    "8B, 8 GPUs, FSDP 4 x CP 2, 65,536 tokens": _long(4, 2, 2540, 84.2),
    "8B, 8 GPUs, FSDP 2 x CP 4, 131,072 tokens": _long(2, 4, 1071, 84.0),
    "8B, 8 GPUs, CP 8, 262,144 tokens": _long(1, 8, 548, 84.5),
    "70B, 256 GPUs, FSDP 32 x TP 8": _seventy(71.9, 829),
    "70B, 256 GPUs, FSDP 32 x TP 8, AsyncTP": _seventy(67.6, 876),
}


def logits(model) -> float:
    """Logits, of the FLOPs of a step's matmuls with weights: `jaxmem.ops` makes them twice."""
    return model.width * model.words / step_of(model)


def step_of(model) -> int:
    return 3 * (model.layers * sum(weights(model).values()) + model.width * model.words)


def weights(model) -> dict[str, int]:
    """Values of the matrices of a layer."""
    head = model.width // model.heads
    return {
        "query": model.width * model.width,
        "key": model.width * model.keys * head,
        "value": model.width * model.keys * head,
        "out": model.width * model.width,
        "gate": model.width * model.hidden,
        "up": model.width * model.hidden,
        "down": model.hidden * model.width,
    }


def recomputed(case: Case) -> float:
    """What torchtitan recomputes, of the FLOPs of a step's matmuls with weights."""
    sizes = weights(case.model)
    again = sizes if case.full else ("key", "out", "up")
    return case.model.layers * sum(sizes[name] for name in again) / step_of(case.model)


def rows(name: str):
    case = CASES[name]
    tokens = jax.ShapeDtypeStruct((case.sequences, case.length), jnp.int32)
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh))
    start = time.perf_counter()
    given = case.model.loss, optax.adamw(1e-4), case.model.params(), tokens
    found = {
        "configuration": name,
        "theirs": f"{case.gib} GiB",
        "theirs, recomputed": f"{recomputed(case):.1%}",
        "theirs, tokens a second and GPU": case.tokens,
    }
    options = {"target": H100, "mesh": mesh, "split": case.split, "budget": f"{case.gib}GiB"}
    step = jaxmem.fit(*given, allow=("operations",), keep=("placement",), **options)
    fitting = step.fitting
    chosen = fitting.chosen
    predicted = chosen.plan.predicted
    again = predicted.recompute_flops / (3 * predicted.flops)
    again += logits(case.model) if chosen.levers.operations else 0
    local = case.sequences * case.length / mesh.size
    yield found | {
        "compiled": jaxmem.format_bytes(chosen.compiled),
        "projected": jaxmem.format_bytes(chosen.projected),
        "off": f"{chosen.compiled / chosen.projected - 1:+.1%}",
        "recomputed": f"{again:.1%}",
        "chosen": chosen.name,
        "predicted tokens a second and GPU": round(local / chosen.seconds),
        "answer": f"{time.perf_counter() - start:.0f} s",
    }


def main():
    record_parts(
        "torchtitan's table", "configuration", list(CASES), rows, __doc__.split("\n\n", 1)[1]
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
