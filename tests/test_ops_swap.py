"""Plain attention and losses are found in unmodified functions, and what is put there is equal."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

pytestmark = pytest.mark.slow


def assert_equal_gradients(fun, given, caplog, found, least="1KiB", rtol=1e-9, atol=1e-11):
    """And so many of each were found."""
    every = range(len(given))
    expected = jax.jit(jax.value_and_grad(fun, every))(*given)
    caplog.clear()
    results = jax.jit(jax.value_and_grad(jaxmem.ops.swap(fun, least=least), every))(*given)
    said = caplog.text
    for name in "attention", "softmax_cross_entropy":
        assert said.count(f"jaxmem.ops.swap: {name} instead of ") == found.count(name), said
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol, atol)
    return said


LABELS = jnp.array([[3, 0, 39, 7], [12, 12, 1, 5]])


def by_optax(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def by_one_hot(logits):
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(LABELS, 40), -1).mean()


def by_take(logits):
    total = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return (total - chosen + 1e-2 * total**2).mean()


def by_log_softmax(logits):
    chosen = jnp.take_along_axis(nn.log_softmax(logits), LABELS[..., None], -1)
    return -chosen.mean()


def test_two_labels_of_a_row_are_left_alone(arrays, caplog):
    hidden, weights, _ = arrays

    def loss(weights):
        logits = hidden @ weights
        chosen = jnp.take_along_axis(logits, jnp.stack([LABELS, LABELS // 2], -1), -1)
        return (jax.nn.logsumexp(logits, -1) - chosen.mean(-1)).mean()

    assert_equal_gradients(loss, [weights], caplog, [])


@pytest.fixture
def arrays(key):
    keys = jax.random.split(key, 3)
    return (
        jax.random.normal(keys[0], (2, 4, 8)),
        jax.random.normal(keys[1], (8, 40)),
        jax.random.normal(keys[2], (40,)),
    )


def next_token(logits, tokens):
    """As it is mostly written."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def next_token_twice(logits, tokens):
    chosen = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - chosen)


def next_token_in_one_row(logits, tokens):
    logits = logits[:, :-1].astype(jnp.float64).reshape(-1, 40)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].ravel()).mean()


def in_one_row(logits, tokens):
    logits = logits.reshape(-1, 40)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens.reshape(-1, 1), -1)
    return -jnp.mean(chosen)


def of_some_sequences(logits, tokens):
    logits, tokens = logits[1:, 1:3], tokens[1:, 2:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).sum()


@pytest.mark.parametrize(
    "loss",
    [
        next_token,
        next_token_twice,
        next_token_in_one_row,
        in_one_row,
        of_some_sequences,
    ],
)
def test_rows_that_are_cut_or_reshaped(arrays, loss, caplog):
    def of(hidden, weights, bias):
        logits = hidden @ weights + bias[None, None]
        return loss(10 * jnp.tanh(logits / 10), LABELS)

    assert_equal_gradients(of, arrays, caplog, ["softmax_cross_entropy"])


def normalised_by_the_next(logits, tokens):
    largest = jax.lax.stop_gradient(jnp.max(logits[:, 1:], -1, keepdims=True))
    log = jnp.log(jnp.sum(jnp.exp(logits[:, :-1] - largest), -1)) + largest[..., 0]
    return jnp.mean(log - jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0])


def chosen_of_the_next(logits, tokens):
    chosen = jnp.take_along_axis(logits[:, 1:], tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - chosen)


def every_other(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, ::2], tokens[:, ::2]).mean()


def of_fewer_words(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[..., :20], tokens % 20).mean()


