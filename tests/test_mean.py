"""Losses that are a mean over examples, and those that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.levers.batch.independence import reduction_of

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
Y = jax.ShapeDtypeStruct((8,), jnp.int32)
W = jax.ShapeDtypeStruct((16, 10), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def proved(loss, slices=(4, 2, 1), batch=(X, Y), params=W):
    return reduction_of(
        lambda params, batch, *_: (loss(batch, params), None), batch, slices, params
    )


def each(batch, w):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y)


def chunked(batch, w):
    return jnp.mean(jaxmem.ops.softmax_cross_entropy(batch[0], w, batch[1]))


def uniform(size):
    return jax.random.uniform(jax.random.key(0), (size,))


def attended(batch, w):
    x = batch[0].reshape(len(batch[0]), 4, 2, 2)
    return jnp.mean(jaxmem.ops.attention(x * w[0, 0], x, x, is_causal=True) ** 2)


def regularised(batch, w):
    return jnp.mean(each(batch, w)) + 0.1 * jnp.sum(w**2)


def recurrent(batch, w):
    def body(carry, x):
        hidden, loss = carry
        hidden = jnp.tanh(hidden + x[:, None] * w[:1])
        return (hidden, loss + jnp.mean(hidden**2)), None

    start = jnp.zeros((len(batch[0]), 10)), 0.0
    return jax.lax.scan(body, start, batch[0].T)[0][1]


def beside_metrics(batch, w):
    losses = each(batch, w)
    metrics = jnp.sum(losses / jnp.max(losses))
    return jnp.mean(losses), metrics


@jax.custom_vjp
def squared(x):
    return jnp.sum(x**2)


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * x * g,))


def solved(w, sides, **options):
    """A Gaussian's exponent."""
    root = jnp.linalg.cholesky(w @ w.T + jnp.eye(len(w), dtype=w.dtype))
    return jax.lax.linalg.triangular_solve(root, sides, lower=True, **options) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch, w: jnp.mean(each(batch, w)),
        lambda batch, w: jnp.sum(each(batch, w)) / len(batch[0]),
        lambda batch, w: jnp.sum(each(batch, w)) * jnp.float32(1 / len(batch[0])),
        lambda batch, w: jnp.mean(each(batch, w) * (batch[1] > 0)),
        lambda batch, w: jnp.mean(jax.vmap(lambda x: jnp.sum((x @ w) ** 2))(batch[0])),
        lambda batch, w: jnp.mean(jax.checkpoint(each)(batch, w)),
        lambda batch, w: squared(batch[0] @ w) / len(batch[0]),
        lambda batch, w: jnp.vdot(batch[0] @ w, batch[0] @ w) / len(batch[0]),
        lambda batch, w: beside_metrics(batch, w)[0],
        lambda batch, w: jnp.mean(solved(w, batch[0])),
        lambda batch, w: jnp.mean(solved(w, batch[0].T, left_side=True)),
        chunked,
        attended,
        regularised,
        recurrent,
    ],
)
def test_a_mean_is_told(loss):
    assert proved(loss)[:2] == ("mean", "")


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch, w: jnp.sum(each(batch, w)),
        lambda batch, w: squared(batch[0] @ w),
        lambda batch, w: jnp.mean(each(batch, w)) * len(batch[0]),
    ],
)
def test_a_sum_is_told(loss):
    assert proved(loss)[:2] == ("sum", "")


def standard(x):
    return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)


def normalised(batch, w):
    hidden = batch[0] @ w
    return jnp.mean(standard(hidden) ** 2)


def normalised_in_a_loop(batch, w):
    def body(x, _):
        return standard(x), None

    return jnp.mean((jax.lax.scan(body, batch[0], None, 3)[0] @ w) ** 2)


def contrastive(batch, w):
    hidden = batch[0] @ w
    return jnp.mean(jax.nn.logsumexp(hidden @ hidden.T, -1))


