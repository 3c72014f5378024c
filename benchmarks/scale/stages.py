"""What `fit` projects for ZeRO's stages, beside what compiles.

A Llama-like decoder of 8 layers (`examples/llama`) on eight H100, as a scan and unrolled,
spread over all of them or over four with two copies (hybrid): bytes of each device for the step
without recomputation and for a plan within half of its bytes, whole and in two slices.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import jaxmem
from benchmarks._models import example
from benchmarks._record import record
from jaxmem.fitting import Levers, LeverSearch, Workload

LLAMA = example("llama")
MODEL = LLAMA.Llama(layers=8, width=1024, heads=8, keys=8, hidden=4096, words=8192)
MESHES = {
    "8": AbstractMesh((8,), ("data",)),
    "2 x 4": AbstractMesh((2, 4), ("replica", "data")),
}


def unrolled(params, tokens):
    x = params["embedding"].astype(jnp.bfloat16)[tokens]
    for layer in params["blocks"]:
        x, _ = MODEL.block(x, layer)
    x = LLAMA.normalized(x, params["after"])
    logits = (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def programs():
    params = MODEL.params()
    apart = [
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["blocks"]
        )
    ]
    yield "scan", MODEL.loss, params
    yield "unrolled", unrolled, params | {"blocks": MODEL.layers * apart}


def rows(form: str, loss, params):
    tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)
    for name, mesh in MESHES.items():
        workload = Workload(loss, optax.adamw(1e-4), params, tokens, target="h100", mesh=mesh)
        costs = LeverSearch(workload).costs
        for stage in (1, 2, 3):
            for slices in (1, 2):
                levers = Levers(stage=stage, microbatches=slices)
                plain = costs.plain_plan(levers)
                half = costs.plan(levers, (costs.candidate_of(levers, plain).projected or 0) // 2)
                found = {"layers": form, "mesh": name, "stage": stage, "slices": slices}
                for word, plan in (("plain", plain), ("half", half)):
                    found |= compared(word, workload, costs, levers, plan)
                yield found


def compared(word: str, workload: Workload, costs, levers: Levers, plan) -> dict:
    if isinstance(plan, int):
        lowest = f"none: the lowest {jaxmem.format_bytes(plan)}"
        return {f"{word}, projected": lowest, f"{word}, compiled": "", f"{word}, off": ""}
    projected = costs.candidate_of(levers, plan).projected
    step, state = workload.step(levers, plan), workload.state(levers)
    report = jaxmem.memory(step, state, workload.batch, target=workload.target, timeline=False)
    return {
        f"{word}, projected": jaxmem.format_bytes(projected),
        f"{word}, compiled": jaxmem.format_bytes(report.device),
        f"{word}, off": f"{report.device / projected - 1:+.1%}",
    }


def main():
    found = [row for program in programs() for row in rows(*program)]
    record("fit's projections for ZeRO's stages", found, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
