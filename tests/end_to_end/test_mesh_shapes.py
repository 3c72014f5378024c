"""Every shape of a mesh that `fit` searches, on eight simulated devices, against one device."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import dataclasses
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.fitting import Workload, LeverSearch

LAYERS, WIDTH, BATCH, LENGTH = 3, 128, 16, 8
UNCONSTRAINED = P.UNCONSTRAINED
h100 = jaxmem.target("h100")
# Nodes of two devices: shapes of eight have pieces within nodes and copies between them.
TARGET = dataclasses.replace(h100, links=dataclasses.replace(h100.links, node=2))


def make():
    keys = jax.random.split(jax.random.key(0), 2)
    up, down = (jax.random.normal(key, (LAYERS, WIDTH, 2 * WIDTH)) / 16 for key in keys)
    return {"layers": {"up": up, "down": jnp.swapaxes(down, 1, 2)}}


def loss_fn(params, batch, along=None):
    def layer(x, w):
        if along is not None:
            x = jax.lax.with_sharding_constraint(x, P(UNCONSTRAINED, along, None))
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    before = jnp.cumsum(x, 1)  # along the sequence
    return jnp.mean((before - batch["x"]) ** 2)


def tensor(path, leaf):
    return 2 if "'up'" in path else 1 if "'down'" in path else None


def sequence(path, leaf):
    return 1 if path.startswith("batch") else None


SPLITS = {
    "plain": (None, None),
    "tensor": ({"model": tensor}, None),
    "sequence parallel": ({"model": tensor}, "model"),
    "context": ({"context": sequence}, "context"),
}
BATCHES = {"x": jnp.cos(jnp.arange(BATCH * LENGTH * WIDTH * 1.0)).reshape(BATCH, LENGTH, WIDTH)}


def losses(step):
    params = make()
    state, found = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, BATCHES)
        found.append(float(metrics["loss"]))
    return found, jax.device_get(state.params)


def check(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert abs(a - b) <= 1e-8 * abs(b), (one[0], other[0])
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        assert abs(a - b).max() <= 1e-8


split, along = SPLITS[sys.argv[1]]
loss = lambda params, batch: loss_fn(params, batch, along)
wanted = losses(jaxmem.train_step(lambda params, batch: loss_fn(params, batch), optax.adamw(1e-3)))
given = loss, optax.adamw(1e-3), jax.eval_shape(make), BATCHES
options = {"target": TARGET, "budget": "1GiB", "devices": jax.devices(), "split": split}
search = LeverSearch(Workload(*given, **options, allow="operations"))
shapes = set()
for levers in search.options:
    if levers.microbatches > 2 or levers.host:
        continue
    plain = search.costs.plain_plan(levers)
    least = search.costs.plan(levers, 1)
    plan = search.costs.plan(levers, least if isinstance(least, int) else 1)
    for one in {plain.regions: plain, plan.regions: plan}.values():
        check(losses(search.workload.step(levers, one)), wanted)
    shapes.add(levers.mesh)
    print(levers, "ok")
assert len(shapes) >= 3, shapes
chosen = jaxmem.fit(*given, **options)
check(losses(chosen), wanted)
assert chosen.sharding.mesh.size == 8
"""


@pytest.mark.parametrize("kind", ["plain", "tensor", "sequence parallel", "context"])
def test_every_shape_trains_as_one_device(kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script), kind], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
