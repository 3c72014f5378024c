"""What a scan stacks and XLA lays out anew between the passes: one copy of the largest."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.program import read_program

BATCH, LENGTH, HEADS, HEAD, LAYERS = 4, 512, 8, 64, 8
WIDTH = HEADS * HEAD
SCORES = LAYERS * BATCH * HEADS * LENGTH**2 * 2


def attention(scores: str, out: str, keys: int = HEADS, axis: int = -1):
    """Attention by two einsums; ``keys`` heads of keys and values, with an axis of their own or
    (0) none."""

    def attend(query, key, value):
        key, value = (one[:, :, 0] if not keys else one[:, :, :keys] for one in (key, value))
        if 0 < keys < HEADS:
            query = query.reshape(BATCH, LENGTH, keys, HEADS // keys, HEAD)
        weights = jax.nn.softmax(jnp.einsum(scores, query, key) / 8, axis=axis)
        return jnp.einsum(out, weights, value)

    return attend


# In brackets whether XLA copies the scores of all layers.
FORMS = {
    "bhqk": (attention("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"), False),
    "bqhk": (attention("bqhd,bkhd->bqhk", "bqhk,bkhd->bqhd"), True),
    "hbqk": (attention("bqhd,bkhd->hbqk", "hbqk,bkhd->bqhd"), True),
    "bhkq": (attention("bqhd,bkhd->bhkq", "bhkq,bkhd->bqhd", axis=2), False),
    "one key": (attention("bqhd,bkd->bhqk", "bhqk,bkd->bqhd", keys=0), True),
    "groups": (attention("bqgnd,bkgd->bgnqk", "bgnqk,bkgd->bqgnd", keys=2), True),
    "jax.nn": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v), False),
    "jax.nn, groups": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2]),
        True,
    ),
}


def network(attend):
    def layer(x, weights):
        query, key, value = jnp.split((x @ weights["in"]).reshape(*x.shape[:2], -1, HEAD), 3, 2)
        return x + attend(query, key, value).reshape(x.shape) @ weights["out"], None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    weights = {"in": (LAYERS, WIDTH, 3 * WIDTH), "out": (LAYERS, WIDTH, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in weights.items()}
    return loss, weights, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)


@pytest.mark.parametrize("name", FORMS)
def test_a_stack_is_copied_where_its_derivative_reads_it_in_another_order(name):
    attend, copied = FORMS[name]
    loss, *args = network(attend)
    program = read_program(jaxprs.flatten(loss, args))
    (scan,) = (one for one in program.operations if one.name == "scan")
    assert (scan.stacks.relaid >= SCORES) == copied
    options = jaxmem.targets.family_of(jaxmem.target("h100")).planned_options()
    report = jaxmem.memory(
        jax.value_and_grad(loss), *args, target="h100", compiler_options=options, timeline=False
    )
    projected = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    assert report.device == pytest.approx(projected, rel=0.09)


def test_a_plan_has_stacks_that_lie_by_rows():
    """No copy: what a plan saves is told how to lie."""
    loss, *args = network(FORMS["jax.nn, groups"][0])
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    plan = jaxmem.plan(loss, *args, target="h100", budget=plain * 3 // 4)
    assert plan.compiled.bytes == pytest.approx(plan.projected_bytes, rel=0.1)


def test_a_tpu_lays_out_as_it_likes():
    loss, *args = network(FORMS["jax.nn, groups"][0])
    on_gpu, on_tpu = (
        jaxmem.plan(loss, *args, target=name, compilations=0).plain_bytes
        for name in ("h100", "v5e")
    )
    assert on_gpu > on_tpu + SCORES // 2


@pytest.mark.parametrize("result", [jax.nn.logsumexp, jnp.argmax, lambda y, axis: jnp.sin(y)])
def test_of_results_that_nobody_reads_nothing_is_stacked(result):
    """Nor what their derivative would read."""

    def loss(w, x):
        def step(y, dx):
            return dx + y + jax.nn.softmax(y @ w), result(y, axis=-1)

        return jnp.mean(jax.lax.scan(step, jnp.zeros((512, 128)), x)[0] ** 2)

    args = (
        jax.ShapeDtypeStruct((128, 128), jnp.float32),
        jax.ShapeDtypeStruct((64, 512, 128), jnp.float32),
    )
    projected = jaxmem.plan(loss, *args).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    assert compiled.device == pytest.approx(projected, rel=0.02)


@pytest.mark.parametrize("activation", [jax.nn.softplus, jax.nn.silu, jnp.logaddexp])
def test_what_no_derivative_reads_is_not_counted(activation):
    """JAX stacks the factor of a tangent that is zero as well (`softplus`); XLA drops the stack."""

    def loss(w, x):
        def step(y, dx):
            y = y @ w
            y = activation(y, 0.0) if activation is jnp.logaddexp else activation(y)
            return y + dx, None

        return jnp.mean(jax.lax.scan(step, jnp.zeros((512, 128)), x)[0] ** 2)

    args = (
        jax.ShapeDtypeStruct((128, 128), jnp.float32),
        jax.ShapeDtypeStruct((100, 512, 128), jnp.float32),
    )
    projected = jaxmem.plan(loss, *args).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    assert compiled.device == pytest.approx(projected, rel=0.02)
