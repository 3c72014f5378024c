"""Each operation in its dtype, gradients too, and no copy of the parameters in between."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_derivatives import SymbolicZero

import jaxmem
from jaxmem.levers.mixed_precision.rules import RULES

LOW = [("bf16", jnp.bfloat16), ("fp16", jnp.float16)]


def close(found, expected, tolerance=2e-2):
    """Equal to low precision, by the size of each array."""

    def check(found, expected):
        assert found.dtype == expected.dtype
        size = np.max(np.abs(expected)) + 1e-12
        np.testing.assert_allclose(found / size, expected / size, atol=tolerance)

    jax.tree.map(check, found, expected)


def arrays(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def operations(fun, *args):
    """``(name, dtypes of operands, dtypes of results)`` of all operations, those inside too."""
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            ins, outs = (
                [v.aval.dtype for v in part if v.aval.shape]
                for part in (equation.invars, equation.outvars)
            )
            found.append((equation.primitive.name, ins, outs))
            for value in equation.params.values():
                for item in value if isinstance(value, tuple) else (value,):
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


def attention(params, x):
    """A block of a transformer, and its loss."""
    q, k, v = (x @ params[name] for name in "qkv")
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4, axis=-1)
    x = x + weights @ v
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"]
    x = jax.nn.gelu(x @ params["up"] + params["bias"][None, None])
    logits = x @ params["down"]
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def attention_arguments():
    shapes = dict.fromkeys("qkv", (8, 8)) | {"up": (8, 16), "bias": (16,), "down": (16, 8)}
    params = dict(zip(shapes, arrays(*shapes.values()), strict=True))
    params["scale"] = jnp.ones((1, 1, 8), jnp.float32)
    return params, arrays((2, 4, 8))[0]


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_each_operation_works_in_the_dtype_of_its_list(precision, dtype):
    gradient = jax.value_and_grad(jaxmem.autocast(attention, precision))
    found = operations(gradient, *attention_arguments())
    names = {name for name, *_ in found}
    assert {"dot_general", "exp", "log", "reduce_sum", "rsqrt", "tanh", "sub"} <= names
    for name, operands, results in found:
        if RULES.get(name) == "compute":
            assert set(operands) == set(results) == {jnp.dtype(dtype)}, name
        if RULES.get(name) == "float32":
            assert dtype not in operands + results, name
    expected = jax.jit(jax.value_and_grad(attention))(*attention_arguments())
    close(jax.jit(gradient)(*attention_arguments()), expected, 6e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gradient_function_is_cast_like_the_gradient_of_a_cast_one(precision):
    args = attention_arguments()
    cast = jax.jit(jax.grad(jaxmem.autocast(attention, precision)))(*args)
    close(jax.jit(jaxmem.autocast(jax.grad(attention), precision))(*args), cast)
    assert jax.tree.leaves(cast)[0].dtype == jnp.float32


def test_softmax_and_losses_see_no_low_precision():
    """Of logits so near to each other that bfloat16 cannot tell the differences."""

    def loss(x, w):
        return -jax.nn.log_softmax(x @ w + 300.0)[:, 0].sum()

    x, w = jnp.eye(4, dtype=jnp.float32), jnp.zeros((4, 8), jnp.float32)
    np.testing.assert_allclose(jaxmem.autocast(loss, "bf16")(x, w), 4 * np.log(8), rtol=1e-6)
    wide = jaxmem.autocast(lambda x, w: jax.nn.softmax(x @ w), "bf16")
    subtracted = [ins for name, ins, _ in operations(wide, x, w) if name == "sub"]
    assert subtracted == [[jnp.float32, jnp.float32]]


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_matmuls_add_up_in_float32(precision, dtype):
    """4096 ones and one of 1/8: fp16 alone would stop at 2048, bf16 alone at 256."""
    ones = jnp.ones((1, 4096), jnp.float32)
    dot = jaxmem.autocast(lambda x, w: x @ w, precision)
    np.testing.assert_array_equal(dot(ones, ones.T), 4096)
    assert operations(dot, ones, ones.T)[-1][1] == [dtype]
    total = jaxmem.autocast(lambda x, w: (x @ w).sum(), precision)
    np.testing.assert_array_equal(total(jnp.ones((4096, 1)), jnp.ones((1, 1), "float32")), 4096)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_matmul_that_sums_nothing_is_a_product(precision):
    """As the angles of rotary embeddings are written: positions are no 16-bit numbers."""

    def angles(positions, frequencies):
        return jnp.einsum("i,j->ij", positions, frequencies)

    def batched(a, b):
        return jnp.einsum("bi,bj->bij", a, b)

    positions, frequencies = jnp.arange(5000.0, dtype="float32"), jnp.ones(3, "float32") / 7
    found = jaxmem.autocast(angles, precision)(positions, frequencies)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, angles(positions, frequencies))
    pairs = jnp.ones((2, 3), "float32"), jnp.ones((2, 4), "float32") / 3
    np.testing.assert_array_equal(jaxmem.autocast(batched, precision)(*pairs), batched(*pairs))

    def of_a_matmul(w, x):
        return jax.nn.relu(batched(x @ w, x @ w)) @ w

    jaxpr = jax.make_jaxpr(jaxmem.autocast(of_a_matmul, precision))(
        jnp.ones((4, 4), "float32"), pairs[1]
    )
    products = [
        (equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype)
        for equation in jaxpr.eqns
        if equation.primitive.name == "dot_general"
        and not equation.params["dimension_numbers"][0][0]
    ]
    assert products == [(jnp.bfloat16 if precision == "bf16" else jnp.float16,) * 2]


def test_what_follows_takes_the_dtype_of_its_inputs():
    def fun(x, w, bias, mask):
        y = x @ w + bias[None]  # low: a bias does not widen
        y = jnp.where(mask, y * 0.5, 0.0)  # low: nor do scalars
        return x * 2.0, jnp.concatenate([y, y]), y + x, jnp.maximum(y, 0.0).T

    x, w, bias = arrays((4, 4), (4, 4), (4,))
    outputs = jaxmem.autocast(fun, "params=float32,compute=bf16,output=bf16")
    adds = [outs[0] for name, _, outs in operations(outputs, x, w, bias, x > 0) if name == "mul"]
    assert adds == [jnp.bfloat16, jnp.float32]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in outputs(x, w, bias, x > 0))


def test_a_scalar_that_the_dtype_cannot_hold_keeps_float32():
    """-1e9 in float16 is -inf, and a row of nothing else would be NaN."""

    def fun(x, w, mask):
        return jax.nn.softmax(jnp.where(mask, x @ w, -1e9))

    x, w = arrays((4, 4), (4, 4))
    assert np.isfinite(jaxmem.autocast(fun, "fp16")(x, w, jnp.zeros((4, 4), bool))).all()


@pytest.mark.parametrize(("precision", "dtype"), LOW)
def test_a_norm_is_rounded_once(precision, dtype):
    """At its end, as PyTorch's batch norm: what it does is float32 in between."""
    x, w, mean, scale, bias = arrays((64, 32), (32, 48), (1, 48), (1, 48), (1, 48))

    def norm(x, w, mean, scale, bias):
        return jax.nn.relu((x @ w - mean) * scale + bias)

    cast = jaxmem.autocast(norm, f"compute={precision},output={precision}")

    def by_hand(x, w, mean, scale, bias):
        product = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
        return jax.nn.relu(((product - mean) * scale + bias).astype(dtype))

    found, expected = (jax.jit(f)(x, w, mean, scale, bias) for f in (cast, by_hand))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


