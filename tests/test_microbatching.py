"""Slices equal the whole batch, and stay where they are."""

import os
import re
import subprocess
import sys
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import jaxmem


def data(examples=12):
    random = np.random.default_rng(0)
    return {
        "x": jnp.asarray(random.normal(size=(examples, 5))),
        "mask": jnp.asarray(random.integers(0, 2, size=(examples, 5)), jnp.float64),
        "label": jnp.asarray(random.integers(0, 3, size=examples)),
    }


class Model(nn.Module):
    norm: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, param_dtype=jnp.float64)(x)
        if self.norm == "batch":
            x = nn.BatchNorm(False, param_dtype=jnp.float64)(x)
        if self.norm == "group":
            x = nn.GroupNorm(2, param_dtype=jnp.float64)(x)
        return nn.Dense(3, param_dtype=jnp.float64)(nn.tanh(x))


def losses_of(logits, batch, reduce):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = logits.argmax(-1) == batch["label"]
    return reduce(losses), {"accuracy": reduce(right * 1.0), "right": right.sum()}


def make(reduce=jnp.mean):
    random = np.random.default_rng(1)
    params = [jnp.asarray(random.normal(size=shape)) for shape in ((5, 8), (8, 3))]

    def loss_fn(params, batch):
        return losses_of(jnp.tanh(batch["x"] @ params[0]) @ params[1], batch, reduce)

    return loss_fn, params


def make_flax(norm):
    model = Model(norm)
    variables = jax.jit(model.init)(jax.random.key(0), data()["x"])

    def loss_fn(params, batch):
        logits, _ = model.apply(
            {**variables, "params": params}, batch["x"], mutable=["batch_stats"]
        )
        return losses_of(logits, batch, jnp.mean)

    return loss_fn, variables["params"]


def whole(loss_fn, params, batch):
    return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("size", "count"), [(12, 1), (12, 4), (12, 12), (11, 4), (13, 3)])
def test_equals_the_whole_batch(size, count, reduction):
    loss_fn, params = make(reduce={"mean": jnp.mean, "sum": jnp.sum}[reduction])
    sliced = jaxmem.microbatch(loss_fn, count, reduction=reduction, uneven=size % count > 0)
    found = (jax.jit(sliced) if count != 4 else sliced)(params, data(size))
    chex.assert_trees_all_close(found, whole(loss_fn, params, data(size)), rtol=1e-12)


@pytest.mark.slow
def test_group_norm_is_equal_and_batch_norm_is_as_documented():
    loss_fn, params = make_flax("group")
    found = jax.jit(jaxmem.microbatch(loss_fn, 4))(params, data())
    chex.assert_trees_all_close(found, whole(loss_fn, params, data()), rtol=1e-12)

    loss_fn, params = make_flax("batch")
    found = jax.jit(jaxmem.microbatch(loss_fn, 4, reduction="mean"))(params, data())
    full = whole(loss_fn, params, data())
    assert abs(found[0][0] - full[0][0]) > 1e-3 * abs(full[0][0])
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i::4], data()) for i in range(4)]
    each = [whole(loss_fn, params, part) for part in parts]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *each)
    chex.assert_trees_all_close(
        (found[0][0], found[1]), (mean[0][0], mean[1]), rtol=1e-12, atol=1e-15
    )


def test_batch_statistics_are_carried_from_slice_to_slice():
    model = Model("batch")
    variables = model.init(jax.random.key(0), data()["x"])

    def loss_fn(params, batch, *, model_state):
        both = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(both, batch["x"], mutable=["batch_stats"])
        return jnp.mean(logits**2), new["batch_stats"]

    (_, found), _ = jaxmem.microbatch(loss_fn, 3, reduction="mean")(
        variables["params"], data(), model_state=variables["batch_stats"]
    )
    expected = variables["batch_stats"]
    for index in range(3):
        part = jax.tree.map(lambda leaf, i=index: leaf[i::3], data())
        _, expected = loss_fn(variables["params"], part, model_state=expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)  # the state is in float32


