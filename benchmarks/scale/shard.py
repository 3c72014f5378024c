"""FSDP compiled for GPUs that are not there: 16 matrices, and a GPT of 7 billion."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

import jaxmem
from benchmarks._gpt import GPT
from benchmarks._record import record
from benchmarks._steps import unjitted

LAYERS, WIDTH, BATCH = 16, 4096, 1024
CONTEXT = 2048


def train(fsdp, optimizer, loss_fn, params, batch, count):
    """The report of one step of plain optax on parameters that are abstract."""
    params = fsdp.place_params(params)
    state = fsdp.place_state(jaxmem.eval_shape(optimizer.init, params))

    places = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    step = unjitted(loss_fn, optimizer)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, None))
    target = jaxmem.target("h100", count=count)
    batch = fsdp.place_batch(batch)
    return jaxmem.memory(step, params, state, batch, target=target), fsdp.report(params, state)


def matrices(stage: int, gathered: bool):
    fsdp = jaxmem.shard(AbstractMesh((8,), ("data",)), stage=stage)

    def layer(w, x):
        return jnp.tanh(x @ w)

    layer = fsdp.gather(layer) if gathered else layer

    def loss_fn(params, x):
        for w in params:
            x = layer(w, x)
        return jnp.mean(x**2)

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    optimizer = fsdp.optimizer(optax.sgd(1e-3, momentum=0.9))
    return train(fsdp, optimizer, loss_fn, params, x, 8)[0]


def transformer(count: int, shape: tuple, names: tuple):
    fsdp = jaxmem.shard(AbstractMesh(shape, names), scanned="blocks")
    gpt = GPT(width=4096, depth=32, heads=32, context=CONTEXT)
    half = jaxmem.precision("bf16")

    def init(key):
        keys = jax.random.split(key, gpt.depth)
        blocks = jax.vmap(gpt.layer)(keys)
        return {"embed": gpt.embedding(key), "blocks": blocks, "head": gpt.head(key)}

    block, embed, head = map(fsdp.gather, (gpt.block, gpt.embed, gpt.loss))

    def loss_fn(params, tokens):
        params = half.cast_to_compute(params)
        x = embed(params["embed"], tokens[:, :-1])
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["blocks"])
        return head(params["head"], (x, tokens[:, 1:]))

    params = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((count, CONTEXT + 1), jnp.int32)
    report, table = train(fsdp, fsdp.optimizer(optax.adamw(1e-4)), loss_fn, params, tokens, count)
    whole = 12 * gpt.parameters()
    print(
        f"GPT of {gpt.parameters() / 1e9:.2f} billion parameters\n{table}\n{report.collectives}\n"
    )
    return report, whole / (fsdp.count)


def main():
    rows = []
    whole = 2 * 4 * LAYERS * WIDTH**2

    def row(name, report, eighth):
        rows.append(
            {
                "program": name,
                "parameters and state per GPU": jaxmem.format_bytes(report.argument),
                "of an even share": f"{report.argument / eighth:.3f}",
                "device temp": jaxmem.format_bytes(report.temp),
                "device": jaxmem.format_bytes(report.device),
                "collectives per step": str(report.collectives),
            }
        )

    x = BATCH * WIDTH * 4 / 8
    for stage in (1, 2):
        row(f"16 x 64 MiB, stage {stage}", matrices(stage, False), whole * (1 + 1 / 8) / 2 + x)
    row("16 x 64 MiB, stage 3, not gathered again", matrices(3, False), whole / 8 + x)
    row("16 x 64 MiB, stage 3", matrices(3, True), whole / 8 + x)
    meshes = [(8, (8,), ("data",)), (64, (64,), ("data",)), (64, (8, 8), ("replica", "data"))]
    meshes += [(256, (256,), ("data",))]
    for count, shape, names in meshes:
        report, even = transformer(count, shape, names)
        row(f"GPT 7B, bf16, AdamW, {count} x H100, mesh {shape}", report, even)
    record("FSDP, compiled for H100s that are not there: bytes on each", rows)


if __name__ == "__main__":
    main()