def test_masks_are_not_applied_in_float32():
    """A select of float32 is not worth keeping to XLA: it keeps the mask, a byte a value."""

    def loss(w, x):
        return jnp.sum(jax.nn.relu(jax.nn.relu(x @ w) @ w))

    w, x = arrays((32, 32), (64, 32))
    found = operations(jax.grad(jaxmem.autocast(loss, "bf16")), w, x)
    selects = [outs for name, _, outs in found if name == "select_n"]
    assert len(selects) == 2 and all(outs == [jnp.bfloat16] for outs in selects)


def test_what_is_cast_keeps_its_line_and_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.LayerNorm()(nn.Dense(32)(x)))
            return nn.Dense(8)(x) + 0 * nn.Dense(8)(x)

    model, x = Net(), jnp.ones((16, 8), jnp.float32)
    params = model.init(jax.random.key(0), x)
    cast = jaxmem.autocast(lambda params, x: jnp.sum(model.apply(params, x) ** 2), "bf16")
    kept = [one for one in jaxmem.residuals(cast, params, x) if not one.is_argument and one.shape]
    assert kept and all("test_autocast.py" in one.source for one in kept)
    report = jaxmem.memory(jax.grad(cast), params, x, target="h200")
    for rows in (report.by_source, report.by_module, report.by_phase):
        assert rows.get("(not attributed)", 0) <= 0.02 * report.peak_bytes


