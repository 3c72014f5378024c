"""Values that several reductions read: their cotangents are spread out where they are read."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem


def squashed(s):
    norm = jnp.sum(s**2, -1, keepdims=True)
    return norm / (1 + norm) * s / jnp.sqrt(norm + 1e-9)


def capsules(weights, x):
    """Routing by agreement, of Sabour et al. (2017)."""
    votes = jnp.einsum("bid,icdo->bico", squashed(x), weights)
    logits = jnp.zeros(votes.shape[:3], jnp.float32)
    for turn in range(3):
        found = squashed(jnp.einsum("bic,bico->bco", jax.nn.softmax(logits, 2), votes))
        if turn < 2:
            logits += jnp.einsum("bico,bco->bic", votes, found)
    return jnp.mean(found**2)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_votes_of_capsules_are_there_once(length):
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((288, 10, 8, length), (256, 288, 8))
    ]
    plan = jaxmem.plan(capsules, *args, target="h100", budget="100%", compilations=1)
    votes = 256 * 288 * 10 * length * 4
    assert plan.compiled_bytes == pytest.approx(plan.projected_bytes, rel=0.02)
    assert plan.compiled_bytes < 2 * votes + 2**24
    # What fits as it is is not refused where nothing is compiled.
    least = jaxmem.plan(
        capsules, *args, target="h100", budget=int(1.02 * plan.compiled_bytes), compilations=0
    )
    assert least.predicted.recompute_flops == 0


def test_the_only_plan_that_is_compiled_runs_one_forward_pass_more_at_most():
    """Room for the largest error would cost 4.6."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    args = (
        [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 12,
        jax.ShapeDtypeStruct((8192, 2048), jnp.float32),
    )
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    plan = jaxmem.plan(loss, *args, target="h100", budget=int(0.7 * plain), compilations=1)
    assert plan.predicted.recompute_flops <= plan.predicted.flops
