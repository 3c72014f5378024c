import itertools

import chex
import flax.struct
import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim.codecs.eight_bits import table

slow = pytest.mark.slow
quantize = jax.jit(jaxmem.optim.quantize, static_argnames="signed")
dequantize = jax.jit(jaxmem.optim.dequantize, static_argnames="signed")
signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
LARGEST = float(np.float32(1e30))
FLOATS = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=False)
SHAPES = st.sampled_from([(7,), (300,), (2, 3, 100), (2, 513)])
VALUES = arrays.arrays(np.float32, SHAPES, elements=FLOATS)
quick = hypothesis.settings(max_examples=60, deadline=None)


# ---- the quantiser


@signs
def test_the_map_is_dynamic(signed):
    values = table(signed)
    assert len(np.unique(values)) == 256
    assert values[-1] == 1
    assert 0 in values
    positive = values[values > 0]
    assert positive[0] < 1e-6
    decades = [((positive > 10.0**-k) & (positive < 10.0 ** (1 - k))).sum() for k in range(1, 8)]
    assert decades == [2 ** (7 - k + (not signed)) for k in range(1, 8)]


@signs
@quick
@hypothesis.given(x=VALUES)
@hypothesis.example(x=np.array([1000.0, 1, 1], np.float32))
def test_the_error_is_at_most_half_a_step_of_the_block(signed, x):
    x = x if signed else np.abs(x)
    packed = quantize(jnp.asarray(x), signed=signed)
    assert packed.codes.shape == x.shape
    got = np.asarray(dequantize(packed, signed=signed))
    assert np.all(np.isfinite(got))
    scale = np.abs(x).max() if x.size <= 256 else _scales(x)
    # A decade begins with its power of ten, which rounding may take for the end of the one before.
    relative = np.abs(x) / np.where(scale > 0, scale, 1) * (1 + 1e-6)
    # Half the distance between two values of the map round each value; beyond the last, its gap.
    count = 2.0 ** np.clip(np.ceil(np.log10(np.maximum(relative, 1e-8))) + 6, 0, 6)
    count = count if signed else 2 * count
    decade = 10.0 ** np.clip(np.ceil(np.log10(np.maximum(relative, 1e-8))) - 1, -7, -1)
    bound = 9 * decade / count / 2 * 1.01 + (0 if signed else 3.3e-7)
    np.testing.assert_array_less(np.abs(got - x), bound * scale + 1e-37)
    assert np.all(np.sign(got) * np.sign(x) >= 0)


def _scales(x):
    """The largest magnitude of each value's block, by the definition."""
    axis = next(a for a in reversed(range(x.ndim)) if a == 0 or np.prod(x.shape[a:]) >= 256)
    rows = np.abs(x).reshape(*x.shape[:axis], -1)
    scale = np.concatenate(
        [
            np.broadcast_to(part.max(-1, keepdims=True), part.shape)
            for part in np.split(rows, range(256, rows.shape[-1], 256), axis=-1)
        ],
        axis=-1,
    )
    return scale.reshape(x.shape)


@signs
@quick
@hypothesis.given(x=VALUES)
def test_what_was_quantised_once_stays(signed, x):
    once = quantize(jnp.asarray(x), signed=signed)
    value = dequantize(once, signed=signed)
    hypothesis.assume(bool(jnp.all(once.scales == quantize(value, signed=signed).scales)))
    again = dequantize(quantize(value, signed=signed), signed=signed)
    np.testing.assert_allclose(again, value, rtol=1e-6)


@quick
@hypothesis.given(x=VALUES)
def test_second_moments_never_become_zero(x):
    x = np.abs(x)
    got = np.asarray(dequantize(quantize(jnp.asarray(x), signed=False), signed=False))
    seen = x / np.where(_scales(x) > 0, _scales(x), 1) > 2e-38  # XLA has no smaller ones
    assert np.all(got[seen & (_scales(x) * 3.25e-7 > 1e-37)] > 0)
    assert np.all(got[x == 0] == 0)


# ---- rounding