def test_float64_and_explicit_casts_are_left_alone():
    def fun(x, w):
        return x @ w, (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    wide = [x.astype(jnp.float64) for x in arrays((4, 4), (4, 4))]
    found = jaxmem.autocast(fun, "fp16")(*wide)
    np.testing.assert_array_equal(found[0], fun(*wide)[0])
    assert found[0].dtype == jnp.float64
    low = [
        dtypes
        for name, _, dtypes in operations(jaxmem.autocast(fun, "fp16"), *arrays((4, 4), (4, 4)))
        if name == "dot_general"
    ]
    assert low == [[jnp.float16], [jnp.bfloat16]]


def test_integers_keys_and_other_leaves_pass():
    def fun(table, index, key, name):
        assert name == "text"
        kept = jax.random.bernoulli(key, 0.5, (3, 4))
        return (table @ table)[index] * kept, index + 1, jax.random.key_data(key)

    args = (*arrays((4, 4)), jnp.arange(3), jax.random.key(0), "text")
    found, expected = jaxmem.autocast(fun, "bf16")(*args), fun(*args)
    close(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[2], expected[2])


# ---- what holds jaxprs of its own


def scanned(w, x):
    def body(x, row):
        x = jnp.tanh(x @ w)
        return x, x @ row

    x, rows = jax.lax.scan(body, x, jnp.stack([w, 2 * w]), unroll=2)
    x, reverse = jax.lax.scan(body, x, jnp.stack([w, 2 * w]), reverse=True)
    return x.sum() + rows.mean() + (reverse[0] ** 2).mean()


def carried_low(w, x):
    """The carry starts low, and the body widens it."""
    x = jax.lax.fori_loop(0, 3, lambda i, x: x + 0.1 * jnp.exp(-(x @ w)), x @ w)
    return x.mean()


def branched(w, x):
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ w, jnp.exp, x)
    return jax.lax.switch(1, [jnp.sin, lambda x: jnp.tanh(x @ w)], x).mean()


def checkpointed(w, x):
    policy = jax.checkpoint_policies.dots_saveable
    x = jax.checkpoint(lambda x: jnp.tanh(x @ w), policy=policy)(x)
    return jax.checkpoint(lambda x, w: jnp.sin(x @ w).mean())(x, w)


@jax.custom_jvp
def doubled(x, n):
    return jnp.sin(x) * n


@doubled.defjvp
def _(primals, tangents):
    x, n = primals
    return doubled(x, n), 2 * jnp.cos(x) * tangents[0] * n  # twice its derivative: a mark


def with_custom_jvp(w, x):
    return jax.nn.relu(doubled(jax.nn.silu(x @ w), 3) @ w).mean()


@jax.custom_vjp
def tripled(x, w, n):
    return jnp.tanh(x @ w) * n


def _forward(x, w, n):
    return tripled(x, w, n), (x, w, n)


def _backward(kept, cotangent):
    x, w, n = kept
    inner = 3 * cotangent * (1 - jnp.tanh(x @ w) ** 2) * n  # three times its derivative
    return inner @ w.T, x.T @ inner, None


tripled.defvjp(_forward, _backward)


def with_custom_vjp(w, x):
    return tripled(tripled(x, w, 2), w, 1).mean()


TABLE = np.arange(4.0, dtype=np.float32)[None]


@jax.custom_vjp
def closing(x, n):
    return x * jnp.asarray(TABLE), jnp.argmax(x) + n


def _closing_forward(x, n):
    return closing(x, n), None


