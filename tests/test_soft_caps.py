"""Attention whose scores are capped by a tanh: what of them is in memory."""

import jax
import jax.numpy as jnp
import pytest
from projections import planned_and_compiled, projected_and_compiled


def soft_capped(count=16, heads=8, length=512, width=32):
    """Layers of attention whose scores are capped by a tanh and masked, as Gemma 2 has them."""

    def layer(x, weights):
        query, key, value = ((x @ one).reshape(*x.shape[:2], heads, width) for one in weights[:3])
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        scores = 50 * jnp.tanh(scores / 50)
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(x.dtype)
        return x + jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(x.shape) @ weights[3]

    def loss(params, x):
        for weights in params:
            x = layer(x, weights)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    wide = heads * width
    params = [[jax.ShapeDtypeStruct((wide, wide), jnp.bfloat16)] * 4] * 4
    return loss, (params, jax.ShapeDtypeStruct((count, length, wide), jnp.bfloat16))


def test_what_is_cheap_to_make_of_the_last_expensive_one_is_not_kept_beside_it():
    """Scores before the cap and after the mask were counted, where XLA has those between: the
    tanh's. The step was projected 36 % too high."""
    projected, compiled = projected_and_compiled(*soft_capped())
    assert compiled == pytest.approx(projected, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.4, None])
def test_plans_of_capped_scores(share):
    """Behind a barrier the maxima of rows are written with the tanh, which is overwritten by
    nothing then. A third too little was projected of half of the bytes; at 0.4 13 % are left."""
    plan, compiled = planned_and_compiled(*soft_capped(), share)
    assert compiled == pytest.approx(plan.projected_bytes, rel=0.14)
