"""What stage 3 gathers of a stack of weights that a scan goes over."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxmem
from jaxmem.fitting import Levers, LeverSearch, Workload

LAYERS, WIDTH, HIDDEN = 16, 2048, 16384


def loss_fn(params, x):
    def layer(x, w):
        w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w)
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


@pytest.mark.slow
def test_weights_are_gathered_along_any_axis_without_a_copy_of_their_stack():
    """Of gate and up it is the innermost one: XLA copied 256 MiB of each into another layout."""
    params = {
        name: jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32) for name in ("gate", "up")
    }
    params["down"] = jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 1024, WIDTH), jnp.bfloat16)
    mesh = AbstractMesh((8,), ("data",))
    workload = Workload(loss_fn, optax.sgd(1e-3), params, x, target="h100", mesh=mesh)
    costs, levers = LeverSearch(workload).costs, Levers(stage=3)
    least = costs.plan(levers, costs.plan(levers, 1))
    step, state = workload.step(levers, least), workload.state(levers)
    report = jaxmem.memory(step, state, workload.batch, target=workload.target)
    assert report.device == pytest.approx(costs.candidate_of(levers, least).projected, rel=0.12)
    assert f"f32[{HIDDEN // 8},{LAYERS},{WIDTH}]" not in str(report)