def test_stochastic_rounding_is_unbiased_and_to_a_neighbour():
    x = jnp.asarray([1 + 2**-10, -3.3, 1e-30, 123456.0])
    draws = jax.vmap(lambda key: jaxmem.optim.round_stochastically(jnp.tile(x, 64), key))(
        jax.random.split(jax.random.key(1), 256)
    )
    draws = np.asarray(draws, np.float64).reshape(-1, 4)
    for value, column in zip(np.asarray(x, np.float32).astype(float), draws.T, strict=True):
        neighbours = np.unique(column)
        assert len(neighbours) == 2
        assert neighbours[0] <= value <= neighbours[1]
        gap = neighbours[1] - neighbours[0]
        assert abs(column.mean() - value) < 5 * gap / 2 / np.sqrt(len(column))
    odd = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0])
    rounded = jaxmem.optim.round_stochastically(odd, jax.random.key(0))
    chex.assert_trees_all_equal(rounded, odd.astype(jnp.bfloat16))


def test_neighbours_are_rounded_independently():
    x = jnp.full((64, 64), 1 + 2**-8)  # half way between two values
    up = [
        np.asarray(jaxmem.optim.round_stochastically(x, jax.random.key(seed)) > 1.0, float)
        for seed in range(40)
    ]
    up = np.stack(up) * 2 - 1
    for pair in (up[1:] * up[:-1], up[:, 1:] * up[:, :-1], up[..., 1:] * up[..., :-1]):
        assert abs(pair.mean()) < 5 / np.sqrt(pair.size)


# ---- the optimizers

PARAMS = {
    "kernel": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128),
    "bias": jnp.zeros(128),
    "embedding": jnp.ones((64, 128)),
}


@pytest.mark.parametrize("dtype", ["8bit", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(1e-2), optax.adamw(1e-2), optax.lion(1e-3), optax.sgd(1e-2, momentum=0.9)],
    ids=["adam", "adamw", "lion", "momentum"],
)
def test_large_moments_are_small_and_the_rest_is_as_it_was(optimizer, dtype):
    small = jaxmem.optim.small_moments(optimizer, dtype)
    state = small.init(PARAMS)
    plain = optimizer.init(PARAMS)
    ours, theirs = (sum(leaf.nbytes for leaf in jax.tree.leaves(s)) for s in (state, plain))
    moments = sum(leaf.size == 64 * 128 for leaf in jax.tree.leaves(plain)) // 2
    each = 64 * 128 + 32 * 4 if dtype == "8bit" else 2 * 64 * 128
    assert theirs - ours == moments * (PARAMS["kernel"].nbytes - each) - 4
    gradients = jax.tree.map(lambda p: jnp.cos(37 * p) * 1e-3, PARAMS)
    step, plain_step = jax.jit(small.update), jax.jit(optimizer.update)
    for _ in range(3):
        updates, state = step(gradients, state, PARAMS)
        expected, plain = plain_step(gradients, plain, PARAMS)
    for name in ("bias", "embedding"):
        chex.assert_trees_all_close(updates[name], expected[name], rtol=1e-6)
    difference = jnp.linalg.norm(updates["kernel"] - expected["kernel"])
    assert difference < 0.05 * jnp.linalg.norm(expected["kernel"])


@pytest.mark.parametrize("dtype", ["8bit", "bfloat16"])
def test_fields_of_parameters_may_have_any_name(dtype):
    """Second moments are told by the optimizer's names, not by the model's."""

    @flax.struct.dataclass
    class Model:
        token: jax.Array
        null_token: jax.Array
        nu: jax.Array

    gradient = jax.random.normal(jax.random.key(0), (64, 128))
    params = Model(*[jnp.zeros_like(gradient)] * 3)
    for optimizer in optax.sgd(1e-2, momentum=0.9), optax.adam(1e-2), optax.lion(1e-2):
        small = jaxmem.optim.small_moments(optimizer, dtype)
        state, like = small.init(params), Model(gradient, gradient, gradient)
        for _ in range(3):
            updates, state = jax.jit(small.update)(like, state, params)
        if dtype == "8bit":
            chex.assert_trees_all_equal(updates.token, updates.null_token, updates.nu)
        assert (jnp.sign(updates.nu) == -jnp.sign(gradient)).mean() > 0.99