def cut_in_one_row(logits, tokens):
    logits, tokens = logits.reshape(-1, 40)[1:], tokens.ravel()[1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def of_other_columns(logits, tokens):
    logits, tokens = logits.reshape(16, 20), tokens.repeat(2).reshape(-1) % 20
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def read_whole_too(logits, tokens):
    return next_token(logits, tokens) + jnp.mean(logits[:, -1] ** 2)


def normalised_by_columns(logits, tokens):
    """Of as many rows as words, the maxima of which lie along the wrong axis."""
    logits = jnp.tile(logits.reshape(-1, 40), (5, 1)).reshape(40, 40)
    return jnp.mean(jax.nn.logsumexp(logits, 0) - logits[0])


@pytest.mark.parametrize(
    "loss",
    [
        normalised_by_the_next,
        chosen_of_the_next,
        every_other,
        of_fewer_words,
        cut_in_one_row,
        of_other_columns,
        read_whole_too,
        normalised_by_columns,
    ],
)
def test_other_rows_and_parts_of_them_are_left_alone(arrays, loss, caplog):
    hidden, weights, _ = arrays
    assert_equal_gradients(
        lambda hidden, weights: loss(hidden @ weights, LABELS), [hidden, weights], caplog, []
    )


def test_maxima_along_the_rows_of_reshaped_scores(key, caplog):
    """Of as many rows as words: each row is less than another row's maximum."""
    one, other = jax.random.normal(key, (2, 5, 8)), jax.random.normal(key, (8, 10))
    labels = jnp.arange(10)

    def loss(one, other):
        logits = (one @ other).reshape(10, 10)
        largest = jax.lax.stop_gradient(jnp.max(logits, -1))
        log = jnp.log(jnp.sum(jnp.exp(logits - largest[None]), -1)) + largest
        return jnp.mean(log - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0])

    assert_equal_gradients(loss, [one, other], caplog, [])


@pytest.mark.parametrize("loss", [by_optax, by_one_hot, by_take, by_log_softmax])
def test_losses_as_they_are_written(arrays, loss, caplog):
    hidden, weights, _ = arrays

    def with_bias(hidden, weights, bias):
        return loss(hidden @ weights + bias[None, None])

    assert_equal_gradients(with_bias, arrays, caplog, ["softmax_cross_entropy"])

    def tied_and_capped(hidden, table):
        return loss(3.0 * jnp.tanh((hidden @ table.T) / 3.0))

    given = hidden, weights.T
    said = assert_equal_gradients(tied_and_capped, given, caplog, ["softmax_cross_entropy"])
    assert "instead of logits float64[2, 4, 40], 2.50 KiB, of test_ops_swap.py:" in said


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (lambda logits: jnp.tanh(logits), 1),
        (lambda logits: jnp.tanh(logits * 4 / 4), 1),
        (lambda logits: 0.5 * jnp.tanh(2 * logits), 1),
        (lambda logits: 2 * jnp.tanh(2 * logits), 0),
        (lambda logits: jnp.tanh(0 * logits), 0),
    ],
)
def test_logits_are_capped_as_the_function_caps_them(arrays, scale, found, caplog):
    def loss(hidden, weights):
        return by_optax(scale(hidden @ weights))

    assert_equal_gradients(loss, arrays[:2], caplog, ["softmax_cross_entropy"] * found)


def test_labels_out_of_range_are_as_they_were(arrays):
    hidden, weights, _ = arrays
    labels = LABELS.at[0, 0].set(-1).at[1, 1].set(40)

    def one_hot(hidden):
        return jnp.sum(jax.nn.log_softmax(hidden @ weights) * jax.nn.one_hot(labels, 40), -1)

    found = jaxmem.ops.swap(one_hot, least="1KiB")(hidden)
    np.testing.assert_allclose(found, one_hot(hidden), 1e-9)
    assert found[0, 0] == 0


@pytest.mark.parametrize("mode", ["clip", "fill", "one hot"])
def test_masked_labels_out_of_range(arrays, mode, caplog):
    """As ignored ones are, -100 among them: nothing of theirs may be in the sum or its gradient."""
    labels = LABELS.at[0, 0].set(-100).at[1, 1].set(40)
    known = (labels >= 0) & (labels < 40)

    def loss(hidden, weights):
        shares = jax.nn.log_softmax(hidden @ weights)
        if mode == "one hot":
            chosen = jnp.sum(shares * jax.nn.one_hot(labels, 40), -1)
        else:
            chosen = jnp.take_along_axis(shares, labels[..., None], -1, mode=mode)[..., 0]
        return -jnp.sum(jnp.where(known, chosen, 0)) + jnp.sum(jnp.nan_to_num(chosen[0, 0]))

    assert_equal_gradients(loss, arrays[:2], caplog, ["softmax_cross_entropy"])


