"""Optimizer state made small: compiled bytes of whole steps on 16 matrices for an H200."""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._record import record
from benchmarks._steps import compile_plain
from jaxmem.optim import half_params, small_moments

OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options


def compile_step(loss_fn, optimizer, params, batch):
    return compile_plain(loss_fn, optimizer, params, batch, "h200", compiler_options=OPTIONS)


def matrices():
    """16 matrices of 64 MiB: what optax has, and what jaxmem.optim adds."""
    adam, count = optax.adam(1e-3), 16 * 4096**2
    cases = {
        "optax.adam": (adam, jnp.float32),
        "optax.adam(mu_dtype=bfloat16)": (optax.adam(1e-3, mu_dtype=jnp.bfloat16), jnp.float32),
        "optax.lion": (optax.lion(1e-3), jnp.float32),
        "optax.sm3": (optax.sm3(1e-3), jnp.float32),
        "optax.adafactor": (optax.adafactor(1e-3), jnp.float32),
        "optax.contrib.galore, rank 128": (optax.contrib.galore(1e-3), jnp.float32),
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
        yield name, report, kept / count


def row(name, report, each):
    return {
        "optimizer": name,
        "parameters and state on the device, bytes a parameter": f"{each:.2f}",
        "device temp": jaxmem.format_bytes(report.temp),
        "device": jaxmem.format_bytes(report.device),
        "host": jaxmem.format_bytes(report.host),
        "host aliased": jaxmem.format_bytes(report.on_host.alias),
    }


def main():
    rows = [row(*each) for each in matrices()]
    record("Optimizer state on 16 x 64 MiB: compiled bytes of whole steps on an H200", rows)


if __name__ == "__main__":
    main()