@pytest.mark.parametrize("dtype", ["8bit", "bfloat16"])
def test_what_begins_as_the_parameters_is_no_moment(dtype):
    optimizer = optax.contrib.schedule_free_adamw(1e-3)
    small = jaxmem.optim.small_moments(optimizer, dtype)
    params = jnp.ones((64, 128))
    state, plain = small.init(params), optimizer.init(params)
    chex.assert_trees_all_equal(state.inner.z, plain.z)
    of_moments = jax.tree.leaves(state.inner.base_optimizer_state)
    assert any(leaf.dtype in (jnp.uint8, jnp.bfloat16) for leaf in of_moments)
    ours = theirs = params
    for _ in range(50):
        updates, state = jax.jit(small.update)(ours, state, ours)
        ours = optax.apply_updates(ours, updates)
        updates, plain = jax.jit(optimizer.update)(theirs, plain, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert theirs.mean() < 0.99 and abs(ours.mean() - theirs.mean()) < 1e-3


def test_small_state_on_the_host_and_in_layers():
    optimizer = jaxmem.offload(jaxmem.optim.small_moments(optax.adam(1e-2)))
    state = optimizer.init(PARAMS)
    codes = state.inner[0].nu["kernel"].codes
    assert (codes.dtype, codes.sharding.memory_kind) == (jnp.uint8, "pinned_host")
    plain = jaxmem.optim.small_moments(optax.adam(1e-2))
    got, expected = (
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS) for tx in (optimizer, plain)
    )
    chex.assert_trees_all_close(*map(jax.device_get, (got, expected)), rtol=1e-6)

    blocks = jaxmem.layers(lambda w, x: x + x @ w, optimizer=plain)
    stack = blocks.init(lambda w: w, jnp.ones((3, 64, 64)) / 99)
    loss = lambda _, stack: jnp.sum(blocks(stack, jnp.ones((2, 64))))  # noqa: E731
    _, _, stack = jax.jit(jaxmem.value_and_update(loss))((), stack)
    assert stack.opt_state.inner[0].nu.codes.dtype == jnp.uint8
    chex.assert_trees_all_close(stack.params, jnp.ones((3, 64, 64)) / 99 - 1e-2, rtol=1e-4)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_half_parameters_follow_those_in_float32(rounding):
    params = jnp.full((64, 64), 1.0, jnp.bfloat16)
    optimizer = jaxmem.optim.half_params(optax.sgd(1e-4), rounding)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jnp.ones_like(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(1000):
        params, state = step(params, state)
    assert params.dtype == jnp.bfloat16
    values = np.asarray(params, np.float64)
    assert abs(values.mean() - 0.9) < (2e-4 if rounding == "stochastic" else 2**-8)
    lost = jnp.full((), 1.0, jnp.bfloat16) - jnp.asarray(1e-4, jnp.bfloat16)
    assert lost == 1  # what round-to-nearest does at every step


def test_wrong_uses_are_refused():
    small = jaxmem.optim.small_moments(optax.adam(1e-2))
    wide = small.init(PARAMS)._replace(inner=optax.adam(1e-2).init(PARAMS))
    with pytest.raises(jaxmem.JaxmemError, match=r"optimizer state.*\['kernel'\]"):
        small.update(PARAMS, wide, PARAMS)
    with pytest.raises(jaxmem.JaxmemError, match='dtype= "8bit" or "bfloat16"; got \'4bit\''):
        jaxmem.optim.small_moments(optax.adam(1e-2), "4bit")
    with pytest.raises(jaxmem.JaxmemError, match="block=0"):
        jaxmem.optim.small_moments(optax.adam(1e-2), block=0)
    with pytest.raises(jaxmem.JaxmemError, match=r"takes rounding=.*got 'nearest'"):
        jaxmem.optim.half_params(optax.adam(1e-2), "nearest")
    half = jaxmem.optim.half_params(optax.adam(1e-2))
    with pytest.raises(jaxmem.JaxmemError, match="rounds parameters and was given none"):
        half.update(PARAMS, half.init(PARAMS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "dtype", "each"),
    [
        (jaxmem.optim.small_moments, jnp.float32, 8 + 2.04),
        (jaxmem.optim.half_params, jnp.bfloat16, 4 + 8),
        (lambda tx: KINDS["8bit, bf16 parameters"](tx), jnp.bfloat16, 4 + 2.04),
    ],
    ids=["8bit", "half", "half 8bit"],
)
def test_nothing_is_expanded_as_a_whole(wrap, dtype, each):
    """Compiled: Adam on eight matrices, and one matrix's float32 moments at a time."""
    width, count = 1024, 8
    params = [jax.ShapeDtypeStruct((width, width), dtype)] * count
    optimizer = wrap(optax.adam(1e-3))

    def step(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jaxmem.eval_shape(optimizer.init, params)
    report = jaxmem.memory(
        jax.jit(step, donate_argnums=(1, 2)), params, state, params, target="h200"
    )
    assert report.temp < 2.6 * 4 * width**2
    assert report.argument < count * width**2 * each + 2**10


# ---- training curves


def _digits():
    from sklearn.datasets import load_digits  # slow to import

    data = load_digits()
    return jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)


def _mlp(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        jax.random.normal(key, pair, jnp.float32) / pair[0] ** 0.5
        for key, pair in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def _apply(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w.astype(jnp.float32))
    return x @ params[-1].astype(jnp.float32)


def classify(params, key):
    """Digits, a fifth of the labels drawn at random, so that the loss has a floor."""
    x, y = _digits()
    rows, noisy, drawn = jax.random.split(key, 3)
    at = jax.random.randint(rows, (128,), 0, len(x))
    wrong = jax.random.bernoulli(noisy, 0.2, (128,))
    labels = jnp.where(wrong, jax.random.randint(drawn, (128,), 0, 10), y[at])
    loss = optax.softmax_cross_entropy_with_integer_labels(_apply(params, x[at]), labels)
    return jnp.mean(loss)


def regress(params, key):
    """A smooth function of two numbers in eight, with noise."""
    first, second = jax.random.split(key)
    x = jax.random.uniform(first, (128, 8), jnp.float32, -1, 1)
    y = jnp.sin(2 * x[:, :2].sum(-1)) + 0.5 * jax.random.normal(second, (128,), jnp.float32)
    return jnp.mean((_apply(params, x)[:, 0] - y) ** 2)


TASKS = {"digits": (classify, (64, 128, 128, 10)), "function": (regress, (8, 128, 128, 1))}
KINDS = {
    "8bit": lambda tx: jaxmem.optim.small_moments(tx),
    "bfloat16": lambda tx: jaxmem.optim.small_moments(tx, "bfloat16"),
    "8bit, bf16 parameters": lambda tx: jaxmem.optim.half_params(jaxmem.optim.small_moments(tx)),
    "compensated": lambda tx: jaxmem.optim.half_params(tx, "compensated"),
}


def mean_curve(task, wrap, half):
    """The loss, averaged over three seeds and 50 steps each."""
    loss, sizes = TASKS[task]
    optimizer = wrap(optax.adamw(1e-3))

    def step(carry, key):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def train(seed):
        params = _mlp(jax.random.key(seed), sizes)
        if half:
            params = [leaf.astype(jnp.bfloat16) for leaf in params]
        keys = jax.random.split(jax.random.key(100 + seed), 600)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[1]

    return np.mean([np.asarray(train(seed)).reshape(-1, 50).mean(1) for seed in range(3)], axis=0)


@slow
@pytest.mark.parametrize("task", TASKS)
def test_training_curves_are_those_of_float32(task):
    plain = mean_curve(task, lambda tx: tx, False)
    assert plain[-1] < 0.7 * plain[0]
    for name, wrap in KINDS.items():
        half = "bf16" in name or name == "compensated"
        mine = mean_curve(task, wrap, half)
        assert np.max(np.abs(mine / plain - 1)) < 0.01, (name, mine / plain - 1)


def test_state_in_another_number_of_bits_is_refused():
    params = {"w": jnp.ones((2, 3), jnp.float32)}
    half = jaxmem.optim.small_moments(optax.adam(0.1), "bfloat16", keep=lambda path, leaf: False)
    whole = jaxmem.optim.small_moments(optax.adam(0.1))  # keeps arrays as small as these
    for optimizer, other in ((half, whole), (whole, half)):
        with pytest.raises(jaxmem.JaxmemError, match=r"\['w'\] is (bfloat16|float32) in this"):
            optimizer.update(params, other.init(params), params)


def test_a_gradient_that_is_not_a_number_stays_one_in_8_bits():
    optimizer = jaxmem.optim.small_moments(optax.adam(0.1), keep=lambda path, leaf: False)
    params = {"w": jnp.ones((64, 128), jnp.float32)}
    state = optimizer.init(params)
    gradient = {"w": params["w"].at[0, 0].set(jnp.nan)}
    _, state = jax.jit(optimizer.update)(gradient, state, params)
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    found = jnp.isnan(updates["w"])
    assert found[0, 0] and not found[2:].any()  # a block is two rows