def test_what_else_is_read_stays(arrays, caplog):
    hidden, weights, _ = arrays

    def accuracy_too(hidden, weights):
        logits = hidden @ weights
        return by_optax(logits) + 0.0 * (logits.argmax(-1) == LABELS).mean()

    said = assert_equal_gradients(accuracy_too, (hidden, weights), caplog, [])
    assert (
        "accuracy_too has no attention and no cross-entropy with whole labels of at least 1.00 KiB"
        in said
    )
    assert "whose scores or logits nothing else reads (an accuracy, say)" in said
    # Nor what is small:
    small = lambda h, w: by_optax(h @ w)  # noqa: E731
    assert_equal_gradients(small, (hidden, weights), caplog, [], least="64MiB")


def heads(length=16, key_heads=4):
    keys = jax.random.split(jax.random.key(1), 3)
    query = jax.random.normal(keys[0], (2, length, 4, 8))
    others = (jax.random.normal(key, (2, length, key_heads, 8)) for key in keys[1:])
    return query, *others


PADDING = jnp.arange(16)[None] < jnp.array([[16], [9]])


def by_flax(query, key, value):
    return nn.dot_product_attention(query, key, value, mask=PADDING[:, None, None])


def by_flax_causal(query, key, value):
    return nn.dot_product_attention(query, key, value, mask=nn.make_causal_mask(PADDING))


def by_hand(query, key, value):
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / 8**0.5
    bias = -0.1 * jnp.abs(jnp.arange(16)[:, None] - jnp.arange(16)[None])
    scores = 5 * jnp.tanh(scores / 5) + bias[None, None]
    scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool))[None, None], scores, -1e30)
    return (jax.nn.softmax(scores, -1) @ value).swapaxes(1, 2)


@pytest.mark.parametrize("attend", [by_flax, by_flax_causal, by_hand])
def test_attention_as_it_is_written(attend, caplog):
    def loss(query, key, value):
        return jnp.sin(attend(query, key, value)).sum()

    assert_equal_gradients(loss, heads(), caplog, ["attention"])


ROOT_OUTSIDE = jnp.sqrt(8.0)
SCALES = {
    "by the root of the width": lambda scores: scores / jnp.sqrt(8),
    "by a root from outside": lambda scores: scores / ROOT_OUTSIDE,
    "by numpy": lambda scores: scores / np.sqrt(8),
    "by float32": lambda scores: scores * np.float32(0.3),
    "by a scalar": lambda scores: scores * jnp.asarray(0.3),
    "by one of four axes": lambda scores: scores * jnp.full((1, 1, 1, 1), 0.3),
    "by a computed one": lambda scores: scores * jax.lax.rsqrt(jnp.asarray(8.0)),
    "by a flag": lambda scores: jnp.where(jnp.asarray(True), scores / jnp.sqrt(8), 0.0),
    "and a cap": lambda scores: jnp.clip(scores / jnp.sqrt(8), -jnp.sqrt(2), 2.0),
    "by each head's": lambda scores: scores * jnp.arange(1.0, 5.0)[None, :, None, None],
}


@pytest.mark.parametrize("masked", [None, -jnp.inf, -1e30])
@pytest.mark.parametrize("scale", SCALES)
def test_scores_are_scaled_as_the_function_scales_them(scale, masked, caplog):
    def loss(query, key, value):
        scores = SCALES[scale](jnp.einsum("bqhd,bkhd->bhqk", query, key))
        if masked is not None:
            causal = jnp.tril(jnp.ones((16, 16), bool))[None, None]
            scores = jnp.where(causal, scores, masked)
        return jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)).sum()

    assert_equal_gradients(loss, heads(), caplog, ["attention"])


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1), (1, 4, 1, 1)])
def test_a_learned_scale_has_its_gradient(shape, caplog):
    def loss(query, key, value, scale):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / scale
        return jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)).sum()

    assert_equal_gradients(loss, [*heads(), jnp.full(shape, 2.0)], caplog, ["attention"])


