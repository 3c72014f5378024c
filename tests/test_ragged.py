"""Experts: matmuls of rows in groups."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem

ROWS, WIDTH, HIDDEN = 2048, 256, 1024


def experts(gated=True, scanned=True, dtype=jnp.float32, groups=8, best=2):
    """Layers of experts (Jiang et al. 2024), and the shapes of their arguments."""

    def mixture(params, x):
        scores = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
        weights, chosen = lax.top_k(scores, best)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=groups).astype(jnp.int32)
        rows = x[order // best]
        hidden = jax.nn.silu(lax.ragged_dot(rows, params["gate"], counts))
        if gated:
            hidden *= lax.ragged_dot(rows, params["up"], counts)
        out = lax.ragged_dot(hidden, params["down"], counts)
        out *= weights.reshape(-1)[order][:, None].astype(out.dtype)
        return jnp.zeros_like(x).at[order // best].add(out)

    def loss(params, x):
        if scanned:
            x, _ = lax.scan(lambda x, layer: (x + mixture(layer, x), None), x, params)
        else:
            for at in range(4):
                x = x + mixture(jax.tree.map(lambda leaf, at=at: leaf[at], params), x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = {
        "router": (WIDTH, groups),
        "gate": (groups, WIDTH, HIDDEN),
        "up": (groups, WIDTH, HIDDEN),
        "down": (groups, HIDDEN, WIDTH),
    }
    params = {
        name: jax.ShapeDtypeStruct((4, *shape), dtype)
        for name, shape in shapes.items()
        if gated or name != "up"
    }
    return loss, (params, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))


VARIANTS = {
    "gated": {},
    "plain": {"gated": False},
    "gated, unrolled": {"scanned": False},
    "gated, bfloat16": {"dtype": jnp.bfloat16},
    "four groups": {"groups": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_copies_of_rows_are_there_together(name):
    loss, args = experts(**VARIANTS[name])
    projected = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100").device
    assert projected == pytest.approx(compiled, rel=0.12)


@pytest.mark.slow
def test_a_tpu_makes_no_copies():
    loss, args = experts()
    plan = jaxmem.plan(loss, *args, target="v5e", compilations=1)
    assert plan.projected_bytes == pytest.approx(plan.compiled_bytes, rel=0.3)


@pytest.mark.slow
def test_experts_are_planned():
    loss, args = experts()
    plain = jaxmem.plan(loss, *args, compilations=0).plain_bytes
    plan = jaxmem.plan(loss, *args, budget=int(0.8 * plain), target="h100", compilations=2)
    assert plan.compiled_bytes <= 0.8 * plain
    assert plan.projected_bytes == pytest.approx(plan.compiled_bytes, rel=0.2)