def solved_across(batch, w):
    """One system whose unknowns are the examples."""
    return jnp.mean(solved(batch[0], batch[0] @ w, left_side=True))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (solved_across, "its examples see one another ("),
        (
            lambda batch, w: jnp.sum(each(batch, w)) / jnp.sum(batch[1] > 0),
            "it is no plain mean over examples (div at test_mean.py:",
        ),
        (lambda batch, w: jnp.sqrt(jnp.mean(each(batch, w))), "it is no plain mean over examples"),
        (lambda batch, w: jnp.max(each(batch, w)), "its examples see one another (reduce_max at"),
        (
            lambda batch, w: jnp.sum(each(batch, w)) + 0.1 * jnp.mean(each(batch, w)),
            "it is no plain mean over examples (add at test_mean.py:",
        ),
        (
            lambda batch, w: jnp.sum(each(batch, w)) + 0.1 * jnp.sum(w**2),
            "it is no plain mean over examples (add at test_mean.py:",
        ),
        (
            lambda batch, w: jnp.sum(each(batch, w)) / len(batch[0]) ** 0.5,
            "it divides the sum over its examples by another number than theirs",
        ),
        (
            lambda batch, w: jnp.mean(each((batch[0][::-1], batch[1]), w)),
            "its examples see one another (rev at test_mean.py:",
        ),
        (
            lambda batch, w: jnp.mean(each(batch, w) * jnp.arange(len(batch[1]))),
            "it uses the place of an example in the batch (convert_element_type at test_mean.py:",
        ),
        (
            lambda batch, w: jnp.mean(each(batch, w) * uniform(len(batch[1]))),
            "it draws random numbers for the batch from a key that all slices would have in common;"
            " take it from key= (random_bits at test_mean.py:",
        ),
        (
            lambda batch, w: jnp.mean(jax.pure_callback(np.sin, batch[0], batch[0]) @ w),
            "whether it keeps examples apart is not known (pure_callback at test_mean.py:",
        ),
        (normalised, "its examples see one another (sub at test_mean.py:"),
        (normalised_in_a_loop, "its examples see one another (sub at test_mean.py:"),
        (contrastive, "its examples see one another (dot_general at test_mean.py:"),
        (
            lambda batch, w: jnp.mean(batch[0].reshape(4, 2, 16) @ w),
            "it cannot be traced with a slice of the batch (cannot reshape array",
        ),
        (
            lambda batch, w: jnp.mean(jnp.sin(batch[0]) if len(batch[0]) > 4 else batch[0]),
            "its program is another for a slice (sin at test_mean.py:",
        ),
    ],
)
def test_what_is_no_mean_is_told(loss, why):
    found = proved(loss)
    assert found.reduction is None and found.why.startswith(why), found.why


SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def rank_of(x):
    """Another one in a slice."""
    return min(len(x), 5)


OTHER_PROGRAMS = {
    "diagonal": lambda x, w: jnp.mean(jnp.diagonal(x * w[0, 0])),
    "fills": lambda x, w: jnp.mean(x) + jnp.mean(jnp.zeros((1,) * rank_of(x)) + w[0, 0]),
    "broadcasts": lambda x, w: jnp.mean(x) + jnp.mean(jnp.full((2,) * rank_of(x), w[0, 0])),
    "counts": lambda x, w: (
        jnp.mean(x) + jnp.sum(jax.lax.broadcasted_iota("f4", (2,) * rank_of(x), 0))
    ),
    "draws": lambda x, w: (
        jnp.mean(x) + jnp.mean(jax.random.uniform(jax.random.key(0), (2,) * rank_of(x)))
    ),
    "picks": lambda x, w: jnp.mean(x) * jnp.full((2,) * rank_of(x), w[0, 0])[(0,) * rank_of(x)],
    "branches": lambda x, w: jax.lax.switch(
        w[0, 0].astype(int), [lambda x, i=i: jnp.mean(x + i) for i in range(len(x))], x
    ),
    "sums over axes": lambda x, w: (
        jnp.mean(x)
        * jnp.mean(jnp.tensordot(jnp.full((8, 8), w[0, 0]), w[:8, :8], 2 if len(x) == 8 else 1))
    ),
    "loops": lambda x, w: jax.lax.scan(
        lambda c, xs: (c + sum(map(jnp.mean, xs)) * w[0, 0], None), 0.0, [w] * len(x)
    )[0],
    "regions": lambda x, w: (
        jnp.mean(x)
        + jax.checkpoint(lambda w: jnp.mean(jax.nn.relu(jnp.full((2,) * rank_of(x), w[0, 0]))))(w)
    ),
}


def test_a_slice_of_one_example_may_read_numbers_where_the_batch_has_arrays():
    """`zeros_like` of a scalar is a number of the program's."""

    def squeezed(x, w):
        x = jnp.sum(x * w[0, 0], 1).squeeze()
        return jnp.mean(x + jnp.zeros_like(x))

    assert proved(squeezed, slices=(4,), batch=SQUARE).reduction == "mean"
    found = proved(squeezed, slices=(1,), batch=SQUARE)
    assert found.reduction is None and found.why.startswith("its program is another for a slice")


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_a_program_that_is_another_for_a_slice_is_not_proved(name):
    found = proved(OTHER_PROGRAMS[name], slices=(4, 1), batch=SQUARE)
    assert found.reduction is None and found.why


def test_the_diagonal_of_a_square_batch_is_cut_with_a_warning():
    x = jnp.arange(64.0, dtype=jnp.float32).reshape(8, 8)
    sliced = jaxmem.microbatch(lambda w, x: jnp.mean(jnp.diagonal(x * w)), 4)
    with pytest.warns(jaxmem.JaxmemWarning, match=r"uses the place of an example in .*gather"):
        value, gradient = sliced(jnp.float32(2), x)
    average = np.mean([np.diagonal(x[i::4]).mean() for i in range(4)])
    np.testing.assert_allclose((value, gradient), (2 * average, average), rtol=1e-6)


def test_a_proof_is_of_the_slices_that_are_asked_for():
    def loss(batch, w):
        return (jnp.mean if len(batch[0]) > 2 else jnp.sum)(each(batch, w))

    assert proved(loss, [4]).reduction == "mean"
    assert proved(loss, [4, 2]).reduction is None