@pytest.mark.parametrize("key_heads", [1, 4])
def test_attention_of_jax_nn(key_heads, caplog):
    bias = jax.random.normal(jax.random.key(2), (1, 4, 16, 16), "float32")

    def loss(query, key, value):
        out = jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)
        return jnp.sin(out).sum()

    given = [x.astype("float32") for x in heads(key_heads=key_heads)]
    assert_equal_gradients(loss, given, caplog, ["attention"], rtol=1e-4, atol=1e-5)


def test_in_scans_and_regions_and_under_a_plan(arrays, caplog):
    query, *_ = heads()

    def loss(scale, query, weights):
        @jax.checkpoint
        def layer(x, scale):
            return x + by_flax(x * scale, x, x), None

        x, _ = jax.lax.scan(layer, query, scale)
        return by_optax(x[:, :4, 0] @ weights)

    given = jnp.array([0.5, 0.7]), query, arrays[1]
    both = ["attention", "softmax_cross_entropy"]
    assert_equal_gradients(loss, given, caplog, both)
    assert_equal_gradients(jax.jit(loss), given, caplog, both)
    swapped = jaxmem.ops.swap(loss, least="1KiB")
    planned = jax.jit(jax.grad(jaxmem.remat(swapped), (0, 1, 2)))(*given)
    for one, other in zip(planned, jax.jit(jax.grad(loss, (0, 1, 2)))(*given), strict=True):
        np.testing.assert_allclose(one, other, 1e-9, atol=1e-11)


def test_dropout_of_weights_and_returned_weights_stay(caplog):
    def dropped(query, key, value):
        weights = nn.dot_product_attention_weights(query, key)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value).sum() + weights.max()

    assert_equal_gradients(dropped, heads(), caplog, [])


def test_the_matrices_are_gone():
    def loss(query, weights, labels):
        x = nn.dot_product_attention(query, query, query)
        logits = x.reshape(*x.shape[:2], -1) @ weights
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    shapes = ((2, 2048, 8, 64), jnp.bfloat16), ((512, 32768), jnp.bfloat16), ((2, 2048), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    before, after = (
        jaxmem.memory(jax.jit(jax.value_and_grad(f, (0, 1))), *args, target="h200")
        for f in (loss, jaxmem.ops.swap(loss))
    )
    assert after.device < before.device / 2


def test_refusals():
    with pytest.raises(jaxmem.JaxmemError, match=r"takes a function of arrays; got 3"):
        jaxmem.ops.swap(3)
    with pytest.raises(jaxmem.JaxmemError, match="lots"):
        jaxmem.ops.swap(by_optax, least="lots")


PLACES = jnp.arange(12)
SEGMENTS = jnp.repeat(jnp.array([[0, 1, 2], [3, 4, 5]]), 4, 1)
CAUSAL = jnp.tril(jnp.ones((12, 12), bool))
MASKS = {
    "window": (lambda at: CAUSAL & (at[:, None] - at[None] < 3), PLACES),
    "distance": (lambda at: jnp.abs(at[:, None] - at[None]) <= 2, PLACES),
    "dilated": (lambda at: CAUSAL & ((at[:, None] - at[None]) % 2 == 0), PLACES),
    "window and first ones": (
        lambda at: CAUSAL & ((at[:, None] - at[None] < 3) | (at < 2)[None]),
        PLACES,
    ),
    "bits": (lambda at: (at[:, None] & at[None]) == 0, PLACES),
    "segments": (lambda s: s[:, None, :, None] == s[:, None, None, :], SEGMENTS),
    # Neighbours beyond what float32 tells apart.
    "large segments": (
        lambda s: s[:, None, :, None] == s[:, None, None, :],
        SEGMENTS.astype("int32") + 3 * 2**24,
    ),
    "unsigned segments": (
        lambda s: s[:, None, :, None] == s[:, None, None, :],
        SEGMENTS.astype("uint32") + jnp.uint32(2**32 - 100),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_places_and_of_segments(key, mask, dtype, caplog):
    mask, places = MASKS[mask]
    x = jax.random.normal(key, (2, 12, 2, 4), dtype)

    def attend(x):
        scores = jnp.einsum("bqhd,bkhd->bhqk", x, x) / 2
        shares = jax.nn.softmax(jnp.where(mask(places), scores, -1e30))
        return jnp.sum(jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", shares, x)))

    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {}
    assert_equal_gradients(attend, [x], caplog, ["attention"], **tolerance)
