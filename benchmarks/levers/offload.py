"""Adam's state on the host: 16 matrices of 64 MiB in fp32, batch 1024, compiled for an H200."""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._record import record

LAYERS, WIDTH, BATCH = 16, 4096, 1024
OPTIMIZERS = {
    "optax.adam": optax.adam(1e-3),
    "jaxmem.offload(optax.adam)": jaxmem.offload(optax.adam(1e-3)),
    "jaxmem.offload(clip_by_global_norm + adam)": jaxmem.offload(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    ),
    "jaxmem.accumulate(optax.adam, 4)": jaxmem.accumulate(optax.adam(1e-3), 4),
    "jaxmem.accumulate(jaxmem.offload(optax.adam), 4)": jaxmem.accumulate(
        jaxmem.offload(optax.adam(1e-3)), 4
    ),
}


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def main():
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    rows = []
    for name, optimizer in OPTIMIZERS.items():
        step = jaxmem.train_step(loss_fn, optimizer)
        report = step.memory(jaxmem.eval_shape(step.init, params), batch, target="h200")
        rows.append(
            {
                "optimizer": name,
                "device": jaxmem.format_bytes(report.device),
                "device temp": jaxmem.format_bytes(report.temp),
                "host": jaxmem.format_bytes(report.host),
                "host aliased": jaxmem.format_bytes(report.on_host.alias),
            }
        )
    record("Optimizer state in host memory: compiled bytes of the whole step", rows)


if __name__ == "__main__":
    main()