def test_a_batch_without_examples_in_common_is_not_cut():
    for batch in ((X, jax.ShapeDtypeStruct((), jnp.float32)), (X, W), ()):
        assert proved(lambda batch, w: jnp.sum(w), batch=batch)[:2] == (
            None,
            "the arrays of the batch have no first axis of examples in common",
        )


def test_batches_of_many_shapes():
    batch = {
        "image": jax.ShapeDtypeStruct((8, 4, 4, 3), jnp.float32),
        "tokens": jax.ShapeDtypeStruct((8, 5), jnp.int32),
        "more": [jax.ShapeDtypeStruct((8,), jnp.bool_), jax.ShapeDtypeStruct((8, 1), jnp.float32)],
    }

    def loss(batch, w):
        found = batch["image"].reshape(len(batch["image"]), -1)[:, :16] @ w
        found = found[:, :5] * (batch["tokens"] > 2) + batch["more"][1]
        return jnp.mean(jnp.where(batch["more"][0][:, None], found**2, 0))

    assert proved(loss, batch=batch).reduction == "mean"


# ---- random numbers and model states


class Net(nnx.Module):
    def __init__(self, rngs, norm=False, rate=0.5):
        self.first = nnx.Linear(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        return self.last(self.dropout(nnx.relu(x)))


@pytest.mark.parametrize(
    ("norm", "train", "why"),
    [
        (False, True, ""),
        (True, False, ""),
        (True, True, "its examples see one another (sub at test_mean.py:"),
    ],
)
def test_modules_of_nnx(norm, train, why):
    module = Net(nnx.Rngs(0), norm)
    (module.train if train else module.eval)()
    step = jaxmem.train_step(
        lambda model, batch: jnp.mean(model(batch[0])[:, 0] - batch[1]), optax.sgd(0.1)
    )
    state = step.abstract(module)
    found = reduction_of(step.plain_loss, (X, Y), [4], state.params, state.model_state)
    assert found.why.startswith(why) and found.reduction == (None if why else "mean"), found.why


def drawn(params, batch, state, key):
    kept = jax.random.bernoulli(key, 0.5, batch[0].shape)
    return jnp.mean(each((batch[0] * kept, batch[1]), params)), state


def drawn_by_a_key_for_each(params, batch, state, key):
    def of_one(x, key):
        return jnp.sum((x * jax.random.normal(key, x.shape)) @ params)

    return jnp.mean(jax.vmap(of_one)(batch[0], jax.random.split(key, len(batch[0])))), state


def drawn_by_a_count(params, batch, state, key):
    own = jax.random.fold_in(jax.random.key(0), state)
    return drawn(params, batch, None, own)[0], state + 1


def drawn_by_the_same_count(params, batch, state, key):
    return drawn_by_a_count(params, batch, state, key)[0], state


def drawn_in_a_loop_by_a_count(params, batch, state, key):
    def turn(total, at):
        own = jax.random.fold_in(jax.random.key(1), at + state)
        return total + jax.random.normal(own), None

    noise = jax.lax.scan(turn, 0.0, jnp.arange(3))[0]
    return jnp.mean(each(batch, params)), state + (noise > -100.0)


def counted(params, batch, state, key):
    return jnp.mean(each(batch, params)), state + 1


def flagged(params, batch, state, key):
    return jnp.mean(each(batch, params)), jnp.ones_like(state)


def scheduled(params, batch, state, key):
    return jnp.mean(each(batch, params)) * state.astype(jnp.float32), state + 1


def permuted(params, batch, state, key):
    return jnp.mean(each((jax.random.permutation(key, batch[0]), batch[1]), params)), state


def averaged(params, batch, state, key):
    return jnp.mean(each(batch, params)), 0.9 * state + 0.1 * jnp.mean(batch[0])


COUNT, AVERAGE = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
RAW = jax.ShapeDtypeStruct((2,), jnp.uint32)


@pytest.mark.parametrize(
    ("loss", "state", "key", "why"),
    [
        (drawn, None, KEY, ""),
        (drawn, None, RAW, ""),
        (drawn_by_a_key_for_each, None, KEY, ""),
        (drawn_by_a_count, COUNT, None, ""),
        (drawn_by_the_same_count, COUNT, None, "it draws random numbers for the batch from a key"),
        (drawn_in_a_loop_by_a_count, COUNT, None, ""),
        (counted, COUNT, None, ""),
        (flagged, COUNT, None, ""),
        (scheduled, COUNT, None, "it uses a model state that each slice changes (mul at"),
        (averaged, AVERAGE, None, ""),
        (permuted, None, KEY, "it uses the place of an example in the batch (sort at"),
    ],
)
def test_random_numbers_and_model_states(loss, state, key, why):
    found = reduction_of(loss, (X, Y), [4, 2], W, state, key)
    assert found.why.startswith(why) and found.reduction == (None if why else "mean"), found.why
    changes = {
        counted: "it counts calls, and each slice is one",
        scheduled: "it counts calls, and each slice is one",
        averaged: "it is made from the batch: ",
    }
    assert found.state.startswith(changes.get(loss, "")) and bool(found.state) == (loss in changes)
