"""Cross-entropy without logits: equal to the plain one, in every transformation, and small."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.ops import softmax_cross_entropy

pytestmark = pytest.mark.slow

ROWS, WIDTH, VOCABULARY = 21, 8, 50


def plain(hidden, weights, bias, labels, smoothing=0.0, z_loss=0.0, ignored=None, cap=None):
    logits = (hidden @ weights).astype(jnp.promote_types(hidden.dtype, jnp.float32))
    if bias is not None:
        logits += bias.reshape((1,) * (logits.ndim - 1) + bias.shape)
    if cap:
        logits = cap * jnp.tanh(logits / cap)
    total = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    loss = total - chosen
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (total - logits.mean(-1))
    if z_loss:
        loss += z_loss * total**2
    return loss if ignored is None else jnp.where(labels == ignored, 0, loss)


@pytest.fixture
def arrays(key):
    keys = jax.random.split(key, 4)
    hidden = jax.random.normal(keys[0], (3, ROWS // 3, WIDTH))
    weights = jax.random.normal(keys[1], (WIDTH, VOCABULARY))
    bias = jax.random.normal(keys[2], (VOCABULARY,))
    return hidden, weights, bias, jax.random.randint(keys[3], (3, ROWS // 3), 0, VOCABULARY)


def assert_close(found, expected, rtol=1e-10):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol, atol=1e-12)


@pytest.mark.parametrize("block", [None, (21, 16), (5, 16), (7, 25)])
@pytest.mark.parametrize("everything", [False, True], ids=["alone", "all options"])
def test_values_and_gradients_are_the_plain_ones(arrays, block, everything):
    hidden, weights, bias, labels = arrays
    given = hidden, weights, bias if everything else None
    options, others = {}, ()
    if everything:
        options = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": int(labels[0, 0])}
        options["soft_cap"] = 3.0
        others = tuple(options.values())

    def ours(hidden, weights, bias):
        return softmax_cross_entropy(
            hidden, weights, labels, bias=bias, block=block, **options
        ).mean()

    def theirs(hidden, weights, bias):
        return plain(hidden, weights, bias, labels, *others).mean()

    wanted = (0, 1, 2) if everything else (0, 1)
    found, expected = (jax.jit(jax.value_and_grad(f, wanted))(*given) for f in (ours, theirs))
    assert_close(found, expected)


@pytest.mark.parametrize("block", [(21, 50), (7, 16)])
def test_forward_mode_and_second_derivatives(arrays, block):
    hidden, weights, _, labels = arrays
    along = jnp.cos(hidden), jnp.cos(weights)

    def second(loss):
        def forward_over_reverse(*given):
            return jax.jvp(jax.grad(loss, (0, 1)), given, along)[1]

        def reverse_over_reverse(*given):
            def projected(*given):
                gradients = jax.grad(loss, (0, 1))(*given)
                return sum((g * a).sum() for g, a in zip(gradients, along, strict=True))

            return jax.grad(projected, (0, 1))(*given)

        def first(*given):
            return jax.jvp(loss, given, along)

        together = jax.jit(
            lambda *x: (first(*x), forward_over_reverse(*x), reverse_over_reverse(*x))
        )
        return together(hidden, weights)

    assert_close(
        second(lambda h, w: softmax_cross_entropy(h, w, labels, block=block).mean()),
        second(lambda h, w: plain(h, w, None, labels).mean()),
        1e-8,
    )


def test_under_vmap_scan_and_a_plan(arrays):
    hidden, weights, _, labels = arrays

    def ours(hidden, weights, labels):
        return softmax_cross_entropy(hidden, weights, labels, block=(4, 16)).mean()

    def theirs(hidden, weights, labels):
        return plain(hidden, weights, None, labels).mean()

    def mapped(loss):
        each = jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0))
        return jax.jit(each)(hidden, weights, labels)

    def scanned(loss):
        def total(weights):
            def body(total, given):
                return total + loss(given[0], weights, given[1]), None

            return jax.lax.scan(body, 0.0, (hidden, labels))[0]

        return jax.jit(jax.grad(total))(weights)

    assert_close(mapped(ours), mapped(theirs))
    assert_close(scanned(ours), scanned(theirs))
    planned = jaxmem.remat(lambda h, w: ours(jnp.tanh(h @ (w @ w.T)), w, labels))
    assert_close(
        jax.jit(jax.grad(planned, (0, 1)))(hidden, weights),
        jax.grad(lambda h, w: theirs(jnp.tanh(h @ (w @ w.T)), w, labels), (0, 1))(hidden, weights),
    )


def test_an_embedding_is_used_as_it_lies(arrays):
    hidden, weights, _, labels = arrays

    def ours(hidden, table):
        return softmax_cross_entropy(hidden, table, labels, vocabulary_axis=0, block=(7, 16)).mean()

    found = jax.jit(jax.grad(ours, (0, 1)))(hidden, weights.T)
    by_hidden, by_weights = jax.grad(lambda h, w: plain(h, w, None, labels).mean(), (0, 1))(
        hidden, weights
    )
    assert_close(found, (by_hidden, by_weights.T))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_are_no_larger_than_the_plain_ones(key, dtype):
    keys = jax.random.split(key, 3)
    hidden = jax.random.normal(keys[0], (64, 32)).astype(dtype)
    weights = jax.random.normal(keys[1], (32, 500)).astype(dtype)
    labels = jax.random.randint(keys[2], (64,), 0, 500)
    wide = hidden.astype("float64"), weights.astype("float64")

    def of(loss, *given):
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*given)
        return [np.asarray(x, np.float64) for x in (value, *gradients)]

    def theirs(hidden, weights):
        return plain(hidden, weights, None, labels).mean()

    exact = of(theirs, *wide)
    usual = of(theirs, hidden, weights)
    found = of(
        lambda h, w: softmax_cross_entropy(h, w, labels, block=(64, 64)).mean(), hidden, weights
    )
    for right, one, other in zip(exact, found, usual, strict=True):
        rounding = np.abs(right).max() * float(jnp.finfo(jnp.float32).eps)
        error, plain_error = np.abs(one - right), np.abs(other - right)
        assert error.max() <= plain_error.max() + 2 * rounding
        assert np.sqrt((error**2).mean()) <= np.sqrt((plain_error**2).mean()) + rounding


def test_logits_of_any_size(key):
    direction = jax.random.normal(key, (6, 4))
    weights = jax.random.normal(jax.random.key(1), (4, 40), "float32")
    labels = jnp.arange(6)

    def ours(hidden, weights):
        return softmax_cross_entropy(hidden, weights, labels, block=(6, 16)).sum()

    def theirs(hidden, weights):
        return plain(hidden, weights, None, labels).sum()

    both = [jax.jit(jax.value_and_grad(loss, (0, 1))) for loss in (ours, theirs)]
    for scale in (1e-30, 1e-15, 1.0, 1e4, 1e15, 1e30):
        hidden = (direction * scale).astype(jnp.float32)
        loss, gradients = both[0](hidden, weights)
        right, exact = both[1](hidden.astype("float64"), weights.astype("float64"))
        np.testing.assert_allclose(loss, right, 1e-6)
        for one, other in zip(gradients, exact, strict=True):
            np.testing.assert_allclose(one, other, 1e-4, atol=1e-6 * float(jnp.abs(other).max()))


def test_infinities_and_nan_are_where_plain_jax_has_them(arrays):
    hidden, weights, bias, labels = arrays
    hidden = hidden.at[0, 0].set(jnp.nan)
    bias = bias.at[7].set(-jnp.inf)  # a token that is never predicted
    bias = bias.at[(labels[1, 0] + 1) % VOCABULARY].set(jnp.inf)
    ours = jax.jit(lambda *x: softmax_cross_entropy(*x[:3], bias=x[3], block=(7, 16)))(
        hidden, weights, labels, bias
    )
    np.testing.assert_array_equal(ours, plain(hidden, weights, bias, labels))
    assert jnp.isnan(ours[0, 0]) and jnp.isinf(ours[1, 0])
    bias = jnp.full(VOCABULARY, -jnp.inf).at[3].set(0.0)
    alone = softmax_cross_entropy(hidden[1:], weights, jnp.full_like(labels[1:], 3), bias=bias)
    np.testing.assert_array_equal(alone, 0.0)
    bad = softmax_cross_entropy(hidden[1:], weights, labels[1:] - 100, block=(7, 16))
    assert jnp.isnan(bad).all(), "a label that is not in the vocabulary"


def test_a_vocabulary_split_over_devices():
    """In a process of its own, with four CPU devices."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import jaxmem