@pytest.mark.parametrize("empty", [False, True])
def test_unequal_token_counts(empty):
    """A mean over tokens, and a slice that has none of them."""
    batch = data()
    if empty:
        batch["mask"] = batch["mask"].at[1::4].set(0)

    def loss_fn(w, batch):
        return jnp.sum(batch["mask"] * (batch["x"] * w[None]) ** 2) / batch["mask"].sum()

    sliced = jaxmem.microbatch(loss_fn, 4, weight=lambda batch: batch["mask"].sum())
    found = sliced(jnp.arange(5.0), batch)
    expected = jax.value_and_grad(loss_fn)(jnp.arange(5.0), batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-12)


def test_each_slice_draws_its_own_dropout():
    def loss_fn(w, batch, *, key):
        return jnp.sum(w * jax.random.uniform(key, (3,))) + 0 * batch["x"].mean()

    _, gradient = jaxmem.microbatch(loss_fn, 4)(jnp.ones(3), data(), key=jax.random.key(7))
    keys = [jax.random.fold_in(jax.random.key(7), i) for i in range(4)]
    drawn = [jax.random.uniform(key, (3,)) for key in keys]
    assert len({float(each[0]) for each in drawn}) == 4
    np.testing.assert_allclose(gradient, sum(drawn) / 4, rtol=1e-12)


def test_the_reduction_of_a_loss_is_told_from_its_program():
    for reduce in (jnp.mean, jnp.sum):
        loss_fn, params = make(reduce)
        found = jaxmem.microbatch(loss_fn, 4)(params, data())
        chex.assert_trees_all_close(found, whole(loss_fn, params, data()), rtol=1e-12)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.microbatch(loss_fn, 4, reduction="mean")(params, data())
    assert str(caught.value) == (
        "The loss is a sum over its examples, and reduction='mean' was given. Leave it out, or "
        "make the loss a mean."
    )


def test_a_loss_of_which_nothing_is_proved_is_averaged_with_a_warning():
    def loss_fn(w, batch):
        x = batch["x"] @ w
        return jnp.mean((x - x.mean()) ** 2)

    w, said = jnp.ones(5), []
    sliced = jaxmem.microbatch(loss_fn, 4)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = sliced(w, data())
        said.append([str(each.message) for each in caught])
    assert [len(each) for each in said] == [1, 0], "once for each shape"
    assert said[0][0].startswith(
        "The gradients of 4 microbatches are averaged, and that may not be the gradient of the "
        "whole batch: the loss is not proved to be a mean or a sum over its examples; its examples "
        "see one another (sub at test_microbatching.py:"
    )
    assert "pass reduction='mean'" in said[0][0] and "weight=" in said[0][0]
    meant = jaxmem.microbatch(loss_fn, 4, reduction="mean")(w, data())
    chex.assert_trees_all_close(found, meant, rtol=1e-12)


def test_a_planned_loss_is_proved_by_what_it_was():
    loss_fn, params = make(jnp.sum)
    planned = jaxmem.microbatch(jaxmem.remat(loss_fn, planner="sqrt"), 4)
    chex.assert_trees_all_close(planned(params, data()), whole(loss_fn, params, data()), rtol=1e-12)


def test_dropout_by_the_key_of_the_step_needs_no_word_and_by_another_does():
    def loss_fn(w, batch, *, key=None):
        key = jax.random.key(0) if key is None else key
        weights = w * jax.random.bernoulli(key, 0.5, w.shape)
        kept = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, batch["x"].shape)
        return jnp.mean((batch["x"] * kept * weights[None]) ** 2)

    jaxmem.microbatch(loss_fn, 4)(jnp.ones(5), data(), key=jax.random.key(0))
    with pytest.warns(
        jaxmem.JaxmemWarning, match="from a key that all slices would have in common"
    ):
        jaxmem.microbatch(loss_fn, 4)(jnp.ones(5), data())