def _closing_backward(_, cotangents):
    return 2 * cotangents[0] * jnp.asarray(TABLE), None  # twice its derivative: a mark


closing.defvjp(_closing_forward, _closing_backward)


def with_closed_over_arrays(w, x):
    """A rule that closes over an array, and an integer result."""
    return (closing(x @ w, 1)[0] @ w).mean()


@jax.custom_vjp
def particular(x, y):
    return x * y


def _particular_forward(x, y):
    assert (x.perturbed, y.perturbed) == (True, False), "only what is differentiated"
    return particular(x.value, y.value), y.value


particular.defvjp(_particular_forward, lambda y, g: (3 * g * y, None), symbolic_zeros=True)


def with_a_rule_that_refuses(w, x):
    """As Equinox's loops and diffrax's adjoints do: an error if more is differentiated."""
    return (particular(x @ w, jnp.sum(x, 1, keepdims=True)) @ w).mean()


@jax.custom_jvp
def choosy(x, y):
    return x * y


def _choosy_rule(primals, tangents):
    assert not isinstance(tangents[0], SymbolicZero)
    assert isinstance(tangents[1], SymbolicZero), "only what is differentiated"
    return primals[0] * primals[1], 5 * tangents[0] * primals[1]


choosy.defjvp(_choosy_rule, symbolic_zeros=True)


def with_a_jvp_that_refuses(w, x):
    return (choosy(x @ w, jnp.sum(x, 1, keepdims=True)) @ w).mean()


def segments(w, x):
    """What every graph network does."""
    to = jnp.asarray([0, 1, 0])
    summed = jax.ops.segment_sum(x @ w, to, 2) @ w
    return (summed + jnp.zeros((2, 4), jnp.float32).at[to].add(x @ w) @ w).mean()


def jitted(w, x):
    return jax.jit(lambda x: jax.jit(jnp.dot)(x, w))(x).mean()


NESTED = [
    scanned,
    carried_low,
    branched,
    checkpointed,
    with_custom_jvp,
    with_custom_vjp,
    with_closed_over_arrays,
    with_a_rule_that_refuses,
    with_a_jvp_that_refuses,
    segments,
    jitted,
]


@pytest.mark.parametrize("fun", NESTED)
@pytest.mark.parametrize("order", ["value", "gradient of cast", "cast of gradient"])
def test_recurses(fun, order):
    if fun is carried_low and order != "value":
        pytest.skip("a while loop has no reverse derivative")
    w, x = arrays((4, 4), (3, 4))
    w = w / 2
    plain = fun if order == "value" else jax.grad(fun)
    cast = jaxmem.autocast(fun if order != "cast of gradient" else plain, "bf16")
    cast = jax.grad(cast) if order == "gradient of cast" else cast
    found = [set(outs) for name, _, outs in operations(cast, w, x) if name == "dot_general"]
    assert found and all(dtypes == {jnp.dtype(jnp.bfloat16)} for dtypes in found)
    close(jax.jit(cast)(w, x), jax.jit(plain)(w, x), 4e-2)


def test_under_vmap_scan_jit_and_twice_differentiated():
    w, xs = arrays((4, 4), (5, 3, 4))
    fun = jaxmem.autocast(lambda x: jax.nn.softmax(x @ w).max(), "bf16")
    expected = jax.vmap(lambda x: jax.nn.softmax(x @ w).max())(xs)
    close(jax.vmap(fun)(xs), expected)
    close(jax.jit(lambda xs: jax.lax.map(fun, xs))(xs), expected)
    hessian = jax.jacfwd(jax.grad(jaxmem.autocast(lambda x: jnp.tanh(x @ w).sum(), "bf16")))
    close(hessian(xs[0]), jax.jacfwd(jax.grad(lambda x: jnp.tanh(x @ w).sum()))(xs[0]), 4e-2)


def test_a_checkpoint_that_was_differentiated_keeps_its_barriers():
    w, x = arrays((4, 4), (3, 4))
    text = jax.jit(jaxmem.autocast(jax.grad(checkpointed), "bf16")).lower(w, x).as_text()
    assert "optimization_barrier" in text


# ---- sums in loops


