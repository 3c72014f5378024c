"""Attention without the matrix of scores: equal to the plain one, and linear in the length."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.ops import attention

pytestmark = pytest.mark.slow


def plain(query, key, value, bias=None, mask=None, is_causal=False):
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, -2) for x in (key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btnd,bsnd->bnts", query, key).astype(wide) * query.shape[-1] ** -0.5

    def full(x):
        return jnp.broadcast_to(x.reshape((1,) * (4 - x.ndim) + x.shape), scores.shape)

    if bias is not None:
        scores += full(bias).astype(wide)
    if mask is not None:
        scores = jnp.where(full(mask), scores, -0.7 * float(np.finfo(wide).max))
    if is_causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(full(seen), scores, -jnp.inf)
    shares = jax.nn.softmax(scores, -1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", shares, value)


def arrays(queries, keys, heads, groups, bias=None, mask=None):
    seeds = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(seeds[0], (2, queries, heads, 4))
    key = jax.random.normal(seeds[1], (2, keys, groups, 4))
    value = jax.random.normal(seeds[2], (2, keys, groups, 4))
    bias = None if bias is None else jax.random.normal(seeds[3], bias)
    mask = None if mask is None else jax.random.uniform(seeds[4], mask) < 0.7
    return query, key, value, bias, mask


def assert_close(found, expected, rtol=1e-9):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol, atol=1e-11)


@pytest.mark.parametrize(
    ("sizes", "bias", "mask", "is_causal", "block"),
    [
        ((8, 8, 2, 2), None, None, False, None),
        ((10, 13, 4, 2), (1, 4, 10, 13), None, False, (4, 5)),
        ((10, 13, 4, 2), (2, 1, 1, 13), (10, 13), False, (4, 5)),
        ((32, 32, 4, 1), None, (2, 1, 32, 32), True, (4, 4)),
        ((30, 30, 2, 2), (2, 30, 30), None, True, (4, 4)),
        ((7, 12, 2, 1), None, None, True, (2, 2)),
        ((12, 7, 2, 1), None, None, True, (2, 2)),
    ],
    ids=["whole", "bias", "both", "causal", "causal, padded", "more keys", "more queries"],
)
def test_values_and_gradients_are_the_plain_ones(sizes, bias, mask, is_causal, block):
    query, key, value, bias, mask = arrays(*sizes, bias, mask)
    given = (query, key, value) if bias is None else (query, key, value, bias)

    def of(fun, **options):
        def loss(*given):
            given = (*given, None)[:4]
            return jnp.sin(fun(*given, mask, is_causal=is_causal, **options)).sum()

        return jax.jit(jax.value_and_grad(loss, range(len(given))))(*given)

    assert_close(of(attention, block=block), of(plain))


def test_forward_mode_and_second_derivatives():
    query, key, value, bias, _ = arrays(8, 8, 2, 1, (1, 2, 8, 8))
    given = query, key, value, bias
    along = tuple(map(jnp.cos, given))
    every = range(4)

    def of(fun, **options):
        def loss(*given):
            return jnp.sin(fun(*given, is_causal=True, **options)).sum()

        def both(*given):
            return jax.jvp(loss, given, along), jax.jvp(jax.grad(loss, every), given, along)[1]

        return jax.jit(both)(*given)

    assert_close(of(attention, block=(2, 2)), of(plain), 1e-7)


def test_under_vmap_scan_and_a_plan():
    query, key, value, *_ = arrays(8, 8, 2, 2)

    def layers(fun):
        def of(x):
            def layer(x, _):
                return x + fun(x, key, value), None

            return jnp.sin(jax.lax.scan(layer, x, None, length=3)[0]).sum()

        return of

    def mapped(fun):
        one = jax.vmap(lambda q: jnp.sin(fun(q[None], key[:1], value[:1])).sum())
        return lambda x: one(x).sum()

    def ours(*given):
        return attention(*given, block=(4, 4))

    def gradients(fun, planned):
        first = planned(lambda x: layers(fun)(jnp.tanh(x) * x))
        return jax.jit(jax.grad(lambda x: first(x) + mapped(fun)(x)))(query)

    assert_close(gradients(ours, jaxmem.remat), gradients(plain, lambda fun: fun))


@pytest.mark.parametrize(
    "wrap",
    [
        jax.checkpoint,
        lambda loss: jax.checkpoint(loss, policy=jaxmem.remat_policy(target="h200")),
        lambda loss: jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable),
        lambda loss: jaxmem.remat(loss, planner="sqrt"),
        lambda loss: jaxmem.remat(loss, planner="dots"),
    ],
    ids=["nothing", "policy", "dots_saveable", "sqrt", "dots"],
)
def test_with_the_loss_under_policies_and_planners(wrap):
    query, key, value, *_ = arrays(8, 8, 2, 2)
    weights = jnp.sin(jnp.arange(4.0 * 30).reshape(4, 30))
    labels = jnp.arange(2 * 8 * 2).reshape(2, 8, 2) % 30

    def loss(query, weights):
        hidden = attention(jnp.tanh(query), key, value, is_causal=True, block=(4, 4))
        return jaxmem.ops.softmax_cross_entropy(hidden, weights, labels, block=(8, 8)).mean()

    def gradients(loss):
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(query, weights)

    assert_close(gradients(wrap(loss)), gradients(loss))


def test_batches_and_heads_split_over_devices():
    """In a process of its own, with four CPU devices."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxmem.ops import attention
jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
spec = P("data", None, "model")
seeds = jax.random.split(jax.random.key(0), 3)
query, key, value = (jax.random.normal(s, (4, 12, n, 4)) for s, n in zip(seeds, (4, 2, 2)))

def whole(*x):
    return attention(*x, is_causal=True, block=(4, 4))

split = jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=spec)
of = lambda f: jax.jit(jax.value_and_grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1, 2)))
expected = of(whole)(query, key, value)
placed = jax.device_put((query, key, value), NamedSharding(mesh, spec))
for found in of(split)(query, key, value), of(whole)(*placed):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)
print("equal")
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **flags}
    )
    assert done.stdout == "equal\n", done.stderr


def test_it_is_jax_nn_dot_product_attention():
    query, key, value, bias, mask = (
        x if x.dtype == bool else x.astype(jnp.float32)
        for x in arrays(8, 12, 4, 2, (1, 4, 8, 12), (2, 1, 8, 12))
    )
    mask = mask.at[0, 0, 3].set(False)  # a query without a key attends to all alike
    ours = attention(query, key, value, bias, mask, scale=0.3)
    theirs = jax.nn.dot_product_attention(query, key, value, bias, mask, scale=0.3)
    np.testing.assert_allclose(ours, theirs, 1e-5, atol=1e-6)
    alone = attention(query[0], key[0], value[0])
    np.testing.assert_allclose(alone, attention(query, key, value)[0], 1e-6, atol=1e-7)


def test_cudnn_gets_what_attention_got(monkeypatch):
    """NVIDIA's kernel needs its GPU; that it is asked for as JAX asks does not."""
    seen = {}

    def kernel(*given, **options):
        seen.update(given=given, options=options)
        return given[0]

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    query, key, value, bias, mask = arrays(8, 12, 4, 2, (1, 4, 8, 12), (2, 1, 8, 12))
    out = attention(query, key, value, bias, mask, scale=0.3, implementation="cudnn")
    assert out is query
    assert seen == {
        "given": (query, key, value, bias, mask),
        "options": {"scale": 0.3, "is_causal": False, "implementation": "cudnn"},
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_are_no_larger_than_the_plain_ones(dtype):
    seeds = jax.random.split(jax.random.key(0), 3)
    given = [jax.random.normal(seed, (2, 64, 2, 16)).astype(dtype) for seed in seeds]

    def of(fun, *given):
        def loss(*given):
            return jnp.sin(
                fun(*given, is_causal=True).astype(jnp.promote_types(given[0].dtype, "float32"))
            ).sum()

        out = jax.jit(lambda *x: (fun(*x, is_causal=True), jax.grad(loss, (0, 1, 2))(*x)))(*given)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(out)]

    exact = of(plain, *(x.astype("float64") for x in given))
    usual = of(plain, *given)
    found = of(lambda *x, **how: attention(*x, **how, block=(16, 16)), *given)
    for right, one, other in zip(exact, found, usual, strict=True):
        rounding = np.sqrt((right**2).mean()) * float(jnp.finfo(jnp.float32).eps)
        error, plain_error = one - right, other - right
        assert np.sqrt((error**2).mean()) <= np.sqrt((plain_error**2).mean()) + rounding


def test_scores_of_any_size_and_of_none():
    query, key, value, *_ = (None if x is None else x.astype("float32") for x in arrays(4, 8, 1, 1))
    ours = jax.jit(lambda *x: attention(*x, block=(4, 4)))
    theirs = jax.jit(plain)
    for scale in (1e-30, 1e-15, 1.0, 1e15, 1e30):
        found = ours(query * scale, key, value)
        right = theirs(
            (query * scale).astype("float64"), key.astype("float64"), value.astype("float64")
        )
        np.testing.assert_allclose(found, right, 1e-5, atol=1e-6)
    never = jnp.zeros((1, 1, 4, 8), "float32").at[..., 4:].set(-jnp.inf).at[:, :, 1].set(-jnp.inf)
    bad = query.at[0, 0].set(jnp.nan).at[1, 2].set(jnp.inf)
    found = ours(bad, key, value, never)
    np.testing.assert_allclose(found, theirs(bad, key, value, never), 1e-5, atol=1e-6)
    assert jnp.isnan(found[:, 1]).all() and jnp.isnan(found[0, 0]).all()