def proved_metrics(w, batch, key=None):
    """Metrics of which it is proved what they are."""
    x, label = batch["x"], batch["label"]
    logits = x @ w
    right = logits.argmax(-1) == label
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    metrics = {
        "accuracy": right.mean(),
        "right": right.sum(),
        "total loss": losses.sum(),
        "examples": len(x),
        "of examples": jnp.float64(len(x)),
        "norm": jnp.linalg.norm(w),
        "classes": jnp.int32(logits.shape[-1]),
        "each": {"loss": losses, "class": logits.argmax(-1), "right": right, "logits": logits},
        "counts": jax.nn.one_hot(logits.argmax(-1), 3).sum(0),
        "binned": jnp.bincount(label, length=3),
        "confused": jnp.zeros((3, 3), jnp.int32).at[label, logits.argmax(-1)].add(1),
        "zeros": jnp.zeros(len(x)),
    }
    return losses.mean(), metrics


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (12, 1),
        (12, 4),
        (13, 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(12, 12), (11, 4)]),
    ],
)
def test_metrics_are_those_of_the_whole_batch(size, count):
    """Without a word where it is proved, under jit or not, with a `weight` too."""
    w = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)))
    expected = whole(proved_metrics, w, data(size))
    uneven = size % count > 0
    sliced = jaxmem.microbatch(proved_metrics, count, uneven=uneven)
    weighted = jaxmem.microbatch(
        proved_metrics, count, uneven=uneven, weight=lambda batch: len(batch["x"])
    )
    for found in (sliced(w, data(size)), jax.jit(weighted)(w, data(size))):
        chex.assert_trees_all_close(found, expected, rtol=1e-12)
        chex.assert_trees_all_equal_dtypes(found, expected)


def unproved_metrics(w, batch):
    logits = batch["x"] @ w
    centred = logits - logits.mean(0)[None]
    metrics = {
        "largest": logits.max(),
        "class": logits.mean(0).argmax(),
        "any": jnp.any(logits > 0),
        "centred": centred,
    }
    return jnp.mean(logits**2), metrics


def test_of_metrics_that_are_not_proved_it_is_said_what_becomes_of_them():
    w = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)))
    sliced = jaxmem.microbatch(unproved_metrics, 3)
    with pytest.warns(jaxmem.JaxmemWarning) as caught:
        (_, metrics), _ = sliced(w, data())
    (said,) = (str(each.message) for each in caught)
    assert said.startswith(
        "Metrics of 3 microbatches may not be those of the whole batch. Nothing is proved of "
        "these: metrics['any'], bool[], is added (its examples see one another (reduce_or at "
    )
    for part in (
        "metrics['centred'], float64[12, 3], is joined (its examples see one another (sub at ",
        "metrics['class'], int64[], is added (it is no plain mean over examples (argmax at ",
        "metrics['largest'], float64[], is averaged (its examples see one another (reduce_max at ",
        "If that is what you want, pass reduction='mean'. If not, let loss_fn return a mean, a "
        "sum, or an array with a row for each example",
    ):
        assert part in said, said
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i::3], data()) for i in range(3)]
    each = [unproved_metrics(w, part)[1] for part in parts]
    assert metrics["largest"] == pytest.approx(sum(one["largest"] for one in each) / 3)
    assert metrics["class"] == sum(one["class"] for one in each)
    np.testing.assert_allclose(metrics["centred"][1::3], each[1]["centred"])
    sliced(w, data())  # said once
    jaxmem.microbatch(unproved_metrics, 3, reduction="mean")(w, data())  # and not against a word

    step = jaxmem.train_step(unproved_metrics, optax.sgd(0.1), microbatches=3)
    with pytest.warns(
        jaxmem.JaxmemWarning, match=r"metrics\['largest'\], float64\[\], is averaged"
    ):
        step(step.init(w), data())