def by_fori(w, x):
    return jax.lax.fori_loop(0, len(x), lambda i, c: c + x[i] @ w, (x[0] @ w) * 0)


def by_scan(w, x):
    return jax.lax.scan(lambda c, row: (c + row @ w, None), (x[0] @ w) * 0, x)[0]


def by_while(w, x):
    def add(state):
        return state[0] + 1, state[1] + x[state[0]] @ w

    return jax.lax.while_loop(lambda state: state[0] < len(x), add, (0, (x[0] @ w) * 0))[1]


def of_what_was_low_before(w, x):
    y = x @ w
    return jax.lax.fori_loop(0, len(x), lambda i, c: y[i] + c, y[0] * 0)


def in_a_loop_of_a_loop(w, x):
    def outer(c, rows):
        return jax.lax.scan(lambda c, row: (c + row @ w, None), c, rows)[0], None

    return jax.lax.scan(outer, (x[0] @ w) * 0, x.reshape(30, -1, 4))[0]


def in_regions_and_branches(w, x):
    @jax.checkpoint
    def add(c, row):
        return jax.lax.cond(row[0] > 0, lambda c: c + jax.nn.relu(row @ w), lambda c: c, c)

    return jax.lax.scan(lambda c, row: (add(c, row), None), (x[0] @ w) * 0, x)[0]


def by_turns(w, x):
    """Two carries that change places; each has half of the sum."""

    def body(carry, row):
        return (carry[1], carry[0] + row @ w), None

    start = (x[0] @ w) * 0
    return sum(jax.lax.scan(body, (start, start), x)[0])


def where_chosen(w, x):
    def body(c, row):
        new = jnp.maximum(c + row @ w, 0.0)
        return jnp.where(jnp.isfinite(new), new, c), None

    return jax.lax.scan(body, (x[0] @ w) * 0, x)[0]


def of_a_buffer(w, x):
    def body(i, buffer):
        return jax.lax.dynamic_update_slice(buffer, buffer[1:2] + (x[i] @ w)[None], (1, 0))

    return jax.lax.fori_loop(0, len(x), body, (x[:3] @ w) * 0)[1]


def beside_a_chain(w, x):
    """The carry beside it is no sum, and is read by it."""

    def body(carry, row):
        h, c = carry
        h = jnp.tanh(h @ w + row)
        return (h, c + jnp.round(h)), None

    start = x[0] @ w
    return jax.lax.scan(body, (start, start * 0), x)[0][1]


SUMS = [
    by_fori,
    by_scan,
    by_while,
    of_what_was_low_before,
    in_a_loop_of_a_loop,
    in_regions_and_branches,
    by_turns,
    where_chosen,
    of_a_buffer,
    beside_a_chain,
]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("fun", SUMS)
def test_a_sum_in_a_loop_does_not_stop(fun, precision):
    w, x = jnp.eye(4, dtype=jnp.float32), jnp.ones((3000, 4), jnp.float32)
    np.testing.assert_array_equal(jax.jit(fun)(w, x), 3000)
    np.testing.assert_array_equal(jax.jit(jaxmem.autocast(fun, precision))(w, x), 3000)


def test_a_moving_average_in_a_loop_moves():
    """0.999 is 1 in bfloat16."""

    def average(w, x):
        start = x[0] @ w
        return jax.lax.scan(lambda c, row: (0.999 * c + 0.001 * (row @ w), None), start, 0 * x)[0]

    w, x = jnp.eye(4, dtype=jnp.float32), jnp.ones((1000, 4), jnp.float32)
    found = jax.jit(jaxmem.autocast(average, "bf16"))(w, x)
    np.testing.assert_allclose(found, 0.999**1000, rtol=1e-4)


def test_the_sums_of_a_blockwise_softmax_are_in_float32():
    def attend(w, x):
        def block(carry, rows):
            most, total, out = carry
            scores = (x @ w) @ rows.T
            new = jnp.maximum(most, scores.max(-1, keepdims=True))
            shares, old = jnp.exp(scores - new), jnp.exp(most - new)
            total = total * old + shares.sum(-1, keepdims=True)
            return (new, total, out * old + shares @ rows), None

        zero = (x @ w) * 0
        start = zero[:, :1] - 10.0, zero[:, :1], zero
        (_, total, out), _ = jax.lax.scan(block, start, x.reshape(-1, 2, 4))
        return out / total

    w, x = arrays((4, 4), (8, 4))
    (carry,) = (
        outs
        for name, _, outs in operations(jaxmem.autocast(attend, "bf16"), w, x)
        if name == "scan"
    )
    assert carry == [jnp.bfloat16, jnp.float32, jnp.float32]
    close(jax.jit(jaxmem.autocast(attend, "bf16"))(w, x), attend(w, x))


