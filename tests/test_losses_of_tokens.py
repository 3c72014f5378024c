"""The loss of most language models: a `log_softmax` of logits, of which each token's is taken."""

import jax
import jax.numpy as jnp
import pytest
from projections import planned_and_compiled, projected_and_compiled

ROWS, WIDTH, LAYERS = 4096, 256, 4
CAP = 30.0


def language_model(dtype, words=8192, capped=False, by_total=False):
    """Layers, and logits in float32; ``by_total``: with `logsumexp`, of which nothing is taken."""

    def loss(params, x, labels):
        layers, head = params
        for up, down in layers:
            x = x + jax.nn.gelu(x @ up) @ down
        logits = (x @ head).astype(jnp.float32)
        if capped:
            logits = CAP * jnp.tanh(logits / CAP)
        taken = jnp.take_along_axis(
            logits if by_total else jax.nn.log_softmax(logits), labels[..., None], -1
        )
        total = jax.nn.logsumexp(logits, -1) if by_total else 0
        return jnp.mean(total - taken[..., 0])

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = [(shaped(WIDTH, 4 * WIDTH), shaped(4 * WIDTH, WIDTH))] * LAYERS
    count = ROWS * 8192 // words // 8
    labels = jax.ShapeDtypeStruct((8, count), jnp.int32)
    return loss, ((layers, shaped(WIDTH, words)), shaped(8, count, WIDTH), labels)


CASES = {
    "bfloat16": (jnp.bfloat16, {}),
    "float32": (jnp.float32, {}),
    "capped, bfloat16": (jnp.bfloat16, {"capped": True}),
    "capped, float32": (jnp.float32, {"capped": True}),
    "capped, of a total": (jnp.bfloat16, {"capped": True, "by_total": True}),
    "of a total": (jnp.bfloat16, {"by_total": True}),
    "rows too long for one kernel": (jnp.bfloat16, {"words": 32768}),
    "capped rows too long for one kernel": (jnp.bfloat16, {"words": 32768, "capped": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_elements_are_taken_of_is_in_memory_and_read_again(name):
    """XLA writes the rows less their maxima, for the element that is taken of each, and the
    derivative reads those and no logits. Of 16 bits the step was projected 29 % too low, and 22 %
    with capped logits."""
    dtype, options = CASES[name]
    projected, compiled = projected_and_compiled(*language_model(dtype, **options))
    assert projected == pytest.approx(compiled, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "capped, bfloat16", "rows too long for one kernel"])
def test_so_it_is_on_other_gpus(name):
    dtype, options = CASES[name]
    args = language_model(dtype, **options)
    projected, compiled = projected_and_compiled(*args, "rtx-3090")
    assert projected == pytest.approx(compiled, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, None])
@pytest.mark.parametrize("name", CASES)
def test_plans_of_such_losses(name, share):
    dtype, options = CASES[name]
    plan, compiled = planned_and_compiled(*language_model(dtype, **options), share)
    assert plan.projected_bytes == pytest.approx(compiled, rel=0.1)
