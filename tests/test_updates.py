"""Gradients that an optimizer's update reads are there from when they are made, not before."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.fitting import LeverSearch, Workload

LAYERS, WIDTH, ROWS = 12, 1024, 8192


def apart(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def shared(weights, x):
    """Each weight is read twice: its gradient adds up in one place."""
    for w in [*weights, *weights]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def looped(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return jnp.mean(x**2)


def shapes(stacked: bool):
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    stack = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return stack if stacked else [weight] * LAYERS, x


@pytest.mark.parametrize("share", [None, 0.75])
@pytest.mark.parametrize("loss", [apart, shared, looped])
def test_projected_steps_are_as_compiled(loss, share):
    params, x = shapes(loss is looped)
    workload = Workload(loss, optax.adamw(1e-3), params, x, target="h100")
    costs, levers = LeverSearch(workload).costs, workload.as_is
    plan = costs.plain_plan(levers)
    if share:
        plan = costs.plan(levers, int(share * costs.candidate_of(levers, plan).projected))
    assert bool(plan.recomputes) == bool(share)
    step, state = workload.step(levers, plan), workload.state(levers)
    report = jaxmem.memory(step, state, x, target=workload.target, timeline=False)
    projected = costs.candidate_of(levers, plan).projected
    assert report.device == pytest.approx(projected, rel=0.04)


def test_a_loss_and_its_gradients_are_results():
    """Of `jaxmem.plan`, which knows of no update, they are there from the beginning."""
    params, x = shapes(False)
    plan = jaxmem.plan(apart, params, x, target="h100", compilations=0)
    report = jaxmem.memory(jax.value_and_grad(apart), params, x, target="h100", timeline=False)
    assert report.device == pytest.approx(plan.plain_bytes, rel=0.02)
