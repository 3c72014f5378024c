"""A GPT of about 65 billion parameters on one 24 GB GPU: parameters and AdamW on the host."""

import time

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._gpt import GPT
from benchmarks._record import record

CONTEXT = 2048
OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}


def compile_step(depth: int, target: str, options: dict | None = None):
    gpt = GPT(width=8192, depth=depth, heads=64, context=CONTEXT)
    choices = {"optimizer": optax.adamw(1e-4), "precision": "bf16"}
    stacks = {
        "embed": jaxmem.layers(gpt.embed, **choices),
        "blocks": jaxmem.layers(gpt.block, inputs="offload", **choices),
        "head": jaxmem.layers(gpt.loss, **choices),
    }

    def init(key):
        keys = {"embed": (gpt.embedding, 1), "blocks": (gpt.layer, depth), "head": (gpt.head, 1)}
        return {
            name: stacks[name].init(make, jax.random.split(key, count))
            for name, (make, count) in keys.items()
        }

    def loss_fn(_, state, tokens):
        x = stacks["embed"](state["embed"], tokens[:, :-1])
        x = stacks["blocks"](state["blocks"], x)
        return stacks["head"](state["head"], (x, tokens[:, 1:]))

    def step(state, tokens):
        loss, _, state = jaxmem.value_and_update(loss_fn)((), state, tokens)
        return state, loss

    state = jaxmem.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, CONTEXT + 1), jnp.int32)
    step = jax.jit(step, donate_argnums=0)
    report = jaxmem.memory(step, state, tokens, target=target, compiler_options=options)
    return gpt, report


def main():
    rows = []
    for depth, options in [(20, None), (40, None), (80, None), (160, None), (80, OVERLAP)]:
        began = time.perf_counter()
        gpt, report = compile_step(depth, "rtx-4090", options)
        transfers = report.transfers
        rows.append(
            {
                "layers": depth,
                "parameters": f"{gpt.parameters() / 1e9:.1f} billion",
                "scheduler": "latency hiding" if options else "default",
                "device": jaxmem.format_bytes(report.device),
                "host": jaxmem.format_bytes(report.host),
                "host aliased": jaxmem.format_bytes(report.on_host.alias),
                "transfers with work beside them": f"{transfers.overlapped} of {transfers.count}",
                "seconds to trace and compile": round(time.perf_counter() - began),
            }
        )
    record("A GPT of width 8192, batch 1 x 2048, AdamW, all state on the host: rtx-4090", rows)


if __name__ == "__main__":
    main()