jax.config.update("jax_enable_x64", True)
keys = jax.random.split(jax.random.key(0), 3)
hidden, weights = jax.random.normal(keys[0], (8, 6)), jax.random.normal(keys[1], (6, 40))
labels = jax.random.randint(keys[2], (8,), 0, 40)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def local(hidden, weights, labels):
    return jaxmem.ops.softmax_cross_entropy(
        hidden, weights, labels, label_smoothing=0.1, z_loss=0.1, axis_name="model", block=(3, 4)
    )

split = jax.shard_map(
    local, mesh=mesh, in_specs=(P("data"), P(None, "model"), P("data")), out_specs=P("data")
)
whole = lambda h, w, y: jaxmem.ops.softmax_cross_entropy(h, w, y, label_smoothing=0.1, z_loss=0.1)
of = lambda f: jax.jit(jax.value_and_grad(lambda h, w: f(h, w, labels).mean(), (0, 1)))
found, expected = of(split)(hidden, weights), of(whole)(hidden, weights)
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(one, other, 1e-10)
# Rows over devices, without a word about it:
rows = jax.sharding.NamedSharding(mesh, P("data"))
found = of(whole)(jax.device_put(hidden, rows), weights)
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(one, other, 1e-10)
print("equal")
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **flags}
    )
    assert done.stdout == "equal\n", done.stderr


