"""`fit` of Llama-like models on several H100, which nobody has here.

Decoders of the sizes of Llama 3 (8 and 70 billion parameters, `examples/llama`) in plain JAX: a
scan over the layers, `jax.nn.dot_product_attention`, the loss in float32, parameters in float32 and
layers in bfloat16, AdamW. For each the step that `fit` chooses within the GPUs' memory, with plain
attention and where `jaxmem.ops` may take its place: what is projected beside what compiles, and
what it recomputes, in predicted time and as a share of the step's FLOPs.
"""

import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import jaxmem
from benchmarks._models import example
from benchmarks._record import record

MODELS = example("llama")
# Name: model, devices, sequences, tokens of each.
CASES = {
    "8B on 8, 8 x 4,096": (MODELS.SIZES["8b"], 8, 8, 4096),
    "8B on 8, 8 x 8,192": (MODELS.SIZES["8b"], 8, 8, 8192),
    "70B on 64, 64 x 8,192": (MODELS.SIZES["70b"], 64, 64, 8192),
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
