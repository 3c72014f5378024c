"""Optimizer state made small: compiled bytes of whole steps for an H200."""

import jax
import jax.numpy as jnp
import optax
from _gpt import GPT
from _record import record

import jaxmem
from jaxmem.optim import half_params, small_moments

CONTEXT, BATCH = 1024, 4


def compile_step(loss_fn, optimizer, params, batch):
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jaxmem.eval_shape(optimizer.init, params)
    step = jax.jit(step, donate_argnums=(0, 1))
    return jaxmem.memory(step, params, state, batch, target="h200")


def matrices():
    """16 matrices of 64 MiB: what optax has, and what jaxmem.optim adds."""
    adam, count = optax.adam(1e-3), 16 * 4096**2
    cases = {
        "optax.adam": (adam, jnp.float32),
        "optax.adam(mu_dtype=bfloat16)": (optax.adam(1e-3, mu_dtype=jnp.bfloat16), jnp.float32),
        "optax.lion": (optax.lion(1e-3), jnp.float32),
        "optax.sm3": (optax.sm3(1e-3), jnp.float32),
        "optax.adafactor": (optax.adafactor(1e-3), jnp.float32),
        "small_moments(adam), 8bit": (small_moments(adam), jnp.float32),
        "small_moments(adam), bfloat16": (small_moments(adam, "bfloat16"), jnp.float32),
        "small_moments(lion), 8bit": (small_moments(optax.lion(1e-3)), jnp.float32),
        "offload(small_moments(adam))": (jaxmem.offload(small_moments(adam)), jnp.float32),
        "half_params(adam), stochastic": (half_params(adam), jnp.bfloat16),
        "half_params(8bit), stochastic": (half_params(small_moments(adam)), jnp.bfloat16),
        "half_params(8bit), compensated": (
            half_params(small_moments(adam), "compensated"),
            jnp.bfloat16,
        ),
    }

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    for name, (optimizer, dtype) in cases.items():
        params = [jax.ShapeDtypeStruct((4096, 4096), dtype)] * 16
        batch = jax.ShapeDtypeStruct((1024, 4096), dtype)
        report = compile_step(loss_fn, optimizer, params, batch)
        kept = report.argument - batch.size * batch.dtype.itemsize
        yield "16 x 64 MiB", name, report, kept / count


def transformer():
    """A GPT of 1.3 billion parameters, each layer a region."""
    gpt = GPT(width=2048, depth=24, heads=16, context=CONTEXT)
    half = jaxmem.precision("bf16")
    block = jax.checkpoint(gpt.block)

    def loss_fn(params, tokens):
        params = half.cast_to_compute(params)
        x = gpt.embed(params["embed"], tokens[:, :-1])
        for layer in params["blocks"]:
            x = block(layer, x)
        return gpt.loss(params["head"], (x, tokens[:, 1:]))

    def init(key, dtype):
        blocks = [gpt.layer(key)] * gpt.depth
        params = {"embed": gpt.embedding(key), "blocks": blocks, "head": gpt.head(key)}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    adamw = optax.adamw(1e-4)
    all_small = small_moments(adamw, keep=lambda path, leaf: leaf.size < 4096)
    cases = {
        "optax.adamw": (adamw, jnp.float32),
        "jaxmem.offload(adamw)": (jaxmem.offload(adamw), jnp.float32),
        "small_moments, 8bit": (all_small, jnp.float32),
        "half_params(8bit), stochastic": (half_params(all_small), jnp.bfloat16),
        "offload(half_params(8bit))": (jaxmem.offload(half_params(all_small)), jnp.bfloat16),
    }
    for name, (optimizer, dtype) in cases.items():
        params = jax.eval_shape(lambda key, dtype=dtype: init(key, dtype), jax.random.key(0))
        batch = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32)
        report = compile_step(loss_fn, optimizer, params, batch)
        size = f"GPT {gpt.parameters() / 1e9:.2f}B"
        yield size, name, report, report.argument / gpt.parameters()


def main():
    rows = []
    for program, name, report, each in [*matrices(), *transformer()]:
        rows.append(
            {
                "program": program,
                "optimizer": name,
                "parameters and state on the device, bytes a parameter": f"{each:.2f}",
                "device temp": jaxmem.format_bytes(report.temp),
                "device": jaxmem.format_bytes(report.device),
                "host": jaxmem.format_bytes(report.host),
                "host aliased": jaxmem.format_bytes(report.host_alias),
            }
        )
    record("Small optimizer state: compiled bytes of whole steps on an H200", rows)


if __name__ == "__main__":
    main()