def residual(x, w):
    return x + jnp.tanh(x @ w)


def norm_first(x, w):
    return x + 0.1 * jax.nn.relu(jax.nn.standardize(x) @ w)


def no_sum(x, w):
    return x @ w


@pytest.mark.parametrize("layer", [residual, norm_first, jax.checkpoint(residual), no_sum])
def test_the_stream_of_a_scan_over_layers_stays_short(layer):
    """What it keeps for the backward pass is where the memory is saved."""

    def model(w, x):
        layers = jnp.stack([w] * 3)
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x @ w, layers)[0].mean()

    w, x = arrays((4, 4), (8, 4))
    found = operations(jaxmem.autocast(model, "bf16"), w, x)
    assert [outs for name, _, outs in found if name == "scan"] == [[jnp.bfloat16]]


# ---- memory


def test_no_low_precision_copy_of_the_parameters_lives_through_the_step():
    """24 layers of 2 MiB in bfloat16; the cast of the whole tree keeps all of them, and one
    layer's activation is 1/8 of that."""
    width, layers = 1024, 24

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((128, width), jnp.float32)
    bf16 = jaxmem.precision("bf16")

    def whole_tree(params, x):
        return loss(*bf16.cast_to_compute((params, x)))

    temps = {}
    for name, fun in (("tree", whole_tree), ("autocast", jaxmem.autocast(loss, "bf16"))):
        step = jaxmem.train_step(fun, optax.sgd(0.1))
        state = jaxmem.eval_shape(step.init, params)
        temps[name] = step.memory(state, x, target="h200").temp
    copy = layers * width * width * 2
    assert temps["tree"] > copy
    assert temps["autocast"] < temps["tree"] - 0.8 * copy, temps


# ---- rules and errors


def test_the_lists_can_be_changed():
    w, x = arrays((4, 4), (3, 4))

    def fun(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    for rule, dtype in (("float32", jnp.float32), ("follow", jnp.bfloat16)):
        found = operations(jaxmem.autocast(fun, "bf16", rules={"tanh": rule}), w, x)
        assert next(ins for name, ins, _ in found if name == "tanh") == [dtype]
    wide = operations(jaxmem.autocast(fun, "bf16", rules={"dot_general": "float32"}), w, x)
    assert all(jnp.bfloat16 not in ins for _, ins, _ in wide)


def test_sums_of_segments_are_in_float32():
    """In bfloat16 256 + 1 is 256."""

    def degree(w, x):
        return (jax.ops.segment_sum(x @ w, jnp.zeros(len(x), int), 1) @ w)[0, 0]

    w, x = jnp.eye(2, dtype=jnp.float32), jnp.ones((1000, 2), jnp.float32)
    for cast in (degree, jaxmem.autocast(degree, "bf16")):
        assert jax.jit(cast)(w, x) == 1000
    rules = {"scatter-add": "follow"}
    assert jax.jit(jaxmem.autocast(degree, "bf16", rules=rules))(w, x) == 256


def test_other_combinations_of_numbers_run_in_low_precision_where_asked():
    """What holds a jaxpr that was traced for float32."""
    w, x = arrays((4, 4), (4, 4))
    window = {"window_dimensions": (2, 2), "window_strides": (1, 1), "padding": "SAME"}
    programs = {
        "scatter-max": lambda w, x: (x @ w).at[0].max((x @ w)[1]),
        "reduce_window": lambda w, x: jax.lax.reduce_window(
            x @ w, jnp.float32(1), lambda x, y: x * y + 0.0, **window
        ),
        "reduce": lambda w, x: jax.lax.reduce(
            x @ w, jnp.float32(1), lambda x, y: x * y + 0.0, (0,)
        ),
    }
    for name, inner in programs.items():

        def fun(w, x, inner=inner):
            return jnp.sum(inner(w, x) @ w)  # what a sum reads is computed in float32

        cast = jaxmem.autocast(fun, "bf16", rules={name: "follow"})
        ins = next(ins for found, ins, _ in operations(cast, w, x) if found == name)
        assert jnp.dtype(jnp.bfloat16) in ins and jnp.dtype(jnp.float32) not in ins
        close(jax.jit(cast)(w, x), fun(w, x), 4e-2)


def test_a_rule_that_reads_a_tracer_is_refused_with_its_line():
    def fun(w, x):
        table = jnp.sum(x)

        @jax.custom_vjp
        def scaled(x):
            return x * 2

        scaled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * table,))
        return scaled(x @ w).sum()

    w, x = arrays((4, 4), (3, 4))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jax.grad(jaxmem.autocast(fun, "bf16"))(w, x)
    assert "The derivative rule of custom_vjp_call at test_autocast.py:" in str(caught.value)
    assert "Make the value an argument of the function that has the rule." in str(caught.value)


