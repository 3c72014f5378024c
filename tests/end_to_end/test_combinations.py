"""Sharding with every other lever, on four simulated devices, against the plain step.

docs/guides/sharding.md has the table of what is tested; the cases are its rows.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import sys

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.levers.host import streaming
from jaxmem.optim import half_params, small_moments

WIDTH = 128


def make(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (WIDTH, WIDTH), dtype) / WIDTH**0.5 for key in keys]


def layer(w, x):
    return jnp.tanh(x @ w)


def losses(layer, optimizer, dtype=jnp.float64, scanned=False, **levers):
    def loss_fn(params, x):
        for w in params:
            x = layer(w, x)
        return jnp.mean(x.astype(jnp.float32 if "precision" in levers else x.dtype) ** 2)

    def scanned_loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["blocks"])[0] ** 2)

    step = jaxmem.train_step(scanned_loss if scanned else loss_fn, optimizer, **levers)
    params = {"blocks": jnp.stack(make(dtype))} if scanned else make(dtype)
    state, found = step.init(params), []
    before = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    for _ in range(3):
        state, metrics = step(state, jnp.cos(jnp.arange(16.0 * WIDTH)).reshape(16, WIDTH))
        found.append(float(metrics["loss"]))
    same = jax.tree.map(
        lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim), state.params, before
    )
    assert all(jax.tree.leaves(same)), (before, state.params)
    return found


def eight_bits(optimizer):
    return small_moments(optimizer, keep=lambda path, leaf: False)


CASES = {
    "alone": {},
    "offload": {"outer": jaxmem.offload},
    "pieces": {"scanned": True, "outer": jaxmem.offload, "chunk": 100_000},
    "precision": {"precision": "bf16", "dtype": jnp.float32, "rtol": 1e-2},
    "microbatches": {"microbatches": 2},
    "sqrt": {"remat": "sqrt"},
    "dp": {"remat": "dp"},
    "small_moments": {"inner": eight_bits, "rtol": 1e-6},
    "half_params": {
        "inner": lambda tx: half_params(eight_bits(tx)), "dtype": jnp.bfloat16, "rtol": 1e-2
    },
    "all": {"outer": jaxmem.offload, "microbatches": 2, "remat": "sqrt", "precision": "bf16",
            "dtype": jnp.float32, "rtol": 1e-2},
}
meshes = {
    "1": (jax.make_mesh((4,), ("data",)), 1),
    "2": (jax.make_mesh((4,), ("data",)), 2),
    "3": (jax.make_mesh((4,), ("data",)), 3),
    "hybrid": (jax.make_mesh((2, 2), ("replica", "data")), 3),
}
mesh, stage = meshes[sys.argv[1]]
for name, case in CASES.items():
    if "inner" in case and sys.argv[1] != "3":  # XLA takes long to compile them for a CPU
        continue
    case = dict(case)
    rtol = case.pop("rtol", 1e-10)
    outer = case.pop("outer", lambda optimizer: optimizer)
    adamw = case.pop("inner", lambda optimizer: optimizer)(optax.adamw(1e-2))
    fsdp = jaxmem.shard(mesh, stage=stage, scanned="blocks" if case.get("scanned") else None)
    streaming.CHUNK = case.pop("chunk", 64 * 2**20)
    plain = {key: case[key] for key in case if key in ("precision", "dtype", "scanned")}
    expected = losses(layer, adamw, **plain)
    got = losses(fsdp.gather(layer), outer(fsdp.optimizer(adamw)), sharding=fsdp, **case)
    off = max(abs(a / b - 1) for a, b in zip(got, expected, strict=True))
    print(name, off, "ok" if off < rtol else "WRONG", flush=True)
print("done")
"""


@pytest.mark.parametrize("mesh", ["1", "2", "3", "hybrid"])
def test_sharding_with_every_other_lever(mesh):
    root = pathlib.Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, mesh],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith("done\n") and "WRONG" not in run.stdout, run.stdout