def test_memory_is_linear_in_the_length():
    def compiled(fun, length, is_causal):
        shape = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)
        step = jax.jit(
            jax.value_and_grad(
                lambda q, k, v: fun(q, k, v, is_causal=is_causal).astype("float32").sum(), (0, 1, 2)
            )
        )
        return jaxmem.memory(step, shape, shape, shape, target="h200")

    usual = compiled(jax.nn.dot_product_attention, 8192, False)
    for is_causal, work in (False, 1.17), (True, 0.7):
        short, long = (compiled(attention, length, is_causal) for length in (4096, 8192))
        assert long.device < 2 * short.device
        assert long.device < 0.1 * usual.device
        assert long.work.flops < work * usual.work.flops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": jnp.ones((2, 8, 2, 5))}, r"key heads, width\].*; got .*key \[2, 8, 2, 5\]"),
        ({"value": jnp.ones((8, 2, 4))}, r"of one number of axes.*value \[8, 2, 4\]"),
        ({"query": jnp.ones((2, 8, 3, 4))}, "a multiple of those of key; got 3 and 2"),
        ({"key": jnp.ones((2, 8, 2, 4), "float32")}, "one dtype; got float64, float32 and float64"),
        (
            {"bias": jnp.ones((8, 7))},
            r"bias must broadcast to .*\[2, 2, 8, 8\]; its shape is \[8, 7\]",
        ),
        ({"mask": jnp.ones((8, 8))}, "mask must be bool.*got float64. What is added"),
        ({"implementation": "triton"}, "implementation is None, 'xla' or 'cudnn'; got 'triton'"),
        ({"block": (0, 1)}, "at least 1"),
    ],
)
def test_refusals(changes, message):
    given = dict.fromkeys(("query", "key", "value"), jnp.ones((2, 8, 2, 4))) | changes
    with pytest.raises(jaxmem.JaxmemError, match=message):
        attention(**given)


def seen(length, keys):
    places = jnp.arange(keys)[None]
    yield "left", (places >= jnp.array([[keys // 2], [1]]))[:, None, None]
    yield "no query", jnp.ones((1, 1, length, keys), bool).at[:, :, 1].set(False)
    yield "nothing", jnp.zeros((1, 1, 1, 1), bool)
    yield "all", None


@pytest.mark.parametrize("low", [0.0, -jnp.inf, jnp.finfo("float64").min])
@pytest.mark.parametrize(("length", "keys"), [(5, 7), (7, 5)])
def test_queries_that_see_no_key_before_them_are_as_in_jax(length, keys, low):
    """With a mask or a bias of left padding; keys behind them count then."""
    random = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(random[0], (2, length, 2, 4), "float64")
    key, value = (jax.random.normal(one, (2, keys, 1, 4), "float64") for one in random[1:])
    bias = jnp.where(jnp.arange(keys) < 2, low, 0.0)[None, None, None]
    bias = jnp.broadcast_to(bias.astype("float64"), (1, 1, length, keys))
    for _, mask in seen(length, keys):

        def loss(attend, query, key, value, bias, mask=mask, **options):
            return jnp.sin(attend(query, key, value, bias, mask, is_causal=True, **options)).sum()

        given = query, key, value, bias
        every = (0, 1, 2, 3)
        found, expected = (
            jax.jit(jax.value_and_grad(functools.partial(loss, attend, **options), every))(*given)
            for attend, options in (
                (jaxmem.ops.attention, {"block": (2, 3)}),
                (jax.nn.dot_product_attention, {}),
            )
        )
        # JAX itself sums scores in float32.
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("query", "keys", "width"),
    [((0, 3, 2, 4), 3, 4), ((2, 0, 2, 4), 3, 4), ((2, 3, 2, 4), 0, 4)],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_arrays_of_no_elements_are_as_in_jax(query, keys, width, is_causal):
    query = jnp.ones(query)
    key, value = (jnp.ones((len(query), keys, 2, size)) for size in (4, width))
    attends = jaxmem.ops.attention, jax.nn.dot_product_attention
    found, expected = (attend(query, key, value, is_causal=is_causal) for attend in attends)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


def test_attention_over_no_width_is_refused():
    nothing = jnp.ones((3, 2, 0))
    with pytest.raises(jaxmem.JaxmemError, match="of a width of at least 1; got query"):
        jaxmem.ops.attention(nothing, nothing, nothing)