@pytest.mark.parametrize(
    ("form", "shape"), [(jnp.transpose, "[2, 12]"), (lambda x: x.repeat(2, 0), "[24, 2]")]
)
def test_a_metric_with_its_examples_in_another_place(form, shape):
    def loss_fn(w, batch):
        x = batch["x"] @ w
        return jnp.mean(x**2), {"form": form(x)}

    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.microbatch(loss_fn, 3)(jnp.ones((5, 2)), data())
    assert str(caught.value) == (
        f"metrics['form'] is float64{shape} for the whole batch, a shape that depends on the batch "
        "and does not have a row for each example along its first axis, so that those of slices "
        "cannot be put together. Put the examples first, or reduce it in loss_fn."
    )


def test_complex_parameters():
    def loss_fn(w, batch):
        return jnp.mean(jnp.abs(batch["x"] @ w) ** 2), {"mean": jnp.mean(batch["x"] @ w)}

    w = jnp.arange(5) + 1j
    found = jaxmem.microbatch(loss_fn, 3)(w, data())
    chex.assert_trees_all_close(found, whole(loss_fn, w, data()), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 4])
def test_where_all_weighs_nothing_loss_and_gradients_are_zero(count):
    def loss_fn(w, batch):
        return jnp.sum(batch["mask"] * (batch["x"] * w) ** 2) / batch["mask"].sum()

    sliced = jaxmem.microbatch(loss_fn, count, weight=lambda batch: batch["mask"].sum())
    batch = {**data(), "mask": jnp.zeros((12, 5))}
    loss, gradient = sliced(jnp.ones((1, 5)), batch)
    np.testing.assert_array_equal(loss, 0)
    np.testing.assert_array_equal(gradient, jnp.zeros((1, 5)))


@pytest.mark.parametrize(
    "weight",
    [
        lambda batch: True,
        lambda batch: batch["mask"].sum() > -1,
        lambda batch: jnp.int8(100),
        lambda batch: jnp.uint8(200),
        lambda batch: jnp.float16(60000),
        lambda batch: jnp.int32(2**30),
        lambda batch: jnp.asarray(3, jnp.float8_e4m3fn),
        lambda batch: jnp.asarray(3, jnp.int4),
        lambda batch: 3,
    ],
)
def test_weights_count_in_whatever_type_they_are(weight):
    """A sum of booleans is a boolean, and one of short integers wraps around."""

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] * w) ** 2)

    batch, w = {name: data()[name] for name in ("x", "mask")}, jnp.arange(5.0)[None]
    loss, gradient = jax.value_and_grad(loss_fn)(w, batch)
    found, sliced = jaxmem.microbatch(loss_fn, 4, weight=weight)(w, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-12)
    np.testing.assert_allclose(sliced, gradient, rtol=1e-12)


def test_a_key_among_the_metrics_is_the_last_ones():
    def loss_fn(w, batch):
        return jnp.mean((batch["x"] * w) ** 2), {"key": jax.random.key(3)}

    (_, metrics), _ = jaxmem.microbatch(loss_fn, 4)(jnp.ones((1, 5)), {"x": data()["x"]})
    assert metrics["key"] == jax.random.key(3)


def test_weights_that_are_no_numbers():
    loss_fn, params = make()
    said = "weight= returns one real number for a slice of the batch, such as batch['mask'].sum(); "
    for weight, found in (
        (lambda batch: batch["mask"].sum(-1), "it returned an array float64[3]."),
        (lambda batch: None, "it returned None."),
        (lambda batch: 2j, "it returned 2j."),
    ):
        with pytest.raises(jaxmem.JaxmemError) as caught:
            jaxmem.microbatch(loss_fn, 4, weight=weight)(params, data())
        assert str(caught.value) == said + found
    with pytest.raises(jaxmem.JaxmemError, match="weight= takes a function of a slice .* got 3"):
        jaxmem.microbatch(loss_fn, 4, weight=3)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_sums_in_float32_for_parameters_of_low_precision(kind):
    """256 slices of gradient 1/256 each: bfloat16 would stop adding them at 1."""

    def loss_fn(w, x):
        return jnp.sum(w.astype(jnp.float32)) * 3 * x.mean().astype(jnp.float32)

    w = jnp.zeros(2, kind)
    _, gradient = jaxmem.microbatch(loss_fn, 256)(w, jnp.ones((256, 1)))
    assert gradient.dtype == kind
    np.testing.assert_array_equal(gradient.astype(jnp.float32), 3)


