"""What stage 3 gathers of weights, stacked for a scan or each for itself."""

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


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.7])
def test_gradients_of_gathered_weights_are_made_before_the_next_layer_runs_again(share):
    """XLA left those of layers that are not in the innermost region for later: the plan of the
    fewest bytes compiled to 1.94 times what was projected."""

    def written_out(params, x):
        for w in params:
            w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w)
            x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    layer = {name: jax.ShapeDtypeStruct((512, 2048), jnp.float32) for name in ("gate", "up")}
    layer["down"] = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 4096, 512), jnp.bfloat16)
    mesh = AbstractMesh((8,), ("data",))
    workload = Workload(written_out, optax.sgd(1e-3), [layer] * 8, x, target="h100", mesh=mesh)
    costs, levers = LeverSearch(workload).costs, Levers(stage=3)
    plain = costs.candidate_of(levers, costs.plain_plan(levers)).projected
    plan = costs.plan(levers, int(share * plain) if share else costs.plan(levers, 1))
    step, state = workload.step(levers, plan), workload.state(levers)
    report = jaxmem.memory(step, state, workload.batch, target=workload.target, timeline=False)
    assert report.device == pytest.approx(costs.candidate_of(levers, plan).projected, rel=0.1)