def test_memory_is_that_of_inputs_and_gradients():
    hidden = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((1024, 65536), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)

    def compiled(loss):
        step = jax.jit(jax.value_and_grad(lambda h, w, y: loss(h, w, y).mean(), (0, 1)))
        return jaxmem.memory(step, hidden, weights, labels, target="h200")

    ours = compiled(softmax_cross_entropy)
    theirs = compiled(lambda h, w, y: plain(h, w, None, y))
    other_bytes = 2 * 2 * (hidden.size + weights.size)
    assert theirs.device > other_bytes + 2 * 4096 * 65536 * 2
    assert ours.device < other_bytes + 2 * 2**28
    assert ours.work.flops == pytest.approx(4 / 3 * theirs.work.flops, 1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": jnp.ones((50, 8))},
            r"takes hidden \[..., width\], weights \[width, vocabulary\] and labels \[...\]; got "
            r"hidden \[3, 7, 8\], weights \[50, 8\], labels \[3, 7\]. vocabulary_axis= tells",
        ),
        ({"labels": jnp.ones((3, 7))}, r"labels must be integers.*got float64. Of one-hot labels"),
        ({"labels": jnp.ones((21,), int)}, r"labels \[21\]"),
        ({"bias": jnp.ones(8)}, r"one number for each of the 50 columns of weights.* \[8\]"),
        ({"label_smoothing": 1.5}, "a share between 0 and 1; got 1.5"),
        ({"soft_cap": 0.0}, "soft_cap must be above 0, or None for no cap; got 0.0"),
        ({"vocabulary_axis": 2}, "the axis of weights, 0 or 1; got 2"),
        ({"block": (0, 8)}, r"rows and columns of at least 1; got \(0, 8\)"),
    ],
)
def test_refusals(arrays, changes, message):
    hidden, weights, _, labels = arrays
    given = {"hidden": hidden, "weights": weights, "labels": labels} | changes
    with pytest.raises(jaxmem.JaxmemError, match=message):
        softmax_cross_entropy(**given)


def test_no_rows_have_no_losses_and_no_columns_are_refused():
    def loss(hidden, weights):
        return jaxmem.ops.softmax_cross_entropy(hidden, weights, jnp.zeros(len(hidden), int))

    given = jnp.zeros((0, 7)), jnp.ones((7, 33))
    assert loss(*given).shape == (0,)
    gradients = jax.jit(jax.grad(lambda *x: loss(*x).sum(), (0, 1)))(*given)
    np.testing.assert_array_equal(gradients[1], jnp.zeros((7, 33)))
    np.testing.assert_allclose(loss(jnp.ones((2, 0)), jnp.ones((0, 5))), np.log(5), rtol=1e-6)
    with pytest.raises(
        jaxmem.JaxmemError, match=r"vocabulary of at least 1; the weights are \[7, 0"
    ):
        loss(jnp.ones((2, 7)), jnp.ones((7, 0)))