def test_memory_does_not_grow_with_the_count():
    def loss_fn(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    temps = []
    for count in (1, 4, 16):
        x = jax.ShapeDtypeStruct((2048 * count, 256), jnp.float32)
        report = jaxmem.memory(jaxmem.microbatch(loss_fn, count), w, x, target="h200")
        temps.append(report.temp)
    assert temps[2] <= temps[1] + 2**16 and temps[1] <= 1.5 * temps[0], temps


@pytest.mark.parametrize("own", [False, True])
def test_a_sharded_batch_stays_and_gradients_cross_devices_once(own):
    """With ``sharding=``, or by `train_step` from where the batch lies."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("data"))

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    whole = NamedSharding(mesh, P())
    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=whole)] * 2
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=place)
    target = jaxmem.target("h200", count=8)
    if own:
        report = jaxmem.memory(
            jaxmem.microbatch(loss_fn, 4, sharding=place), params, x, target=target
        )
    else:
        step = jaxmem.train_step(loss_fn, optax.sgd(0.1), microbatches=4)
        state = jaxmem.eval_shape(step.init, params)
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), state
        )
        report = step.memory(state, x, target=target)
    assert not re.search(r"all-to-all|all-gather|collective-permute", report.hlo)
    bodies = [
        part for part in report.hlo.split("\n\n") if re.search(r"= .*all-reduce(-start)?\(", part)
    ]
    assert len(bodies) == 1 and bodies[0].lstrip().startswith("ENTRY")
    assert len(re.findall(r"all-reduce(?:-start)?\(", bodies[0])) == 1


def test_a_sharded_batch_gives_the_gradient_of_the_whole():
    """On eight CPU devices, in a process of its own."""
    code = """
import itertools, jax, jax.numpy as jnp, numpy as np, jaxmem
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
place = NamedSharding(mesh, P("data"))
x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 3)))
w = jnp.arange(9.0).reshape(3, 3)
mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, size=(64, 3))) * 1.0
def loss(w, batch):
    x, mask = batch
    found = jnp.tanh(x @ w)
    own = {"mean": found.mean(), "rows": found, "norm": (w * w).sum(), "of": w.shape[0]}
    masked = jnp.sum(mask * found) / jnp.maximum(mask.sum(), 1)
    return masked + 0.1 * jnp.sum(w**2), {"n": mask.sum().astype(int), **own}
mask = mask.at[:8].set(0)  # one device has nothing that is counted
batch = jax.device_put((x, mask), place)
weights = (lambda batch: batch[1].sum()), None
for part, weight in itertools.product((4, 1), weights):
    found = jax.jit(jaxmem.microbatch(loss, part, weight=weight, sharding=place))(w, batch)
    expected = jax.value_and_grad(loss, has_aux=True)(w, (x, mask))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("count", "options", "said"),
    [
        (
            5,
            {},
            "A batch of 12 does not divide into 5 equal slices. It divides by 1, 2, 3, 4, 6, 12",
        ),
        (13, {}, "A batch of 12 cannot be cut into 13 slices."),
        (8, {"uneven": True}, "slices of 2 are 6. Pass count=6."),
    ],
)
def test_batches_that_do_not_divide(count, options, said):
    loss_fn, params = make()
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.microbatch(loss_fn, count, **options)(params, data())
    assert said in str(caught.value)


