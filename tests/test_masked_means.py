"""Means over what a mask leaves: their slices weigh what each is divided by."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

EXAMPLES = 12


def data(empty: bool = False) -> dict:
    """A batch of sequences; ``empty``: some slices of four have nothing that is counted."""
    random = np.random.default_rng(0)
    mask = random.integers(0, 2, (EXAMPLES, 5))
    signs = random.choice([-1.0, 1.0, 2.0], (EXAMPLES, 5))
    if empty:
        mask[1::4] = 0
        signs[1::4] = [1, -1, 1, -1, 0]
    return {
        "x": jnp.asarray(random.normal(size=(EXAMPLES, 5, 4))),
        "y": jnp.asarray(random.integers(0, 3, (EXAMPLES, 5))),
        "mask": jnp.asarray(mask, float),
        "seen": jnp.asarray(mask > 0),
        "signs": jnp.asarray(signs),
    }


def each(w, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])


def of_mask(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def bounded(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)


def clipped(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.clip(batch["mask"].sum(), 1)


def kept_from_zero(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) / (batch["mask"].sum() + 1e-6)


def where(w, batch):
    return jnp.mean(each(w, batch), where=batch["seen"])


def chosen(w, batch):
    return jnp.where(batch["seen"], each(w, batch), 0).sum() / batch["seen"].sum()


def of_labels(w, batch):
    wanted = batch["y"] != 0
    return jnp.sum(each(w, batch) * wanted) / jnp.maximum(jnp.sum(batch["y"] != 0), 1)


def of_means(w, batch):
    return jnp.mean(each(w, batch) * batch["mask"]) / jnp.mean(batch["mask"])


def of_sum_and_mean(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.mean(batch["mask"])


def weighted(w, batch):
    return jnp.average(each(w, batch), weights=batch["mask"])


def of_two_masks(w, batch):
    both = batch["mask"] * batch["seen"]
    return jnp.sum(each(w, batch) * batch["mask"] * batch["seen"]) / jnp.sum(both)


def two_terms(w, batch):
    squares = jnp.square((batch["x"] @ w).sum(-1))
    more = jnp.sum(squares * batch["mask"]) / batch["mask"].sum()
    return of_mask(w, batch) - 0.1 * more


def two_sums(w, batch):
    """Label smoothing, and the squares of normalisers beside it."""
    squares = 1e-3 * jnp.square(jax.nn.logsumexp(batch["x"] @ w, -1))
    masked = jnp.sum(each(w, batch) * batch["mask"]) + jnp.sum(squares * batch["mask"])
    return masked / batch["mask"].sum()


def of_sums_of_rows(w, batch):
    return jnp.sum(jnp.sum(each(w, batch) * batch["mask"], -1)) / batch["mask"].sum()


def contracted(w, batch):
    mask = batch["seen"] * 1.0
    return jnp.einsum("bt,bt->", each(w, batch), mask) / mask.sum()


def of_rounded_masks(w, batch):
    mask = batch["mask"].astype(jnp.bfloat16)
    return jnp.sum(each(w, batch) * mask) / mask.sum().astype(float)


def of_chosen_numbers(w, batch):
    """As for masked language models."""
    mask = jnp.where(batch["y"] > 0, 1.0, 0.0)
    return jnp.sum(each(w, batch) * mask) / mask.sum()


def of_whole_numbers(w, batch):
    seen = batch["mask"].astype(int).astype(bool)
    return jnp.where(seen, each(w, batch), 0).sum() / seen.sum()


def of_counts_of_rows(w, batch):
    sums = jax.vmap(lambda losses, mask: jnp.sum(losses * mask))(each(w, batch), batch["mask"])
    return sums.sum() / batch["mask"].sum(-1).sum()


def negative(w, batch):
    return -0.5 * of_mask(w, batch)


def regularised(w, batch):
    return of_mask(w, batch) + jnp.sum(w**2)


def one_less(w, batch):
    return 1 - of_mask(w, batch)


def with_a_negated_number(w, batch):
    return of_mask(w, batch) + jax.lax.neg(1.0)


def regularised_and_bounded(w, batch):
    return 2 * bounded(w, batch) - 0.1 * jnp.mean(w**2) + 3


def mixed(w, batch):
    """A regulariser of a slice of the parameters, and one through a custom rule."""
    return bounded(w, batch) + jax.nn.softplus(w[0]).sum() / jnp.maximum(1, jnp.sum(w[:2] ** 2))


def kept_from_zero_where_it_is(w, batch):
    count = batch["mask"].sum()
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.where(count == 0, 1, count)


def kept_from_zero_where_it_is_not(w, batch):
    count = batch["seen"].sum()
    return jnp.sum(each(w, batch) * batch["seen"]) / jnp.where(count > 0, count, 1)


def zero_where_nothing_is_counted(w, batch):
    count = batch["mask"].sum()
    loss = jnp.sum(each(w, batch) * batch["mask"]) / jnp.maximum(count, 1)
    return jnp.where(count > 0, loss, 0.0) + 0.1 * jnp.sum(w**2)


def zero_where_it_is_divided_by_zero(w, batch):
    count = batch["mask"].sum()
    loss = jnp.sum(each(w, batch) * batch["mask"]) / count
    return jnp.where(count == 0, 0.0, loss)


def times_a_part(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) * (1 / jnp.maximum(batch["mask"].sum(), 1))


PROVED = [
    regularised,
    one_less,
    with_a_negated_number,
    regularised_and_bounded,
    mixed,
    kept_from_zero_where_it_is,
    kept_from_zero_where_it_is_not,
    zero_where_nothing_is_counted,
    zero_where_it_is_divided_by_zero,
    times_a_part,
    of_mask,
    bounded,
    clipped,
    kept_from_zero,
    where,
    chosen,
    of_labels,
    of_means,
    of_sum_and_mean,
    weighted,
    of_two_masks,
    two_terms,
    two_sums,
    of_sums_of_rows,
    contracted,
    of_rounded_masks,
    of_chosen_numbers,
    of_whole_numbers,
    of_counts_of_rows,
    negative,
]


@pytest.fixture
def weights():
    return jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxmem.JaxmemWarning)
        yield


@pytest.mark.parametrize("empty", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("loss", PROVED)
def test_slices_give_the_whole_batch(loss, empty, weights):
    batch = data(empty)
    expected = jax.value_and_grad(loss)(weights, batch)
    for count in (4, 12):
        found = jax.jit(jaxmem.microbatch(loss, count))(weights, batch)
        chex.assert_trees_all_close(found, expected, rtol=1e-11)


def test_a_smaller_last_slice(weights):
    batch = jax.tree.map(lambda leaf: leaf[:11], data())
    for loss in (of_mask, of_means, of_sum_and_mean):
        found = jaxmem.microbatch(loss, 4, uneven=True)(weights, batch)
        chex.assert_trees_all_close(found, jax.value_and_grad(loss)(weights, batch), rtol=1e-11)


@pytest.mark.slow
def test_nothing_at_all_is_what_it_is_for_the_whole_batch(weights):
    batch = {**data(), "mask": jnp.zeros((EXAMPLES, 5))}
    assert jnp.isnan(jaxmem.microbatch(of_mask, 4)(weights, batch)[0])
    assert jaxmem.microbatch(bounded, 4)(weights, batch)[0] == 0
    batch["seen"] = batch["mask"] > 0
    finite = 0
    for loss in PROVED:
        expected = jax.value_and_grad(loss)(weights, batch)
        found = jaxmem.microbatch(loss, 4)(weights, batch)
        chex.assert_trees_all_close(found[0], expected[0], rtol=1e-11)  # NaN as NaN
        if jnp.isfinite(expected[0]) and jnp.isfinite(expected[1]).all():
            finite += 1
            chex.assert_trees_all_close(found[1], expected[1], rtol=1e-11)
    assert 0 < finite < len(PROVED), "both are met"


def test_metrics_beside_a_rest(weights):
    def loss(w, batch):
        found = regularised_and_bounded(w, batch)
        return found, {"loss": found, "error": 1 - bounded(w, batch), "plain": bounded(w, batch)}

    expected = jax.value_and_grad(loss, has_aux=True)(weights, data(empty=True))
    found = jax.jit(jaxmem.microbatch(loss, 6))(weights, data(empty=True))
    chex.assert_trees_all_close(found, expected, rtol=1e-11)


def test_metrics_with_the_same_divisor(weights):
    def loss(w, batch):
        right = (batch["x"] @ w).argmax(-1) == batch["y"]
        count = batch["mask"].sum()
        accuracy = jnp.sum(right * batch["mask"]) / batch["mask"].sum()
        metrics = {"accuracy": accuracy, "count": count, "each": each(w, batch)}
        rounded = jnp.sum(right * batch["mask"]).astype(jnp.float32) / count.astype(jnp.float32)
        return of_mask(w, batch), metrics | {"in float32": rounded}

    expected = jax.value_and_grad(loss, has_aux=True)(weights, data(True))
    found = jaxmem.microbatch(loss, 4)(weights, data(True))
    in_float32 = [results[0][1].pop("in float32") for results in (expected, found)]
    np.testing.assert_allclose(*in_float32, rtol=1e-6)
    chex.assert_trees_all_close(found, expected, rtol=1e-11)


def test_a_metric_with_another_divisor_is_told_of(weights):
    def loss(w, batch):
        return bounded(w, batch), {"where": where(w, batch)}

    with pytest.raises(jaxmem.JaxmemWarning, match=r"metrics\['where'\], .* averaged by weight"):
        jaxmem.microbatch(loss, 4)(weights, data())


def with_metrics(w, batch):
    right = (batch["x"] @ w).argmax(-1) == batch["y"]
    return of_mask(w, batch), {"accuracy": jnp.sum(right * batch["mask"]) / batch["mask"].sum()}


def test_a_reduction_that_is_given_holds_for_metrics_too(weights):
    """As before there was a proof: slices are averaged."""
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i::4], data()) for i in range(4)]
    expected = np.mean([with_metrics(weights, part)[1]["accuracy"] for part in parts])
    (_, metrics), _ = jaxmem.microbatch(with_metrics, 4, reduction="mean")(weights, data())
    np.testing.assert_allclose(metrics["accuracy"], expected)


def test_whole_numbers_are_no_means(weights):
    def loss(w, batch):
        value, metrics = with_metrics(w, batch)
        return value, {"per cent": (100 * metrics["accuracy"]).astype(int)}

    with pytest.raises(jaxmem.JaxmemWarning, match="Nothing is proved of these: .*'per cent'"):
        jaxmem.microbatch(loss, 4)(weights, data())


def test_a_bound_that_changes_is_read_again(weights):
    least = [1.0]

    def loss(w, batch):
        counted = jnp.maximum(batch["mask"].sum(), least[0])
        return jnp.sum(each(w, batch) * batch["mask"]) / counted

    sliced = jaxmem.microbatch(loss, 4)
    sliced(weights, data())
    least[0] = 60.0
    expected = jax.value_and_grad(loss)(weights, data())
    chex.assert_trees_all_close(sliced(weights, data()), expected, rtol=1e-11)


def test_a_loss_that_is_no_quotient_any_more(weights):
    of = [of_mask]
    sliced = jaxmem.microbatch(lambda w, batch: of[0](w, batch), 4)
    sliced(weights, data())
    of[0] = lambda w, batch: jnp.mean(each(w, batch))
    chex.assert_trees_all_close(
        sliced(weights, data()), jax.value_and_grad(of[0])(weights, data()), rtol=1e-11
    )


def test_a_loss_that_is_another_one_each_time(weights):
    of = [of_mask, of_mask]

    def changing(w, batch):
        return of.pop()(w, batch) if of else jnp.mean(each(w, batch))

    with pytest.raises(jaxmem.JaxmemError, match="none when it is traced again with the same"):
        jaxmem.microbatch(changing, 4)(weights, data())


def squared_too(w, batch):
    loss = of_mask(w, batch)
    return loss + loss**2


def zero_below_a_number(w, batch):
    count = batch["mask"].sum()
    return jnp.where(count > 2, jnp.sum(each(w, batch)) / jnp.maximum(count, 1), 0.0)


def masked_and_zero_below_a_number(w, batch):
    """A slice may have less than the number, and the batch more."""
    count = batch["mask"].sum()
    loss = jnp.sum(each(w, batch) * batch["mask"]) / jnp.maximum(count, 1)
    return jnp.where(count > 2, loss, 0.0)


def masked_and_zero_below_two_numbers(w, batch):
    count = batch["mask"].sum()
    loss = jnp.sum(each(w, batch) * batch["mask"]) / jnp.maximum(count, 1)
    return jnp.where(count > 0, jnp.where(count >= 1, loss, 0.0), 0.0)


def zero_below_nothing(w, batch):
    count = batch["mask"].sum()
    loss = jnp.sum(each(w, batch) * batch["mask"]) / jnp.maximum(count, 1)
    return jnp.where(count >= 0, loss, 0.0)


def zero_by_something_else(w, batch):
    return jnp.where(batch["x"].sum() > 0, of_mask(w, batch), 0.0)


def one_of_two_is_zero(w, batch):
    return bounded(w, batch) + jnp.where(batch["mask"].sum() > 0, bounded(w, batch), 0.0)


def rest_of_the_batch(w, batch):
    return of_mask(w, batch) + jnp.sum(jnp.abs(batch["x"]) * w.sum())


def rest_that_grows(w, batch):
    return of_mask(w, batch) * len(batch["x"]) + jnp.sum(w) / len(batch["x"])


def bounded_where_something_else_is(w, batch):
    count = batch["mask"].sum()
    divisor = jnp.where(batch["x"].sum() > 0, 1, count)
    return jnp.sum(each(w, batch) * batch["mask"]) / divisor


def unmasked(w, batch):
    return jnp.sum(each(w, batch)) / batch["mask"].sum()


def half_masked(w, batch):
    return (jnp.sum(each(w, batch) * batch["mask"]) + jnp.sum(each(w, batch))) / batch["mask"].sum()


def of_parameters(w, batch):
    return jnp.sum(each(w, batch)) / jnp.maximum(jnp.sum(batch["x"] @ w), 1)


def two_divisors(w, batch):
    return of_mask(w, batch) + bounded(w, batch)


def bounded_by_examples(w, batch):
    return jnp.sum(each(w, batch)) / jnp.maximum(batch["mask"].sum(), len(batch["x"]))


def of_a_root(w, batch):
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.sqrt(batch["mask"].sum())


def complex_divisor(w, batch):
    return jnp.real(jnp.sum(each(w, batch) * batch["mask"]) / (batch["mask"].sum() + 1j))


def rounded(w, batch):
    return (100 * of_mask(w, batch)).astype(int).astype(float) + 0 * jnp.sum(w)


def rounded_mask(w, batch):
    """Where nothing is counted, something may be left of the mask."""
    half = batch["mask"] / 2
    return jnp.sum(each(w, batch) * half) / jnp.sum(half.astype(int))


def rounded_bound(w, batch):
    return jnp.sum(each(w, batch)) / jnp.maximum(batch["mask"].sum(), 0.5).astype(int)


def rounded_count(w, batch):
    """Of a slice that may be 0, though something is counted."""
    return jnp.sum(each(w, batch) * batch["mask"]) / jnp.sum(batch["mask"] * 0.4).astype(int)


def bounded_and_less(w, batch):
    return jnp.sum(each(w, batch)) / (jnp.maximum(batch["mask"].sum(), 1) + -1.0)


def factors_that_lie_otherwise(w, batch):
    one, other = batch["mask"], batch["mask"][:, ::-1]
    pairs = one[:, :, None] * other[:, None]
    return jnp.sum(each(w, batch)[:, :, None] * pairs) / jnp.sum(one * other)


@pytest.mark.parametrize(
    "loss",
    [
        squared_too,
        zero_below_a_number,
        masked_and_zero_below_a_number,
        masked_and_zero_below_two_numbers,
        zero_below_nothing,
        zero_by_something_else,
        one_of_two_is_zero,
        rest_of_the_batch,
        rest_that_grows,
        bounded_where_something_else_is,
        unmasked,
        half_masked,
        of_parameters,
        two_divisors,
        bounded_by_examples,
        of_a_root,
        complex_divisor,
        rounded,
        rounded_mask,
        rounded_bound,
        rounded_count,
        bounded_and_less,
        factors_that_lie_otherwise,
    ],
)
def test_what_is_no_such_mean_is_told_of(loss, weights):
    with pytest.raises(jaxmem.JaxmemWarning, match="not proved to be a mean or a sum"):
        jaxmem.microbatch(loss, 4)(weights, data())


def test_weights_that_cancel_are_not_lost(weights):
    """Their sum over a slice is 0, and what it was divided into is not known any more."""

    def loss(w, batch):
        return jnp.sum(each(w, batch) * batch["signs"]) / batch["signs"].sum()

    batch = data()
    expected = jax.value_and_grad(loss)(weights, batch)
    found = jaxmem.microbatch(loss, 2)(weights, batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-10)
    value, gradient = jaxmem.microbatch(loss, 4)(weights, data(empty=True))
    assert jnp.isnan(value) and jnp.isnan(gradient).all()


def test_low_precision_counts_in_float32(weights):
    """256 ones in bfloat16 and one more are 256."""

    def loss(w, batch):
        masked = jnp.sum(batch["x"] * w * batch["mask"].astype(jnp.float32))
        return masked / jnp.sum(batch["mask"]).astype(jnp.float32)

    batch = {"x": jnp.ones((600, 1), jnp.float32), "mask": jnp.ones((600, 1), jnp.bfloat16)}
    found, _ = jaxmem.microbatch(loss, 300)(jnp.float32(1.0), batch)
    np.testing.assert_allclose(found, 1, rtol=1e-2)


def test_a_train_step_and_its_plan(weights):
    """What recomputes is planned for a slice, and what is weighted is the loss as it is."""

    def loss(w, batch):
        return of_mask(jnp.tanh(w), batch)

    batch = data()
    plain = jaxmem.train_step(loss, optax.sgd(0.1))
    sliced = jaxmem.train_step(loss, optax.sgd(0.1), microbatches=4, remat="sqrt")
    states = [step(step.init(jnp.copy(weights)), batch)[0].params for step in (plain, sliced)]
    chex.assert_trees_all_close(*states, rtol=1e-11)


def test_fit_cuts_a_batch_of_masked_sequences():
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        losses = jnp.mean(jnp.square(x - batch["y"]), -1)
        return jnp.sum(losses * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)

    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6
    rows = jax.ShapeDtypeStruct((64, 64, 256), jnp.float32)
    batch = {"x": rows, "y": rows, "mask": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    step = jaxmem.fit(
        loss, optax.sgd(0.1), params, batch, budget="24MiB", target="h100", keep="placement"
    )
    assert step.fitting.chosen.levers.microbatches > 1
