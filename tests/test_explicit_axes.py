"""Meshes of explicit axes, which `jax.make_mesh` of the newest jax makes unless told otherwise: JAX
checks how the operands of each operation are cut, so all that is made anew has to be cut alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem

LAYERS, WIDTH, ROWS, WORDS = 4, 16, 128, 32
RANDOM = np.random.default_rng(0)


@pytest.fixture
def mesh():
    # Of one device: what JAX checks are the axes, whatever their sizes.
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def on(mesh, *spec, shape, dtype=np.float64):
    array = jnp.asarray(RANDOM.normal(size=shape) / 4, dtype)
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def numbers(mesh):
    words = jnp.asarray(RANDOM.integers(0, WORDS, size=ROWS))
    return jax.device_put(words, NamedSharding(mesh, P("data")))


def rows(mesh, *more):
    return on(mesh, "data", shape=(ROWS, *(more or (WIDTH,))))


def squares(mesh, *stack):
    return on(mesh, shape=(*stack, WIDTH, WIDTH))


def block(x, weights):
    """Tensor parallel: columns, then rows."""
    up, down = weights
    return x + jnp.dot(jnp.tanh(x @ up), down, out_sharding=P("data", None))


def scanned(body):
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, params)
        return jnp.mean(x**2)

    return loss


def tensor_parallel(mesh, *stack):
    none = [None] * len(stack)
    shape = (*stack, WIDTH, WIDTH)
    return on(mesh, *none, None, "model", shape=shape), on(mesh, *none, "model", shape=shape)


def unrolled(params, x):
    return jnp.mean(functools.reduce(block, params, x) ** 2)


def stacking(params, x):
    def body(x, w):
        x = jnp.sin(x @ w)
        return x, jnp.mean(x, 0)

    x, means = jax.lax.scan(body, x, params)
    return jnp.mean(x**2) + jnp.sum(means**2)


def nested(x, w):
    return jax.lax.scan(lambda y, _: (jnp.sin(y @ w), None), x, None, length=3)[0]


def branches(params, x):
    for w in params:
        x = jax.lax.cond(
            jnp.sum(w) > 0, lambda x, w: jnp.sin(x @ w), lambda x, w: jnp.cos(x @ w), x, w
        )
    return jnp.mean(x**2)


@jax.custom_vjp
def own_rule(x, w):
    return jnp.sin(x @ w)


def own_rule_backward(kept, cotangent):
    x, w = kept
    cotangent = cotangent * jnp.cos(x @ w)
    return cotangent @ w.T, jnp.dot(x.T, cotangent, out_sharding=P(None, None))


own_rule.defvjp(lambda x, w: (own_rule(x, w), (x, w)), own_rule_backward)


def of_own_rule(params, x):
    return jnp.mean(functools.reduce(own_rule, params, x) ** 2)


def words(params, labels):
    table, weights, head = params
    x = table.at[labels].get(out_sharding=P("data", None))
    x = functools.reduce(lambda x, w: x + jnp.tanh(x @ w), weights, x)
    logits = jnp.dot(x, head, out_sharding=P("data", None))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def pooled(params, x):
    for w in params:
        x = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    window = (1, 2, 2, 1)
    return jnp.mean(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID") ** 2)


def sine(x, w):
    return jnp.sin(x @ w), None


PROGRAMS = {
    "unrolled": lambda mesh: (
        unrolled,
        [tensor_parallel(mesh) for _ in range(LAYERS)],
        rows(mesh),
    ),
    "scan": lambda mesh: (scanned(block), tensor_parallel(mesh, LAYERS), rows(mesh)),
    "scan over regions": lambda mesh: (
        scanned(jax.checkpoint(block)),
        tensor_parallel(mesh, LAYERS),
        rows(mesh),
    ),
    "scan with results": lambda mesh: (stacking, squares(mesh, LAYERS), rows(mesh)),
    "scan in a scan": lambda mesh: (scanned(nested), squares(mesh, LAYERS), rows(mesh)),
    "conditionals": lambda mesh: (branches, [squares(mesh)] * LAYERS, rows(mesh)),
    "custom_vjp": lambda mesh: (of_own_rule, [squares(mesh)] * LAYERS, rows(mesh)),
    "language model": lambda mesh: (
        words,
        (
            on(mesh, shape=(WORDS, WIDTH)),
            [squares(mesh)] * LAYERS,
            on(mesh, None, "model", shape=(WIDTH, WORDS)),
        ),
        numbers(mesh),
    ),
    "convolutions": lambda mesh: (
        pooled,
        [on(mesh, shape=(3, 3, 4, 4))] * 3,
        rows(mesh, 8, 8, 4),
    ),
}


def check_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        assert jax.typeof(one).sharding.spec == jax.typeof(other).sharding.spec


@pytest.mark.parametrize("share", [None, 0.7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_have_the_gradients_of_the_function(mesh, name, share):
    loss, params, x = PROGRAMS[name](mesh)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    budget = None if share is None else int(share * jaxmem.plan(loss, params, x).plain_bytes)
    try:
        plan = jaxmem.plan(loss, params, x, budget=budget)
    except jaxmem.BudgetError as error:
        plan = jaxmem.plan(loss, params, x, budget=error.lowest)
    assert plan.regions or plan.loops
    check_equal(jax.jit(jax.value_and_grad(plan.apply(loss)))(params, x), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: jnp.tile(x, (1, 3)),
        lambda x: jnp.tile(x[:, None], (1, 2, 2)),
        lambda x: jnp.tile(x, (1, 0)),
        lambda x: jnp.stack([x, jnp.sin(x)], 1),
        lambda x: sum(jnp.unstack(x, axis=1)),
    ],
    ids=["tile", "tile two axes", "tile to nothing", "stack", "unstack"],
)
def test_what_is_several_operations_to_xla(mesh, change):
    def loss(x):
        return jnp.sum(jnp.sin(change(jnp.tanh(x))))

    x = rows(mesh)
    expected = jax.jit(jax.value_and_grad(loss))(x)
    found = jax.jit(jax.value_and_grad(jaxmem.plan(loss, x).apply(loss)))(x)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


def test_loops_in_time_have_the_gradients_of_the_scan(mesh):
    def loss(scan, params, x):
        return jnp.mean(scan(sine, x, params)[0] ** 2)

    given = squares(mesh, 12), rows(mesh)
    plain = jax.jit(jax.value_and_grad(functools.partial(loss, jax.lax.scan)))(*given)
    for budget in "90KiB", "130KiB":
        scan = functools.partial(jaxmem.scan, budget=budget)
        check_equal(jax.jit(jax.value_and_grad(functools.partial(loss, scan)))(*given), plain)


@pytest.mark.parametrize("count", [1, 4])
def test_microbatches(mesh, count):
    params, x = [tensor_parallel(mesh) for _ in range(LAYERS)], rows(mesh)
    expected = jax.jit(jax.value_and_grad(unrolled))(params, x)
    check_equal(jax.jit(jaxmem.microbatch(unrolled, count))(params, x), expected)


def test_accumulation(mesh):
    params = [tensor_parallel(mesh) for _ in range(LAYERS)]
    optimizer, plain = jaxmem.accumulate(optax.adam(1e-3), every=2), optax.adam(1e-3)
    state, other = jax.jit(optimizer.init)(params), jax.jit(plain.init)(params)
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(params, state, params)
    check_equal(updates, jax.jit(plain.update)(params, other, params)[0])


@pytest.mark.parametrize("name", ["scan", "custom_vjp", "conditionals", "convolutions"])
def test_autocast(mesh, name):
    loss, params, x = PROGRAMS[name](mesh)
    params, x = jax.tree.map(lambda leaf: leaf.astype(np.float32), (params, x))
    found = jax.jit(jax.value_and_grad(jaxmem.autocast(loss, "bf16")))(params, x)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.1, atol=0.02 * float(jnp.abs(other).max()))


def mean_of_squares(params, batch):
    x = functools.reduce(lambda x, w: jnp.tanh(x @ w), params, batch)
    return jnp.mean(x**2)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_step_on_the_mesh_in_force(mesh, stage, microbatches):
    """`jaxmem.shard` has axes of its own, that XLA places collectives on."""
    params = [squares(mesh).astype(np.float32) for _ in range(LAYERS)]
    batch = rows(mesh).astype(np.float32)
    expected = mean_of_squares(params, batch)
    sharding = jaxmem.shard(mesh, "data", stage=stage)
    step = jaxmem.train_step(
        *(mean_of_squares, optax.sgd(0.1)),
        sharding=sharding,
        remat="dp",
        microbatches=microbatches,
    )
    state = step.init(params)
    state, metrics = step(state, batch)
    assert metrics["loss"] == pytest.approx(float(expected))
    _, later = step(state, batch)
    assert float(later["loss"]) < float(metrics["loss"])


def test_fit_for_other_devices_than_those_of_the_mesh_in_force(mesh):
    params = [jax.ShapeDtypeStruct((256, 256), np.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((4096, 256), np.float32)
    step = jaxmem.fit(
        *(mean_of_squares, optax.adam(1e-3), params, batch),
        target="h100",
        devices=8,
        budget="80MiB",
        compilations=1,
    )
    assert step.fitting.chosen.compiled <= 80 * 2**20


def test_attention(mesh):
    x = on(mesh, "data", shape=(8, 32, 4, 16), dtype=np.float32)

    def loss(attention, x):
        return jnp.sum(attention(x, x, x, is_causal=True) ** 2)

    plain = jax.nn.dot_product_attention
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, plain)))(x)
    found = jax.jit(jax.value_and_grad(functools.partial(loss, jaxmem.ops.attention)))(x)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    assert jax.typeof(found[1]).sharding.spec == jax.typeof(x).sharding.spec


def test_cross_entropy(mesh):
    params, labels = (rows(mesh), on(mesh, shape=(WIDTH, WORDS))), numbers(mesh)

    def plain(params):
        logits = params[0] @ params[1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def ours(params):
        return jnp.mean(jaxmem.ops.softmax_cross_entropy(*params, labels))

    expected = jax.jit(jax.value_and_grad(plain))(params)
    found = jax.jit(jax.value_and_grad(ours))(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def test_swapped_losses(mesh, caplog):
    loss, params, labels = PROGRAMS["language model"](mesh)
    expected = jax.jit(jax.value_and_grad(loss))(params, labels)
    swapped = jaxmem.ops.swap(loss, least="1KiB")
    found = jax.jit(jax.value_and_grad(swapped))(params, labels)
    assert "softmax_cross_entropy instead of logits" in caplog.text
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