def test_batches_that_cannot_be_cut():
    loss_fn, params = make()
    sliced = jaxmem.microbatch(loss_fn, 2)
    with pytest.raises(
        jaxmem.JaxmemError, match=r"\['label'\] has 12, batch\['mask'\] has 12, .* 6"
    ):
        sliced(params, {**data(), "x": data(6)["x"]})
    with pytest.raises(jaxmem.JaxmemError, match=r"batch\['rate'\] is a scalar.* close over it"):
        sliced(params, {**data(), "rate": jnp.ones(())})
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jaxmem.microbatch(loss_fn, 2, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(jaxmem.JaxmemError, match="over 8 devices .* must be a multiple of 16"):
        sharded(params, data())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1, 2), "jaxmem.microbatch takes a loss function; got 1."),
        ((len, 0), "count=, the number of slices, as an int of 1 or more; got 0."),
        ((len, 2.0), "as an int of 1 or more; got 2.0."),
        ((len, 2, "max"), "reduction= is 'mean' or 'sum', as the loss is; got 'max'."),
        ((len, 2, "sum", len), "A loss that is a sum needs no weight="),
        ((len, 2, "mean", None, False, "data"), "sharding= takes the batch's NamedSharding"),
    ],
)
def test_bad_arguments(arguments, said):
    names = ("loss_fn", "count", "reduction", "weight", "uneven", "sharding")
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.microbatch(**dict(zip(names, arguments, strict=False)))
    assert said in str(caught.value)


def reshaped(params, batch):
    for name in batch:
        batch[name] = batch[name].reshape(-1, *batch[name].shape[2:])
    return jnp.mean(jnp.tanh(batch["x"] @ params) ** 2)


def emptied(params, batch):
    labels = batch.pop("mask")
    return jnp.mean((jnp.tanh(batch.pop("x") @ params).sum(-1) - labels) ** 2)


def normalised_mask(params, batch):
    each = jnp.mean(jnp.tanh(batch["x"] @ params) ** 2, -1)
    batch["mask"] = batch["mask"] / batch["mask"].sum()
    return jnp.sum(each * batch["mask"])


def popped(batch):
    return batch.pop("mask").sum()


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(reshaped, None), (emptied, None), (normalised_mask, popped)],
)
def test_what_a_loss_changes_in_its_batch_nobody_else_reads(loss, weight):
    """As under `jax.jit`, which hands on containers of its own."""
    x = jnp.cos(jnp.arange(6 * 4 * 8.0)).reshape(6, 4, 8)
    batch, params = {"x": x, "mask": jnp.abs(jnp.sin(jnp.arange(24.0))).reshape(6, 4)}, jnp.eye(8)
    wanted = jax.jit(jax.value_and_grad(loss))(params, dict(batch))
    found = jaxmem.microbatch(loss, 3, weight=weight)(params, batch)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-12, atol=1e-15)
    assert sorted(batch) == ["mask", "x"] and batch["x"].shape == (6, 4, 8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("total", [jnp.mean, jnp.sum])
def test_our_own_cross_entropy_keeps_rows_apart(total):
    """In blocks of rows, which are others for a slice. It is known by its file, which had moved."""

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        losses = jaxmem.ops.softmax_cross_entropy(hidden, params["u"], batch["y"], block=(2, 64))
        return total(losses)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (8, 16)), "u": jax.random.normal(keys[1], (16, 256))}
    batch = {"x": jax.random.normal(keys[2], (8, 8)), "y": jnp.arange(8)}
    found = jaxmem.microbatch(loss, 4)(params, batch)
    expected = jax.value_and_grad(loss)(params, batch)
    chex.assert_trees_all_close(found[:2], expected, rtol=1e-5)


@pytest.mark.filterwarnings("error")
def test_a_gradient_penalty_is_cut():
    """In jax 0.12 the derivative of a `tanh` has an operation of its own."""

    def loss(params, batch):
        slopes = jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ params))))(batch)
        return jnp.mean(jnp.sum(slopes**2, -1))

    args = jnp.eye(3), jnp.arange(24.0).reshape(8, 3) / 9
    found = jaxmem.microbatch(loss, 4)(*args)
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(*args))