def test_fp32_is_the_function_itself():
    assert jaxmem.autocast(attention, "fp32") is attention


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((1, "bf16"), {}, "jaxmem.autocast takes a function; got 1."),
        ((len, "fp64"), {}, "computes in bfloat16 or float16; got params=float32,compute=float64"),
        ((len, "half a float"), {}, "The precision 'half a float' does not parse"),
        ((len, "bf16"), {"rules": {"tanh": "low"}}, "gives 'tanh' the rule 'low'; the rules are"),
        ((len, "bf16"), {"rules": {"tanh": "compute"}}, "which is for matmuls and convolutions"),
        (
            (len, "bf16"),
            {"rules": {"tahn": "float32"}},
            "a rule for 'tahn', and JAX has no operation of that name: ",
        ),
        ((jnp.ones(999), "bf16"), {}, "takes a function; got an array float64[999]."),
    ],
)
def test_bad_arguments(args, options, said):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.autocast(*args, **options)
    assert said in str(caught.value)


def test_an_unmodified_flax_model_with_batch_norm():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.BatchNorm(False)(nn.Conv(8, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2)) + nn.avg_pool(x, (2, 2))
            return nn.Dense(3)(nn.LayerNorm()(x.mean((1, 2))))

    model, (x,) = Model(), arrays((2, 8, 8, 3))
    variables = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params, x):
        logits, new = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return jnp.mean(logits**2), new

    plain = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], x)
    cast = jax.value_and_grad(jaxmem.autocast(loss, "bf16"), has_aux=True)
    (found, state), gradients = jax.jit(cast)(variables["params"], x)
    np.testing.assert_allclose(found, plain[0][0], rtol=2e-2)
    close(state, plain[0][1])
    norms = optax.tree.norm(jax.tree.map(jnp.subtract, gradients, plain[1]))
    assert norms < 0.05 * optax.tree.norm(plain[1])
    rectified = [
        outs[0]
        for name, _, outs in operations(cast, variables["params"], x)
        if name == "max" and outs
    ]
    assert jnp.bfloat16 in rectified


ANGLES = {
    "of one element": lambda position, rates: position[:, None] @ rates[None],
    "in batches": lambda position, rates: (rates[None, :, None] @ position[None, None])[0].T,
    "by einsum": lambda position, rates: jnp.einsum("ti,if->tf", position[:, None], rates[None]),
}


@pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES)
def test_a_matmul_that_sums_one_product_is_a_product(angles):
    """The angles of rotary embeddings are often written so: in bfloat16 positions would be rounded
    to multiples of 8."""

    def embedding(position):
        return jnp.cos(angles(position, 10000.0 ** (-jnp.arange(4, dtype=jnp.float32) / 4)))

    positions = jnp.arange(2000, dtype=jnp.float32)
    assert (jaxmem.autocast(embedding, "bf16")(positions) == embedding(positions)).all()