def of_groups(params, batch):
    """Rewards less the mean of their group, whose number is written out."""
    rewards = batch["rewards"].reshape(8, 4)
    gain = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
    return jnp.mean(jnp.tanh(batch["x"] @ params).mean(-1) * gain)


@pytest.mark.parametrize("count", [5, 8])
def test_a_loss_that_takes_not_every_slice_says_so(count):
    """A slice of 4 is taken, though nothing is proved of it; those of 5 and 3 are not."""

    def pairs(w, x):
        return jnp.mean(jnp.sum((x @ w) ** 2, -1).reshape(-1, 2).sum(1))

    step = jaxmem.microbatch(pairs, count, uneven=True)
    with pytest.raises(jaxmem.JaxmemError, match="takes no slice of the batch: cannot reshape"):
        step(jnp.eye(3), jnp.ones((24, 3)))


def test_what_a_loss_is_is_proved_at_each_call():
    """A function may be another one than before, for arguments of the same shapes."""
    means = True

    def loss_fn(w, x):
        each = jnp.mean((x @ w) ** 2, -1)
        return each.mean() if means else each.sum()

    step, w, x = jaxmem.microbatch(loss_fn, 4), jnp.eye(3), jnp.arange(24.0).reshape(8, 3)
    for means in (True, False, True):
        loss, gradient = step(w, x)
        assert loss == pytest.approx(loss_fn(w, x)), means
        plain, plain_gradient = jax.value_and_grad(loss_fn)(w, x)
        np.testing.assert_allclose(loss, plain, rtol=1e-12)
        np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-12)


def test_what_is_not_proved_is_told_once_and_again_when_it_is_another():
    reduce = jnp.max

    def loss_fn(w, x):
        return reduce((x @ w) ** 2)

    step, w, x = jaxmem.microbatch(loss_fn, 4), jnp.eye(3), jnp.arange(24.0).reshape(8, 3)
    with pytest.warns(jaxmem.JaxmemWarning, match="4 microbatches are averaged"):
        step(w, x)
    step(w, x)
    reduce = jnp.mean
    step(w, x)
    reduce = jnp.max
    with pytest.warns(jaxmem.JaxmemWarning, match="4 microbatches are averaged"):
        step(w, x)


@pytest.mark.parametrize("given", [{}, {"reduction": "mean"}, {"weight": lambda batch: 1.0}])
def test_a_loss_that_takes_no_slice_is_told(given):
    sliced = jaxmem.microbatch(of_groups, 4, **given)
    batch = {"x": jnp.ones((32, 8)), "rewards": jnp.ones(32)}
    with pytest.raises(jaxmem.JaxmemError, match="takes no slice of the batch: cannot reshape"):
        sliced(jnp.ones((8, 3)), batch)


def test_what_such_a_loss_says_ends_no_sentence_twice():
    def loss(w, x):
        return jnp.mean(x * w * jnp.arange(8.0)[:, None])

    with pytest.raises(jaxmem.JaxmemError, match="incompatible shapes") as told:
        jaxmem.microbatch(loss, 2)(jnp.ones(()), jnp.ones((8, 3)))
    assert ".." not in str(told.value)


def test_fit_leaves_such_a_batch_whole():
    batch = {
        "x": jax.ShapeDtypeStruct((32, 1024), jnp.float32),
        "rewards": jax.ShapeDtypeStruct((32,), jnp.float32),
    }
    params = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    for allow in ((), "statistics"):
        with pytest.raises(jaxmem.BudgetError) as raised:
            jaxmem.fit(
                *(of_groups, optax.sgd(1e-2), params, batch),
                budget="1MiB",
                target="h100",
                allow=allow,
            )
        assert "microbatches: the loss takes no slice of the batch" in " ".join(
            str(raised.value).split()
        )
        assert "allow='statistics'" not in str(raised.value)