def test_what_asks_for_exact_products_has_them():
    w, x = arrays((16, 16), (8, 16))

    def exact(x):
        return jax.lax.dot(x, w, precision=jax.lax.Precision.HIGHEST)

    cast = jaxmem.autocast(exact, "bf16")
    assert (cast(x) == exact(x)).all()
    with jax.default_matmul_precision("highest"):  # that is asked of all, which autocast changes
        assert (jaxmem.autocast(lambda x: x @ w, "bf16")(x) != x @ w).any()


def test_real_by_complex_matmuls_stay_as_they_are():
    w, x = arrays((4, 4), (3, 4))

    def spectrum(x):
        return jnp.abs(x @ (w + 1j * w.T)).sum()

    cast = jaxmem.autocast(spectrum, "bf16")
    assert cast(x) == spectrum(x)
    np.testing.assert_array_equal(jax.grad(cast)(x), jax.grad(spectrum)(x))


@pytest.mark.parametrize("turns", [8, 1000])
def test_small_steps_of_a_long_loop_are_not_lost(turns):
    """A neural ODE that starts from a matmul's result: its steps are less than bfloat16 tells
    apart. A loop over a few layers keeps the dtype that it starts in."""
    w, x = arrays((16, 16), (8, 16))

    def solved(w, x):
        def turn(h, _):
            return h + jnp.tanh(h @ w) / turns, None

        return jax.lax.scan(turn, x @ w, None, turns)[0]

    found = jaxmem.autocast(solved, "bf16")
    (loop,) = [e for e in jax.make_jaxpr(found)(w, x).eqns if e.primitive.name == "scan"]
    carried = loop.outvars[0].aval.dtype
    assert carried == (jnp.float32 if turns > 256 else jnp.bfloat16)
    np.testing.assert_allclose(found(w, x), solved(w, x), atol=0.1)


def test_small_steps_of_loops_in_loops_are_not_lost():
    """A thousand steps as 32 times 32, with a region round each 32: that saves memory."""
    w, x = arrays((16, 16), (8, 16))

    @jax.checkpoint
    def turns(h):
        return jax.lax.scan(lambda h, _: (h + jnp.tanh(h @ w) / 1024, None), h, None, 32)[0]

    def solved(x):
        return jax.lax.scan(lambda h, _: (turns(h), None), x @ w, None, 32)[0]

    np.testing.assert_allclose(jaxmem.autocast(solved, "bf16")(x), solved(x), atol=0.1)


def test_convolutions_and_ragged_matmuls_of_one_product_are_products():
    image, kernel = arrays((2, 5, 5, 1), (1, 1, 1, 3))
    rows, weights = arrays((6, 1), (2, 1, 4))
    sizes = jnp.array([2, 4])

    def scaled(image, kernel):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", None, None, dimensions)

    def grouped(rows, weights):
        return jax.lax.ragged_dot(rows, weights, sizes)

    for fun, args in ((scaled, (image, kernel)), (grouped, (rows, weights))):
        found = jaxmem.autocast(fun, "bf16")(*args)
        np.testing.assert_allclose(found, fun(*args), rtol=1e-6)


@pytest.mark.parametrize("read", ["itself", "beside the count", "by a flag"])
def test_a_fixed_point_is_found(read):
    """In bfloat16 two rounds differ by more than that for ever."""
    w = 0.4 * jax.random.orthogonal(jax.random.key(0), 32, dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (8, 32), jnp.float32)

    def loss(w, x):
        def is_far(one, other):
            return jnp.max(jnp.abs(one - other)) > 1e-6

        def far(state):
            count, one, other, flag = state
            off = flag if read == "by a flag" else is_far(one, other)
            return off & (count < 500) if read == "beside the count" else off

        def turn(state):
            new = jnp.tanh(state[1] @ w + x)
            return state[0] + 1, new, state[1], is_far(new, state[1])

        turns, fixed, *_ = jax.lax.while_loop(far, turn, (0, x, x + 1, True))
        return turns, fixed, fixed @ w

    turns, fixed, product = jax.jit(jaxmem.autocast(loss, "bf16"))(w, x)
    expected = jax.jit(loss)(w, x)
    assert turns == expected[0] < 100
    np.testing.assert_allclose(fixed, expected[1], 1e-5)
    assert 1e-4 < jnp.max(jnp.abs(product - expected[2])) < 0.1  # outside of the loop
