"""The composed step: equal to the plain one, donated, and refusing what cannot work."""

import functools
import itertools
import os
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
from flax import nnx
from flax.training import train_state

import jaxmem


def loss_fn(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2), {"size": jnp.mean(jnp.abs(x))}


def arguments():
    random = np.random.default_rng(0)
    layers = [random.normal(size=(6, 6)).astype(np.float32) / 2 for _ in range(6)]
    params = {"layers": [jnp.asarray(layer) for layer in layers]}
    batches = [
        {k: jnp.asarray(random.normal(size=(4, 6)), jnp.float32) for k in "xy"} for _ in range(6)
    ]
    return params, batches


RTOL = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}
PLANNERS = ["sqrt", "dp"]


def plain_training(optimizer, every):
    params, batches = arguments()
    state = optimizer.init(params)
    for start in range(0, len(batches), every):
        gradients = [
            jax.grad(loss_fn, has_aux=True)(params, batch)[0]
            for batch in batches[start : start + every]
        ]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / every, *gradients)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


SCALE = jaxmem.LossScale(initial=2.0**8)
LEVERS = (["fp32", "bf16", "fp16"], [None, *PLANNERS], [1, 4], [1, 3])
# A third of all combinations has each pair of levers at least once; the others are heavy.
COMBINATIONS = [
    pytest.param(
        *(lever[at] for lever, at in zip(LEVERS, numbers, strict=True)),
        marks=[pytest.mark.slow] * (sum(numbers) % 3 != 0),
    )
    for numbers in itertools.product(*(range(len(lever)) for lever in LEVERS))
]


@pytest.mark.parametrize(("precision", "remat", "microbatches", "every"), COMBINATIONS)
def test_every_combination_trains_as_the_plain_step(precision, remat, microbatches, every):
    inner = optax.sgd(0.3, momentum=0.9)
    step = jaxmem.train_step(
        loss_fn,
        jaxmem.accumulate(inner, every) if every > 1 else inner,
        precision=precision,
        remat=remat,
        microbatches=microbatches,
        loss_scale=SCALE if precision == "fp16" else None,
    )
    params, batches = arguments()
    state = step.init(params)
    for batch in batches:
        expected = loss_fn(state.params, batch)
        state, metrics = step(state, batch)
        assert metrics["loss"].dtype == metrics["size"].dtype == jnp.float32
        np.testing.assert_allclose(metrics["loss"], expected[0], rtol=RTOL[precision])
        np.testing.assert_allclose(metrics["size"], expected[1]["size"], rtol=RTOL[precision])
    assert int(state.step) == 6
    assert precision != "fp16" or int(metrics["skipped"]) == 0
    tolerance = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}[precision]
    chex.assert_trees_all_close(state.params, plain_training(inner, every), atol=tolerance)
    assert step._jitted._cache_size() == 1, "compiled once, not once more for the second step"


@pytest.mark.parametrize("remat", [None, functools.partial(jaxmem.remat, planner="sqrt")])
@pytest.mark.parametrize("every", [1, 3])
def test_state_on_the_host_trains_as_on_the_device(remat, every):
    inner = optax.adam(0.01)
    scaling = {"precision": "fp16", "loss_scale": SCALE}
    params, batches = arguments()
    found = []
    for optimizer in (inner, jaxmem.offload(inner)):
        optimizer = jaxmem.accumulate(optimizer, every) if every > 1 else optimizer
        step = jaxmem.train_step(loss_fn, optimizer, remat=remat, microbatches=2, **scaling)
        state = step.init(jax.tree.map(jnp.copy, params))
        for batch in batches:
            state, _ = step(state, batch)
        assert step._jitted._cache_size() == 1
        found.append(state.params)
    chex.assert_trees_all_close(*found, atol=1e-6)


def test_model_state_and_keys():
    def loss(params, batch, *, model_state, key):
        noise = jax.random.normal(key, (), jnp.float32)
        mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch).astype(jnp.bfloat16)
        return jnp.mean(params["w"] * batch), {"mean": mean}, {"noise": noise}

    step = jaxmem.train_step(loss, optax.sgd(0.1), precision="bf16", remat="sqrt")
    state = step.init(
        {"w": jnp.ones(3)}, model_state={"mean": jnp.zeros((), jnp.float32)}, key=jax.random.key(3)
    )
    noises = []
    for _ in range(3):
        state, metrics = step(state, jnp.ones(3, jnp.float32))
        noises.append(float(metrics["noise"]))
    assert len(set(noises)) == 3
    assert state.model_state["mean"].dtype == jnp.float32
    np.testing.assert_allclose(state.model_state["mean"], 1 - 0.9**3, rtol=2e-2)
    assert state.params["w"].dtype == jnp.float32


def test_parameters_are_kept_in_their_dtype():
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1), precision="params=bf16,compute=bf16")
    params, batches = arguments()
    state, metrics = step(step.init(params), batches[0])
    assert state.params["layers"][0].dtype == jnp.bfloat16
    assert metrics["loss"].dtype == jnp.float32


def test_the_state_is_donated():
    step = jaxmem.train_step(loss_fn, optax.adam(0.1))
    params, batches = arguments()
    state = step.init(params)
    step(state, batches[0])
    assert params["layers"][0].is_deleted()
    kept = jaxmem.train_step(loss_fn, optax.adam(0.1), donate=False)
    params, batches = arguments()
    kept(kept.init(params), batches[0])
    assert not params["layers"][0].is_deleted()
    report = step.memory(jaxmem.eval_shape(step.init, params), batches[0], target="h200")
    sizes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    assert report.alias >= 3 * sizes


def test_it_lowers_and_prints():
    params, batches = arguments()
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1))
    assert repr(step) == "TrainStep(loss_fn)"
    bf16 = jaxmem.train_step(loss_fn, optax.sgd(0.1), precision="bf16")
    assert repr(bf16) == "TrainStep(loss_fn, params=float32,compute=bfloat16,output=float32)"
    assert "stablehlo" in step.lower(step.init(params), batches[0]).as_text()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            lambda p, b: b,
            r"must be a floating-point scalar .* returned float32\[4, 6\]. Return its",
        ),
        (lambda p, b: 3, "must be a floating-point scalar to differentiate; loss_fn returned int"),
        (lambda p, b: (b.sum(), b.sum()), "loss_fn must return loss, with a dict of metrics after"),
        (lambda p, b: (b.sum(), {}, {}), "loss_fn must return loss, with a dict of metrics after"),
    ],
)
def test_losses_that_cannot_be_differentiated(loss, expected):
    step = jaxmem.train_step(loss, optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match=expected):
        step(step.init({"w": jnp.ones(2)}), jnp.ones((4, 6), jnp.float32))


def test_a_model_state_that_changes_shape():
    step = jaxmem.train_step(lambda p, b, model_state: (p["w"].sum(), {"mean": b}), optax.sgd(0.1))
    state = step.init({"w": jnp.ones(2)}, model_state={"mean": jnp.zeros(())})
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(state, jnp.ones((4, 6)))
    assert "model_state['mean'] is [4, 6] returned by loss_fn and [] in the state." in str(
        caught.value
    )


def test_a_state_of_another_optimizer():
    params, batches = arguments()
    adam, sgd = (jaxmem.train_step(loss_fn, o) for o in (optax.adam(0.1), optax.sgd(0.1)))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        adam(sgd.init(params), batches[0])
    assert str(caught.value) == (
        "opt_state[0].count is missing in the state; expected an int32 scalar, as by this "
        "optimizer's init of these params."
    )
    with pytest.raises(jaxmem.JaxmemError) as caught:
        sgd(adam.init(arguments()[0]), batches[0])
    assert str(caught.value) == (
        "opt_state[0].count is an int32 scalar in the state; expected nothing there, as by this "
        "optimizer's init of these params."
    )
    with pytest.raises(jaxmem.JaxmemError, match=r"with .state, batch., .* type builtins\.dict"):
        adam(params, batches[0])


def test_bad_arguments():
    with pytest.raises(jaxmem.JaxmemError, match="jaxmem.train_step takes an optax.Gradient"):
        jaxmem.train_step(loss_fn, "adam")
    with pytest.raises(jaxmem.JaxmemError, match="takes a loss function; got 1"):
        jaxmem.train_step(1, optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match="The precision 'half a float' does not parse"):
        jaxmem.train_step(loss_fn, optax.sgd(0.1), precision="half a float")
    with pytest.raises(jaxmem.PlanError, match="no planner named 'best'"):
        step = jaxmem.train_step(loss_fn, optax.sgd(0.1), remat="best")
    with pytest.raises(jaxmem.JaxmemError, match="remat= takes the name of a planner, .*; got 3"):
        step = jaxmem.train_step(loss_fn, optax.sgd(0.1), remat=3)  # noqa: F841


def test_a_metric_cannot_take_the_place_of_the_loss():
    step = jaxmem.train_step(lambda p, b: (p["w"].sum(), {"loss": b.sum()}), optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match='have a "loss" of their own'):
        step(step.init({"w": jnp.ones(2)}), jnp.ones(3))
    twice = jaxmem.train_step(lambda p, b: (p.sum(), {"loss": 2 * p.sum()}), optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match="the loss itself may be among them"):
        twice(twice.init(jnp.ones(2)), jnp.ones(3))


@pytest.mark.parametrize("remat", [None, "dp"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint, jaxmem.remat])
@pytest.mark.parametrize("told", [lambda loss: loss, jax.lax.stop_gradient])
def test_the_loss_itself_may_be_among_the_metrics(told, wrap, microbatches, remat):
    """As in many trainers; of the whole batch it is what the step says that it is."""

    @wrap
    def loss_fn(params, batch):
        loss = jnp.mean((batch @ params) ** 2)
        return loss, {"loss": told(loss), "half": loss / 2}

    options = {"microbatches": microbatches, "remat": remat}
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1), **options)
    batch = jnp.arange(12.0).reshape(4, 3)
    _, metrics = step(step.init(jnp.ones(3)), batch)
    wanted, _ = loss_fn(jnp.ones(3), batch)
    chex.assert_trees_all_close(metrics, {"loss": wanted, "half": wanted / 2}, rtol=1e-12)


@pytest.mark.parametrize("offload", [False, True])
def test_numpy_parameters_and_arrays_used_twice(offload):
    optimizer = jaxmem.offload(optax.adam(0.1)) if offload else optax.adam(0.1)
    shared = jnp.ones(2)
    step = jaxmem.train_step(
        lambda p, b: sum(jnp.sum(leaf * b) for leaf in jax.tree.leaves(p)), optimizer
    )
    state = step.init({"a": shared, "b": shared, "c": np.ones(2, np.float32)})
    for _ in range(2):
        state, _ = step(state, jnp.ones(2))
    np.testing.assert_allclose(state.params["a"], state.params["b"])
    np.testing.assert_allclose(state.params["a"], 0.8, rtol=1e-5)


def test_a_state_saved_in_mid_cycle_goes_on_with_another_cycle():
    params, batches = arguments()
    optimizers = [jaxmem.accumulate(optax.sgd(0.1), every) for every in (4, 2)]
    long, short = (jaxmem.train_step(loss_fn, optimizer) for optimizer in optimizers)
    state = long.init(params)
    for batch in batches[:3]:
        state, _ = long(state, batch)
    state, _ = short(state, batches[3])
    assert int(state.opt_state.gradient_step) == 1


# ---- Flax nnx


class Module(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def module_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2), {"count": jnp.asarray(1)}


def test_nnx_modules_train_as_by_nnx_itself():
    _, batches = arguments()
    model, optimizer = Module(nnx.Rngs(0)), optax.sgd(0.1)
    step = jaxmem.train_step(module_loss, optimizer, has_state=True)
    state = step.init(Module(nnx.Rngs(0)))
    own = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    plain = nnx.jit(nnx.value_and_grad(module_loss, has_aux=True))
    for batch in batches[:3]:
        state, metrics = step(state, batch)
        (loss, _), gradients = plain(model, batch)
        own.update(model, gradients)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert type(state.params) is dict and type(state.model_state) is dict
    restored = Module(nnx.Rngs(1))
    nnx.update(restored, state.params)
    np.testing.assert_allclose(restored.last.kernel[...], model.last.kernel[...], atol=1e-6)
    np.testing.assert_allclose(state.model_state["norm"]["mean"], model.norm.mean[...], atol=1e-6)
    assert int(state.model_state["dropout"]["rngs"]["count"]) == 3


class Clipped(nnx.Module):
    """Clips its weights in the call, as nnx.SpectralNorm normalises those of its layer."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        kernel = self.layer.kernel
        kernel[...] = jnp.clip(jax.lax.stop_gradient(kernel[...]), -0.1, 0.1)
        return self.layer(x)


class Doubled(nnx.Param):
    def get_value(self, **index):
        return 2 * super().get_value(**index)


class Wrapped(nnx.Module):
    """Transforms put other objects where values are, and a value may be read as another."""

    def __init__(self, rngs, transform=None):
        self.layer = nnx.Linear(6, 6, rngs=rngs)
        self.scale = Doubled(jnp.ones((1, 6), jnp.float32))
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.transform = transform

    def __call__(self, x):
        def apply(layer, x):
            return layer(x)

        layer = self.transform(apply) if self.transform else apply
        return self.norm(layer(self.layer, x)) * self.scale.get_value()


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "features", x)
        return x


def test_an_nnx_module_that_sets_its_parameters_is_refused():
    model = Clipped(nnx.Rngs(0))
    step = jaxmem.train_step(lambda model, batch: jnp.mean(model(batch) ** 2), optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(step.init(model), jnp.ones((4, 6)))
    assert str(caught.value).startswith(
        "The call of the nnx model sets a parameter, ['layer']['kernel'] (as nnx.SpectralNorm and "
        "nnx.WeightNorm do of the layers that they wrap). What a step trains is changed by its "
        "optimizer alone."
    )


class Stacked(nnx.Module):
    """Layers in a scan, each under a transform of its own, as large nnx models have them."""

    def __init__(self, rngs, transform, clipped=False):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return Clipped(rngs) if clipped else nnx.Linear(6, 6, rngs=rngs)

        self.layers, self.transform = layers(rngs), transform

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @self.transform
        def run(x, layer):
            return jnp.tanh(layer(x))

        return run(x, self.layers)


def of_model(model, batch):
    return jnp.mean(model(batch) ** 2)


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit, lambda fun: nnx.remat(nnx.jit(fun))])
def test_layers_in_an_nnx_scan_train(transform):
    batch = jax.random.normal(jax.random.key(1), (4, 6))
    model = Stacked(nnx.Rngs(0), transform)
    plain = nnx.grad(of_model)(model, batch)
    kernel = model.layers.kernel[...] - 0.1 * plain["layers"]["kernel"][...]
    step = jaxmem.train_step(of_model, optax.sgd(0.1))
    state, _ = step(step.init(model), batch)
    np.testing.assert_allclose(state.params["layers"]["kernel"], kernel, rtol=1e-6)


def test_a_layer_in_an_nnx_scan_that_sets_its_parameters_is_refused():
    model = Stacked(nnx.Rngs(0), nnx.remat, clipped=True)
    step = jaxmem.train_step(of_model, optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match=r"\['layers'\]\['layer'\]\['kernel'\]"):
        step(step.init(model), jnp.ones((4, 6)))


@pytest.mark.parametrize("transform", [None, nnx.remat, nnx.jit, nnx.vmap])
def test_nnx_modules_that_set_nothing_train(transform):
    """Whatever transforms and hooks they have, as by nnx itself."""
    if transform is nnx.vmap:
        transform = functools.partial(nnx.vmap, in_axes=(None, 0))

    def loss(model, batch):
        return jnp.mean((model(batch) - batch[:, ::-1]) ** 2)

    batch = jnp.cos(jnp.arange(24, dtype=jnp.float32)).reshape(4, 6)
    step = jaxmem.train_step(loss, optax.sgd(0.1))
    state = step.init(Wrapped(nnx.Rngs(0), transform))
    model = Wrapped(nnx.Rngs(0))
    own = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(3):
        state, metrics = step(state, batch)
        expected, gradient = nnx.value_and_grad(loss)(model, batch)
        own.update(model, gradient)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_an_nnx_module_sows_is_the_calls(microbatches):
    def loss(model, batch):
        out = model(batch)
        return jnp.mean((out - 1) ** 2)

    def own_loss(params, batch):
        return jnp.mean((batch @ params["kernel"] + params["bias"][None] - 1) ** 2)

    model, batch = Sowing(nnx.Rngs(0)), jnp.cos(jnp.arange(24.0)).reshape(4, 6)
    model(batch)
    params = {"kernel": model.layer.kernel[...], "bias": model.layer.bias[...]}
    own = jaxmem.train_step(own_loss, optax.sgd(0.1))
    expected = own.init(jax.tree.map(jnp.copy, params))
    step = jaxmem.train_step(loss, optax.sgd(0.1), microbatches=microbatches, reduction="mean")
    state = step.init(model)
    for _ in range(3):
        state, _ = step(state, batch)
        expected, _ = own(expected, batch)
    chex.assert_trees_all_close(state.params["layer"], expected.params, rtol=1e-5)


def test_nnx_modules_with_every_lever():
    _, batches = arguments()
    step = jaxmem.train_step(
        module_loss,
        jaxmem.accumulate(optax.adam(0.01), 2),
        precision="fp16",
        remat="sqrt",
        microbatches=2,
        reduction="mean",  # batch norm sees a slice
        loss_scale=SCALE,
    )
    state = step.init(Module(nnx.Rngs(0)))
    for batch in batches[:2]:
        state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"]) and int(metrics["count"]) == 1
    assert int(state.opt_state.gradient_step) == 1
    assert int(state.model_state["dropout"]["rngs"]["count"]) == 4, "once for each slice"
    with pytest.raises(jaxmem.JaxmemError, match="an nnx module of another structure"):
        step.init(nnx.Linear(6, 6, rngs=nnx.Rngs(0)))
    with pytest.raises(jaxmem.JaxmemError, match="has its own state: pass no model_state"):
        step.init(Module(nnx.Rngs(0)), model_state={"mean": jnp.zeros(2)})


# ---- what cannot work, and what works badly


def test_float16_without_a_loss_scale_is_a_warning_that_says_why():
    with pytest.warns(jaxmem.JaxmemWarning, match="gradients below 6e-8 become 0.*bfloat16.*none"):
        jaxmem.train_step(loss_fn, optax.sgd(0.1), precision="fp16")
    jaxmem.train_step(loss_fn, optax.sgd(0.1), precision="bf16")  # no warning: it would be an error


def test_float16_parameters_are_refused():
    with pytest.raises(jaxmem.JaxmemError, match="keeps params in float16 with no copy of higher"):
        jaxmem.train_step(loss_fn, optax.sgd(0.1), precision="params=fp16,compute=fp16")
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1))
    with pytest.raises(
        jaxmem.JaxmemError, match=r"The state keeps params\['w'\] in float16 with no"
    ):
        step.init({"w": jnp.ones(2, jnp.float16)})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_loss_of_low_precision_is_refused(dtype):
    step = jaxmem.train_step(lambda p, b: (p["w"] * b).sum().astype(dtype), optax.sgd(0.1))
    with pytest.raises(
        jaxmem.JaxmemError, match=f"computed in {jnp.dtype(dtype)}, which has 3 or 4"
    ):
        step(step.init({"w": jnp.ones(2)}), jnp.ones(2))


def test_has_state_is_checked():
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1), has_state=True)
    with pytest.raises(jaxmem.JaxmemError, match="no model state. Pass init.params, model_state="):
        step.init({"w": jnp.ones(2)})
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1), has_state=False)
    with pytest.raises(jaxmem.JaxmemError, match="was initialised with a model state. Leave it"):
        step.init({"w": jnp.ones(2)}, model_state={"mean": jnp.ones(2)})


def test_microbatches_are_checked_at_the_door():
    with pytest.raises(jaxmem.JaxmemError, match="as an int of 1 or more; got 0"):
        jaxmem.train_step(loss_fn, optax.sgd(0.1), microbatches=0)
    with pytest.raises(jaxmem.JaxmemError, match="loss_scale= takes a jaxmem.LossScale; got 65536"):
        jaxmem.train_step(loss_fn, optax.sgd(0.1), loss_scale=2.0**16)
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1), microbatches=3)
    params, batches = arguments()
    with pytest.raises(jaxmem.JaxmemError, match="A batch of 4 does not divide into 3 equal"):
        step(step.init(params), batches[0])


def test_microbatches_by_a_transformation_of_the_loss():
    def loss(params, batch):
        return jnp.sum(params["w"] * (batch["x"] * batch["mask"]).sum()) / batch["mask"].sum()

    mask = jnp.asarray([[1.0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 0]])
    batch = {"x": jnp.arange(12.0).reshape(4, 3), "mask": mask}
    results = []
    for microbatches in (
        1,
        functools.partial(jaxmem.microbatch, count=2, weight=lambda batch: batch["mask"].sum()),
    ):
        step = jaxmem.train_step(loss, optax.sgd(0.1), microbatches=microbatches)
        results.append(step(step.init({"w": jnp.ones(2)}), batch))
    chex.assert_trees_all_close(*results, rtol=1e-12)


def test_a_donation_that_xla_drops_is_reported():
    """A state whose dtype changes cannot take over the memory of what it replaces."""

    def widen(updates, state, params=None):
        return updates, {"big": state["big"].astype(jnp.float64)}

    big = jnp.zeros((64, 64), jnp.float32)
    widening = optax.GradientTransformation(lambda params: {"big": big}, widen)
    step = jaxmem.train_step(lambda p, b: (p["w"] * b).sum(), widening)
    state, batch = step.init({"w": jnp.ones(2)}), jnp.ones(2)
    for call in (
        lambda: step.memory(jaxmem.eval_shape(lambda: state), batch, target="h200"),
        lambda: step(state, batch),
    ):
        with warnings.catch_warnings(record=True) as caught:  # JAX warns in words of its own
            warnings.simplefilter("always")
            call()
        said = [str(each.message) for each in caught if each.category is jaxmem.JaxmemWarning]
        assert len(said) == 1
        assert "1 donated array of the state, 16.00 KiB in all (state.opt_state['big'])" in said[0]


def test_orbax_saves_and_restores_the_whole_state(tmp_path):
    import orbax.checkpoint as ocp

    params, batches = arguments()
    optimizer = jaxmem.accumulate(optax.adam(0.1), 2)
    step = jaxmem.train_step(loss_fn, optimizer, precision="fp16", loss_scale=SCALE)
    state, _ = step(step.init(params), batches[0])
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "state", target=state)
    chex.assert_trees_all_equal(restored, state)
    results = [step(each, batches[1])[0] for each in (restored, state)]
    chex.assert_trees_all_equal(*results)


# ---- bfloat16 parameters


def bfloat16_params():
    return {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, jnp.float32)}


def linear_loss(params, batch):
    return jnp.sum(params["w"].astype(jnp.float32) * params["b"] * batch)


def test_bfloat16_parameters_that_nobody_asked_for_are_a_warning():
    step = jaxmem.train_step(linear_loss, optax.adam(0.1))
    with pytest.warns(jaxmem.JaxmemWarning) as caught:
        state = step.init(bfloat16_params())
    assert "1 of 2 parameters are in bfloat16 (params['w'])" in str(caught[0].message)
    assert "updates below a 512th of a parameter are lost" in str(caught[0].message)
    assert "pass precision='bf16'; " in str(caught[0].message)
    dtypes = jax.tree.map(jnp.result_type, state)
    state, _ = step(state, jnp.ones(3, jnp.float32))
    assert jax.tree.map(jnp.result_type, state) == dtypes
    # Asked for, or looked after, they are none (a warning would be an error here).
    half = jaxmem.train_step(linear_loss, optax.adam(0.1), precision="params=bf16,compute=bf16")
    half.init(bfloat16_params())
    rounding = jaxmem.optim.half_params(optax.adam(0.1))
    jaxmem.train_step(linear_loss, jaxmem.accumulate(rounding, 2)).init(bfloat16_params())


def test_a_state_whose_dtypes_are_not_the_steps():
    """A checkpoint of bfloat16 parameters beside float32 moments, say."""
    whole = jaxmem.train_step(linear_loss, optax.adam(0.1), precision="fp32")
    state = whole.init(bfloat16_params())
    assert state.params["w"].dtype == state.opt_state[0].mu["w"].dtype == jnp.float32
    mixed = state._replace(params=bfloat16_params())
    batch = jnp.ones(3, jnp.float32)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        whole(mixed, batch)
    assert str(caught.value) == (
        "params['w'] is bfloat16 in the state, and the step keeps parameters in float32 "
        "(params=float32,compute=float32,output=float32). Cast them: state._replace(params="
        "step.precision.cast_to_params(state.params)), or make the state with this step's init."
    )
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.train_step(linear_loss, optax.adam(0.1))(mixed, batch)
    assert str(caught.value) == (
        "opt_state[0].mu['w'] is float32 in the state and bfloat16 by this optimizer's init of "
        "these params. Cast it, if it is to be the same."
    )


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("scaling", [None, SCALE])
def test_bfloat16_parameters_keep_their_dtype_with_every_lever(every, scaling):
    """Gradients come unscaled in float32, and the mean of a cycle is float32."""
    inner = optax.adam(0.1)
    optimizer = jaxmem.accumulate(inner, every) if every > 1 else inner
    options = {"precision": "params=bf16,compute=bf16", "loss_scale": scaling}
    step = jaxmem.train_step(linear_loss, optimizer, **options)
    state = step.init({"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)})
    dtypes = jax.tree.map(jnp.result_type, state)
    for _ in range(2):
        state, _ = step(state, jnp.ones(3, jnp.float32))
    assert jax.tree.map(jnp.result_type, state) == dtypes
    assert float(state.params["w"][0]) == pytest.approx(
        1 - 0.1 * (2 if every == 1 else 1), rel=1e-2
    )


# ---- what is left out


def mean_loss(params, batch, model_state):
    loss = jnp.mean(params["w"] * batch)
    return loss, {"mean": 0.5 * model_state["mean"] + batch.mean()}


@pytest.mark.parametrize("chained", [False, True])
def test_a_micro_step_that_is_left_out_leaves_no_trace(chained):
    optimizer = jaxmem.accumulate(optax.sgd(0.1), 2)
    optimizer = optax.chain(optax.identity(), optimizer) if chained else optimizer
    step, plain = (jaxmem.train_step(mean_loss, optimizer) for _ in range(2))

    def start(step):
        return step.init(
            {"w": jnp.ones(3, jnp.float32)}, model_state={"mean": jnp.zeros((), jnp.float32)}
        )

    batches = [jnp.full(3, value, jnp.float32) for value in (1, np.nan, 2, 3)]
    state, seen, losses = start(step), start(plain), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    for batch in (batches[0], *batches[2:]):
        seen, expected = plain(seen, batch)
    assert losses[:3] == [1, 1, 2], "the loss before it, not NaN"
    assert int(metrics["skipped"]) == 1 and int(expected["skipped"]) == 0
    chex.assert_trees_all_equal(state.params, seen.params)
    chex.assert_trees_all_equal(state.model_state, seen.model_state)
    assert step._jitted._cache_size() == 1


def test_before_any_step_counts_the_loss_is_what_it_is():
    step = jaxmem.train_step(mean_loss, jaxmem.accumulate(optax.sgd(0.1), 2))
    state = step.init({"w": jnp.ones(3)}, model_state={"mean": jnp.zeros(())})
    _, metrics = step(state, jnp.full(3, np.nan))
    assert np.isnan(metrics["loss"])
    told = jaxmem.train_step(mean_loss, jaxmem.accumulate(optax.sgd(0.1), 2, skip_nonfinite=False))
    state = told.init({"w": jnp.ones(3)}, model_state={"mean": jnp.zeros(())})
    assert state.last_loss is None
    assert "skipped" not in told(state, jnp.ones(3))[1]


# ---- arguments of the wrong kind


def plain_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def plain_arguments():
    return {"w": jnp.ones((3, 1), jnp.float32)}, {"x": jnp.ones((4, 3), jnp.float32)}


def error_of(loss, batch=None, params=None, **extras):
    """The text of the error of one step's init or call."""
    given = plain_arguments()
    step = jaxmem.train_step(loss, optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(step.init(given[0] if params is None else params, **extras), batch or given[1])
    return str(caught.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda p, b: None, "it returned None: is a return missing?"),
        (lambda p, b: (None, {}), "it returned 2 values, tuple of no arrays ((None, {}))."),
        (lambda p, b: {"loss": p["w"].sum()}, "it returned dict of ['loss'] float32[]."),
        (lambda p, b: "high", "it returned str of 'high'."),
        (lambda p, b: p["w"][:, 0], "loss_fn returned float32[3]. Return its mean or its sum."),
        (lambda p, b: (p["w"] > 0).sum(), "loss_fn returned int"),
        (
            lambda p, b: (p["w"].sum(), {"name": "a"}),
            "metrics['name'] is 'a', which is no array. The dict of metrics that loss_fn returns",
        ),
        (
            lambda p, b: (p["w"].sum(), {"skipped": p["w"].sum()}),
            'have a "skipped" of their own',
        ),
    ],
)
def test_losses_that_are_none(loss, said):
    assert said in error_of(loss)


def test_losses_that_do_not_take_what_the_state_has():
    def keyed(params, batch, *, key):
        return params["w"].sum()

    def stateful(params, batch, model_state):
        return params["w"].sum(), model_state

    assert error_of(keyed) == (
        "loss_fn(params, batch, *, key) takes key, and the state has none. Make the state with "
        "init(params, key=jax.random.key(0))."
    )
    assert error_of(plain_loss, key=jax.random.key(0)) == (
        "The state has a key, and loss_fn(params, batch) takes none. Let it take key=, or make "
        "the state without: leave key= out of init."
    )
    assert "takes model_state, and the state has none. Make the state with init(params, " in (
        error_of(stateful)
    )
    assert "The state has a model_state, and loss_fn(params, batch) takes none." in error_of(
        plain_loss, model_state={"mean": jnp.ones(())}
    )
    assert "loss_fn(params) cannot be called as loss_fn(params, batch): too many" in error_of(
        lambda params: params["w"].sum()
    )
    assert error_of(keyed, key=0) == "key= takes a PRNG key, such as jax.random.key(0); got 0."
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    assert "loss_fn(model, batch, *, key) takes key, and the state has none." in error_of(
        lambda model, batch, *, key: model(batch["x"]).mean(), params=module
    )


def test_errors_inside_of_a_loss_say_what_it_was_given():
    """Parameters and batch in each other's place, say."""
    params, batch = plain_arguments()
    step = jaxmem.train_step(lambda batch, params: plain_loss(params, batch), optax.sgd(0.1))
    with pytest.raises(KeyError) as caught:
        step(step.init(params), batch)
    notes = [note for note in caught.value.__notes__ if note.startswith("jaxmem")]
    assert notes == [
        "jaxmem: while tracing loss_fn(params, batch) with params: ['w'] float32[3, 1]; "
        "batch: ['x'] float32[4, 3]."
    ]


def test_parameters_that_are_none():
    params, _ = plain_arguments()
    state = train_state.TrainState.create(apply_fn=len, params=params, tx=optax.sgd(0.1))
    optimizer = nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    for given in (state, optimizer):
        name = f"{type(given).__module__}.{type(given).__name__}"
        said = error_of(plain_loss, params=given)
        assert said.startswith(f"init takes parameters; got a {name}, which has an optimizer's")
        with pytest.raises(jaxmem.JaxmemError) as caught:
            jaxmem.train_step(plain_loss, given)
        assert str(caught.value).endswith("Pass its tx, the optax transformation in it.")
    assert "params is <class 'flax.linen.linear.Dense'>, which is no array. Pass a" in error_of(
        plain_loss, params=nn.Dense
    )
    assert "of type Dense, which is no array." in error_of(plain_loss, params=nn.Dense(3))
    assert "params['f'] is <" in error_of(plain_loss, params={**params, "f": jnp.tanh})
    assert "params['n'] is int32, which has no gradient. Parameters are floating" in error_of(
        plain_loss, params={**params, "n": jnp.ones(3, jnp.int32)}
    )
    step = jaxmem.train_step(plain_loss, optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match=r"of type flax\.training\.train_state\.TrainS"):
        step(state, params)
    with pytest.raises(jaxmem.JaxmemError, match="takes a loss function; got <class"):
        jaxmem.train_step(nn.Dense, optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match=r"sharding= takes what jaxmem.shard.* got 8\."):
        jaxmem.train_step(plain_loss, optax.sgd(0.1), sharding=8)


@pytest.mark.parametrize(
    "call",
    [
        lambda array: jaxmem.train_step(array, optax.sgd(0.1)),
        lambda array: jaxmem.train_step(plain_loss, array),
        lambda array: jaxmem.train_step(plain_loss, optax.sgd(0.1), precision=array),
        lambda array: jaxmem.train_step(plain_loss, optax.sgd(0.1), remat=array),
        lambda array: jaxmem.train_step(plain_loss, optax.sgd(0.1), microbatches=array),
        lambda array: jaxmem.train_step(plain_loss, optax.sgd(0.1), loss_scale=array),
        lambda array: jaxmem.train_step(plain_loss, optax.sgd(0.1), sharding=array),
        lambda array: jaxmem.autocast(array, "bf16"),
        lambda array: jaxmem.accumulate(optax.sgd(0.1), array),
        lambda array: jaxmem.microbatch(array, 2),
        lambda array: jaxmem.microbatch(plain_loss, array),
        lambda array: jaxmem.offload(array),
        lambda array: jaxmem.offload(optax.sgd(0.1), fraction=array),
        lambda array: jaxmem.layers(array),
        lambda array: jaxmem.layers(plain_loss, microbatches=array),
        lambda array: jaxmem.shard(array),
        lambda array: jaxmem.LossScale(initial=array),
        lambda array: jaxmem.LossScale(growth_interval=array),
        lambda array: jaxmem.fit(plain_loss, optax.sgd(0.1), *plain_arguments(), mesh=array),
        lambda array: jaxmem.train_step(plain_loss, optax.sgd(0.1)).init(
            plain_arguments()[0], key=array
        ),
    ],
)
def test_no_message_prints_an_array(call):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        call(jnp.ones((99, 99), jnp.float32))
    text = str(caught.value)
    assert "array float32[99, 99]" in text and "1." not in text.split("got")[-1]


def test_a_mesh_that_is_none():
    with pytest.raises(jaxmem.JaxmemError, match=r"takes a jax.sharding.Mesh or .*; got 8\."):
        jaxmem.fit(plain_loss, optax.sgd(0.1), *plain_arguments(), mesh=8)


def test_batches_that_are_none():
    empty = {"x": jnp.ones((0, 3)), "scale": 2.0}
    assert error_of(plain_loss, empty) == (
        "The batch has no examples (['scale'] 2.0, ['x'] float64[0, 3]), and a mean over none is "
        "not a number. Leave this batch out."
    )
    assert error_of(plain_loss, {"x": jnp.ones((4, 3)), "name": "a"}) == (
        "batch['name'] is 'a', which is no array. Leave it out of the batch, or make it a number."
    )


@pytest.mark.parametrize("numbers", [2, 2.0, np.float32(2)])
def test_numbers_in_a_batch_are_arrays(numbers):
    def loss(params, batch):
        return plain_loss(params, batch) * batch["scale"]

    params, batch = plain_arguments()
    step = jaxmem.train_step(loss, optax.sgd(0.1), remat="sqrt")
    _, metrics = step(step.init(params), {**batch, "scale": numbers})
    assert float(metrics["loss"]) == 18


def rated(w, x, rate):
    return jnp.tanh(w * x) * rate


def test_a_plan_for_another_batch_says_which_array_differs():
    """The last batch of an epoch, and a number that is none where it is planned."""

    def loss(params, batch):
        return plain_loss(params, batch) * batch.get("scale", 1)

    params, batch = plain_arguments()
    step = jaxmem.train_step(loss, optax.sgd(0.1), donate=False)

    def planned(batch):
        plan = jaxmem.plan(step.loss, params, batch, planner="sqrt", has_aux=True)
        return jaxmem.train_step(loss, optax.sgd(0.1), remat=plan.apply, donate=False)

    state = step.init(params)
    with pytest.raises(jaxmem.PlanError) as caught:
        planned(batch)(state, {"x": batch["x"][:3]})
    assert str(caught.value).startswith(
        "This plan belongs to another program: batch['x'] is float32[3, 3], and the plan was made "
        "for float32[4, 3]. A plan holds for one function at one set of shapes and dtypes."
    )
    with pytest.raises(jaxmem.PlanError) as caught:
        planned({**batch, "scale": 2.0})(state, {**batch, "scale": 2.0})
    assert (
        "it takes 3 arrays, and the plan was made for 2 (a Python number is none where the plan is "
        "made, and one under jax.jit: if batch['scale'] is one, make it an array, such as "
        "jnp.float32(0.1), for both)."
    ) in str(caught.value)
    two = jaxmem.plan(rated, jnp.ones(()), jnp.ones(()), 0.1)
    with pytest.raises(jaxmem.PlanError, match=r"if w or x or rate is one, make it an array"):
        jax.jit(two.apply(rated))(jnp.ones(()), jnp.ones(()), 0.1)
    plan = jaxmem.plan(lambda x, y, scale: jnp.sum(x * y * scale), *[jnp.ones(3)] * 2, jnp.ones(()))
    with pytest.raises(jaxmem.PlanError) as caught:
        plan.apply(lambda x, y, scale: jnp.sum(x * y * scale))(jnp.ones(3), jnp.ones(3), 2.0)
    assert (
        "it takes 2 arrays, and the plan was made for 3 (a Python number is no array outside of "
        "jax.jit: if the call has one where the plan was made with an array, make it an array too, "
        "such as jnp.float32(0.1))."
    ) in str(caught.value)
    with pytest.raises(jaxmem.PlanError) as caught:
        plan.apply(lambda x, y, scale: jnp.sum(x * y))(jnp.ones(3), jnp.ones(3), jnp.ones(3))
    assert "scale is float64[3], and the plan was made for float64[]" in str(caught.value)
    plan = jaxmem.plan(lambda x: jnp.sum(x**2), jnp.ones(3))
    with pytest.raises(jaxmem.PlanError, match=r"it takes 2 arrays, and the plan was made for 1\."):
        plan.apply(lambda x, y: jnp.sum(x * y))(jnp.ones(3), jnp.ones(3))


# ---- states that are not to be had


def test_a_state_of_numpy_arrays():
    """As `pickle` and `flax.serialization` restore it."""
    params, batches = arguments()
    step = jaxmem.train_step(loss_fn, jaxmem.accumulate(optax.adam(0.1), 2))
    state = step.init(params)
    restored = jax.tree.map(np.asarray, state)
    (found, _), (expected, _) = step(restored, batches[0]), step(state, batches[0])
    chex.assert_trees_all_equal(found, expected)


def test_arrays_that_a_step_took_over():
    params, batches = arguments()
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(params)
    after, _ = step(state, batches[0])
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(state, batches[0])
    assert str(caught.value).startswith(
        "This state was given to a step before, which took over its memory. Go on with the state "
        "that it returned (state, metrics = step(state, batch)), or make the step with "
        "train_step(..., donate=False)"
    )
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step.init(params)
    assert str(caught.value).startswith(
        "params['layers'][0] was deleted: a step that it was given to took over its memory. Take "
        "the arrays of the state that the step returned, or give init a copy"
    )
    with pytest.raises(
        jaxmem.JaxmemError, match=r"state.params\['layers'\]\[0\] was given to a st"
    ):
        step(after._replace(params=state.params), batches[0])


STATES = {
    "calls": lambda old, x: old + 1,
    "an average": lambda old, x: 0.9 * old + 0.1 * x.mean(),
    "a maximum": lambda old, x: jnp.maximum(old, x.max().astype(old.dtype)),
    "the size": lambda old, x: jnp.asarray(x.shape[0], old.dtype),
    "examples": lambda old, x: old + x.shape[0],
    "positives": lambda old, x: old + (x > 0).sum(),
    "a sum": lambda old, x: x.sum() + old,
    "nothing": lambda old, x: old + 0,
    "a constant": lambda old, x: jnp.full_like(old, 7),
}
COUNTS_CALLS = "it counts calls, and each slice is one"
SAID = {
    "calls": COUNTS_CALLS,
    "an average": "it is made from the batch: ",
    "a maximum": "it is made from the batch: its examples see one another (reduce_max at",
    "the size": "it is made from the batch",
}


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean])
@pytest.mark.parametrize("name", STATES)
def test_a_model_state_is_told_of_and_changes_no_gradient(name, reduce):
    """Whatever the loss is over its examples; and a state that comes to the same is not told of."""

    def loss(params, batch, *, model_state):
        return reduce((batch @ params) ** 2), {"state": STATES[name](model_state["state"], batch)}

    params, batch = jnp.ones(3), jnp.cos(jnp.arange(24.0)).reshape(8, 3)
    dtype = jnp.float64 if name in ("an average", "a sum") else jnp.int32
    old = {"state": jnp.zeros((), dtype)}
    wanted, new = jax.grad(lambda p: loss(p, batch, model_state=old), has_aux=True)(params)

    def trained(**options):
        step = jaxmem.train_step(loss, optax.sgd(0.01), microbatches=4, **options)
        given = jax.tree.map(jnp.copy, (params, old))
        return step(step.init(given[0], model_state=given[1]), batch)[0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jaxmem.JaxmemWarning)
        states = [trained(), trained(reduction="sum" if reduce is jnp.sum else "mean")]
    said = [str(one.message) for one in caught if one.category is jaxmem.JaxmemWarning]
    for state in states:
        np.testing.assert_allclose(state.params, params - 0.01 * wanted, rtol=1e-12)
    if name not in SAID:
        assert not said
        np.testing.assert_allclose(states[0].model_state["state"], new["state"], rtol=1e-12)
        return
    assert len(said) == 1 and said[0].startswith(
        f"The model state after 4 microbatches may not be that of the whole batch: {SAID[name]}"
    )
    assert said[0].endswith(
        "(Loss and gradients are those of the whole batch.) If that is as it should be, pass "
        f"reduction={'sum' if reduce is jnp.sum else 'mean'!r}."
    )


def test_a_state_that_only_a_slice_changes_is_used_by_no_loss():
    def loss(params, batch, *, model_state):
        changed = model_state if len(batch) == 8 else model_state + 1
        return jnp.mean((batch @ params) ** 2) * model_state, changed

    params, batch = jnp.ones(3), jnp.cos(jnp.arange(24.0)).reshape(8, 3)
    step = jaxmem.train_step(loss, optax.sgd(0.01), microbatches=4)
    with pytest.warns(jaxmem.JaxmemWarning, match="it uses a model state that each slice changes"):
        step(step.init(params, model_state=jnp.ones(())), batch)


def test_a_state_is_told_of_beside_metrics_of_each_example():
    def loss(params, batch, *, model_state):
        each = (batch @ params) ** 2
        metrics = {f"row {at}": each[at] for at in range(len(batch))}
        return jnp.mean(each), model_state + 1, metrics

    params, batch = jnp.ones(3), jnp.cos(jnp.arange(24.0)).reshape(8, 3)
    step = jaxmem.train_step(loss, optax.sgd(0.01), microbatches=4)
    with pytest.warns(jaxmem.JaxmemWarning, match="it counts calls, and each slice is one"):
        step(step.init(params, model_state=jnp.int32(0)), batch)


def test_a_fitted_step_is_cut_into_no_single_examples_where_those_change_the_state():
    def loss(params, batch, *, model_state):
        made = batch @ params
        return jnp.sum(made**2), model_state + made.squeeze().max(-1).sum()

    params, batch = jnp.ones((64, 64)), jnp.ones((16, 1024, 64))
    with pytest.raises(jaxmem.BudgetError):
        jaxmem.fit(
            loss, optax.sgd(0.01), params, batch, model_state=jnp.zeros(()),
            budget="9MiB", target="h100", keep=("residuals",),
        )  # fmt: skip


@pytest.mark.slow
def test_a_fitted_step_is_not_cut_where_calls_are_counted():
    def loss(params, batch, *, model_state):
        return jnp.sum((batch @ params) ** 2), {"calls": model_state["calls"] + 1}

    params, batch = jnp.ones((64, 64)), jnp.ones((4096, 64))
    args = loss, optax.sgd(0.01), params, batch
    options = {
        "model_state": {"calls": jnp.int32(0)}, "budget": "3MiB", "target": "h100",
    }  # fmt: skip
    with pytest.raises(jaxmem.BudgetError):
        jaxmem.fit(*args, **options)
    step = jaxmem.fit(*args, allow=("statistics",), **options)
    state, _ = step(step.init(jnp.copy(params), model_state={"calls": jnp.int32(0)}), batch)
    gradient = jax.grad(lambda params: jnp.sum((batch @ params) ** 2))(params)
    assert state.model_state["calls"] > 1
    np.testing.assert_allclose(state.params, params - 0.01 * gradient, rtol=1e-9)


def test_pairs_of_lookahead_are_refused():
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    step = jaxmem.train_step(lambda params, batch: jnp.sum(params.fast * batch), optimizer)
    with pytest.raises(jaxmem.JaxmemError, match="takes gradients of their fast parameters alone"):
        step.init(optax.LookaheadParams.init_synced(jnp.ones(3)))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("optimizer", [optax.adam(0.1), jaxmem.offload(optax.adam(0.1))])
def test_a_key_stays_the_callers(make, optimizer):
    def loss(params, batch, key):
        return jnp.mean((params * batch) ** 2 * jax.random.bernoulli(key, 0.5))

    key, step = make(0), jaxmem.train_step(loss, optimizer)
    state = step.init(jnp.ones(4), key=key)
    step(state, jnp.ones(4))
    assert jax.random.normal(key) == jax.random.normal(make(0))
    assert state.key.is_deleted()
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step.init(jnp.ones(4), key=state.key)
    assert str(caught.value) == (
        "key= was deleted: something that it was given to took over its memory. Make another with "
        "jax.random.key, or give away a copy of it."
    )


def test_abstract_parameters_make_an_abstract_state():
    params, batches = arguments()
    step = jaxmem.train_step(loss_fn, jaxmem.offload(optax.adam(0.1)))
    shapes = jax.eval_shape(lambda: params)
    state = step.init(shapes)
    assert state == step.abstract(params) == step.abstract(shapes)
    assert state.opt_state[0].mu["layers"][0].sharding.memory_kind == "pinned_host"
    assert step.memory(state, batches[0], target="local").argument > 0
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(state, batches[0])
    assert str(caught.value).startswith("This state is abstract: it has shapes and no arrays, for")


# ---- parameters on a mesh


@pytest.mark.slow
def test_parameters_on_a_mesh_stay_where_they_are():
    code = """
import jax, jax.numpy as jnp, jaxmem, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
specs = {
    "up": P(None, "model"), "bias": P(("model",)), "down": P("model", None), "scale": P(),
    "head": P("data", None),
}
shapes = {"up": (16, 32), "bias": (32,), "down": (32, 16), "scale": (16,), "head": (16, 8)}
def make():
    return {
        name: jax.device_put(jnp.sin(jnp.arange(np.prod(shape))).reshape(shape) / 4,
        NamedSharding(mesh, specs[name])) for name, shape in shapes.items()
    }
def loss(p, x):
    x = x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]
    return jnp.mean(jax.nn.logsumexp((x * p["scale"]) @ p["head"], -1))
def places(tree):
    kind = lambda x: x.sharding.memory_kind or "device"
    return jax.tree.map(lambda x: (x.sharding.mesh, x.sharding.spec, kind(x)), tree)
x = jnp.cos(jnp.arange(16 * 16.0)).reshape(16, 16)
batch = jax.device_put(x, NamedSharding(mesh, P("data")))
for optimizer in (
    optax.adam(0.1), jaxmem.accumulate(optax.adam(0.1), 2), jaxmem.offload(optax.adam(0.1))
):
    step = jaxmem.train_step(loss, optimizer)
    state = step.init(make())
    before = places(state)
    assert places(step.abstract(make())) == before
    for _ in range(3):
        state, metrics = step(state, batch)
    assert places(state) == before, [(a, b) for a, b in zip(
        jax.tree.leaves(places(state)), jax.tree.leaves(before)) if a != b]
    assert step._jitted._cache_size() == 1
    plain = jaxmem.train_step(loss, optimizer)
    expected = plain.init(jax.device_put(make(), jax.devices()[0]))
    for _ in range(3):
        expected, other = plain(expected, x)
    np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-5)
# on another device than the first one
step = jaxmem.train_step(loss, optax.adam(0.1))
there = jax.devices()[3]
state, _ = step(step.init(jax.device_put(make(), there)), jax.device_put(x, there))
assert state.step.devices() == state.params["up"].devices() == {there}
# the axes of a batch in the order in which it has them
batch = jax.device_put(x, NamedSharding(mesh, P(("model", "data"))))
step = jaxmem.train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.1), microbatches=2)
state = step.init({"w": jnp.ones((16, 2))})
assert step.slices_sharding(state, batch).spec == P(("model", "data"))
assert "collective-permute" not in step.lower(state, batch).compile().as_text()
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# ---- out of memory at run time

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13421772800 bytes."


def run_out(step, *args):
    """The error of a step whose run XLA ends for want of memory."""

    class Jitted:
        def __init__(self, real):
            self.trace = real.trace

        def __call__(self, *args, **kwargs):
            raise jax.errors.JaxRuntimeError(EXHAUSTED)

    step._jitted = Jitted(step._jitted)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(*args)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    return str(caught.value)


def wide():
    params = {"layers": [jnp.eye(256, dtype=jnp.float32)] * 4}
    return params, {k: jnp.ones((4096, 256), jnp.float32) for k in "xy"}


def test_out_of_memory_names_bytes_and_what_fit_would_do(monkeypatch):
    gpu = jaxmem.target("rtx-2080-ti")
    small = jaxmem.targets.LocalDevice("cpu", gpu.description, 20 * 2**20, gpu)
    monkeypatch.setattr("jaxmem.training.exhausted.resolve", lambda _: small)
    params, batch = wide()
    step = jaxmem.train_step(loss_fn, optax.adam(1e-3))
    text = run_out(step, step.init(params), batch)
    assert text.startswith(
        "The step ran out of memory on NVIDIA GeForce RTX 2080 Ti.\n  budget    "
    )
    assert "  budget    20.00 MiB\n" in text
    assert " MiB for local\n" in text and "  measured  not known: no statistics\n" in text
    assert (
        "jaxmem.fit(loss_fn, optimizer, params, batch, ...) would take precision as it is, " in text
    )
    assert ": projected 1" in text and " ±18% ms a step.\n" in text
    assert text.endswith(f"XLA said: {EXHAUSTED}")
    monkeypatch.setattr(
        "jaxmem.training.exhausted.resolve",
        lambda _: jaxmem.targets.LocalDevice("cpu", gpu.description, 2**20, gpu),
    )
    step = jaxmem.train_step(loss_fn, optax.adam(1e-3))
    text = run_out(step, step.init(params), batch)
    assert "is not projected to fit either: What else could be allowed: allow=" in text


def test_out_of_memory_names_the_measured_peak(monkeypatch):
    params, batch = wide()
    step = jaxmem.train_step(loss_fn, optax.adam(1e-3))
    state = step.init(params)

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 12 * 2**20}

    small = jaxmem.targets.LocalDevice("cpu", "a GPU", 20 * 2**20, jaxmem.target("h200"))
    monkeypatch.setattr("jaxmem.training.exhausted.resolve", lambda _: small)
    monkeypatch.setattr("jaxmem.training.exhausted.jax.local_devices", lambda: [Device()])
    assert "  measured  12.00 MiB at the peak\n" in run_out(step, state, batch)


@pytest.mark.slow
def test_out_of_memory_of_a_step_that_was_fitted():
    params, batch = wide()
    step = jaxmem.fit(
        loss_fn, optax.adam(1e-3), params, batch, budget="1GiB", target="h200", keep="placement"
    )
    text = run_out(step, step.init(params), batch)
    report = step.fitting.report
    assert "  budget    1.00 GiB\n" in text
    assert f"  compiled  {jaxmem.format_bytes(report.device)} for h200\n" in text
    (line, size), *_ = report.by_source.items()
    assert f"  held by   {jaxmem.format_bytes(size)} at {line}\n" in text
    assert text.count("  held by   ") == 3 and "test_train.py:" in text
    assert "The compiled bytes are within the budget: other arrays are on the device" in text
    assert "call jaxmem.fit with a budget of 921.60 MiB." in text


def test_memory_that_runs_out_after_the_dispatch_is_told_of_at_the_first_call(monkeypatch):
    """Kernels run when the call has returned, and so does what they say."""
    params, batch = wide()
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1))
    state, waited = step.init(params), []

    def wait(results):
        waited.append(results)
        if len(waited) == 1:
            raise jax.errors.JaxRuntimeError(EXHAUSTED)
        return results

    monkeypatch.setattr("jaxmem.training.step.jax.block_until_ready", wait)
    with pytest.raises(jaxmem.JaxmemError, match="The step ran out of memory on"):
        step(state, batch)
    state = step.init(jax.tree.map(jnp.ones_like, wide()[0]))
    for rows in (4096, 4096, 2048):
        state, _ = step(state, jax.tree.map(lambda leaf: leaf[:rows], batch))  # noqa: B023
    assert len(waited) == 3, "once for each shape of the batch"


def test_other_errors_at_run_time_stay_what_they_are():
    params, batch = wide()
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1))

    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    step._jitted = fail
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: something else"):
        step(step.init(params), batch)


def ridge(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)


def ridge_arguments():
    random = np.random.default_rng(0)
    batch = {"x": jnp.asarray(random.normal(size=(8, 3))), "y": jnp.asarray(random.normal(size=8))}
    return {"w": jnp.ones(3)}, batch


@pytest.mark.filterwarnings("ignore:XLA did not reuse:jaxmem.JaxmemWarning")  # kept for nothing
@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 4}, {"microbatches": 2, "loss_scale": jaxmem.LossScale(), "remat": "dp"}],
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "search"),
    [
        (optax.lbfgs(), True),
        (optax.chain(optax.adam(0.5), optax.contrib.reduce_on_plateau(patience=1)), False),
        (optax.polyak_sgd(0.1), False),
    ],
)
def test_optimizers_that_look_at_the_loss(optimizer, search, options):
    """They take what optax passes them, and no more: some refuse that."""
    params, batch = ridge_arguments()
    step = jaxmem.train_step(ridge, optimizer, **options)
    state = step.init(jax.tree.map(jnp.copy, params))
    inner = optimizer.init(params)
    for _ in range(5):
        state, metrics = step(state, batch)
        loss, gradients = jax.value_and_grad(ridge)(params, batch)
        extra = {"grad": gradients, "value_fn": functools.partial(ridge, batch=batch)}
        updates, inner = optimizer.update(
            gradients, inner, params, value=loss, **(extra if search else {})
        )
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(state.params, params, rtol=1e-10)


def test_optimizers_that_ask_for_what_there_is_not():
    params, batch = ridge_arguments()
    step = jaxmem.train_step(ridge, jaxmem.accumulate(optax.lbfgs(), 2))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(step.init(params), batch)
    assert str(caught.value) == (
        "The optimizer's update needs grad= and value_fn=, for a line search on one loss, and "
        "under gradient accumulation (jaxmem.accumulate, optax.MultiSteps) each call of a cycle "
        "has another. Use train_step(..., microbatches=) instead."
    )

    def update(updates, state, params=None, *, hessian, **extra):
        return updates, state

    needs = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    step = jaxmem.train_step(ridge, needs)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        step(step.init(ridge_arguments()[0]), batch)
    assert str(caught.value) == (
        "The optimizer's update needs hessian=, and train_step has only value= (the loss), grad= "
        "and value_fn= for it. Write the step in a loop of your own, with jaxmem.microbatch for "
        "the gradients."
    )

    # A loss that changes from call to call is what optax.MultiSteps passes on too.
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    step = jaxmem.train_step(ridge, jaxmem.accumulate(plateau, 2))
    state = step.init(ridge_arguments()[0])
    for _ in range(2):
        state, metrics = step(state, batch)
    found = state.opt_state.inner_opt_state[1].best_value
    np.testing.assert_allclose(found, metrics["loss"], rtol=1e-6)


def test_a_batch_that_shares_an_array_with_the_state():
    params, batch = ridge_arguments()

    def loss_fn(params, batch):
        return ridge(params, batch) + jnp.sum((params["w"] - batch["before"]) ** 2)

    step = jaxmem.train_step(loss_fn, optax.adam(0.1))
    state, _ = step(step.init(params), {**batch, "before": jnp.zeros(3)})
    for before in (state.params["w"], jax.device_put(state.params["w"], jax.devices()[0])):
        with pytest.raises(jaxmem.JaxmemError) as caught:
            step(state, {**batch, "before": before})
        assert str(caught.value) == (
            "batch['before'] and state.params['w'] are one array, whose memory the step takes over "
            "with the state. Pass a copy (jnp.copy(batch['before'])), or make the step with "
            "train_step(..., donate=False)."
        )
    step(state, {**batch, "before": jnp.copy(state.params["w"])})


def test_arrays_on_different_devices():
    code = """
import jax, jax.numpy as jnp, jaxmem, optax
one, two = jax.devices()
step = jaxmem.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
state = step.init(jax.device_put(jnp.ones(3), one))
x = jax.device_put(jnp.ones((4, 3)), two)
for call in (
    lambda: step(state, x),
    lambda: step.lower(state, x),
    lambda: jaxmem.microbatch(step.settings.loss_fn, 2)(state.params, x),
):
    try:
        call()
    except jaxmem.JaxmemError as error:
        print(error)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    said = (
        " is on cpu:0 and batch on cpu:1, and a step runs where all of its arrays are. Put both in "
        "one place, with jax.device_put(batch, device), or let "
        "jaxmem.train_step(..., sharding=jaxmem.shard(mesh)) spread them over several devices."
    )
    assert done.stdout.splitlines() == ["state.step" + said] * 2 + ["params" + said], done.stderr


def test_no_parameters():
    step = jaxmem.train_step(ridge, optax.adam(0.1))
    for params in (None, {}, []):
        for init in (step.init, step.abstract):
            with pytest.raises(jaxmem.JaxmemError) as caught:
                init(params)
            assert str(caught.value) == (
                f"init takes parameters to train; got {params}. Pass a pytree of arrays, and keep "
                "modules, functions and settings in loss_fn."
            )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.inject_hyperparams(optax.sgd)(0.1),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.adafactor(0.1),
    ],
)
def test_single_numbers_that_are_not_reused_are_no_warning(optimizer):
    params, batch = ridge_arguments()
    step = jaxmem.train_step(ridge, optimizer)
    step(step.init(params), batch)  # warnings are errors here


def test_an_optimizer_may_take_the_loss_or_not():
    """By a default of its own: nothing asks for it."""

    def update(updates, state, params=None, *, value=None, **extra):
        return jax.tree.map(lambda g: g * value, updates), state

    def refuses(updates, state, params=None):
        return updates, state

    def loss(params, batch):
        return jnp.mean((batch @ params) ** 2)

    params, batch = jnp.ones(3), jnp.ones((4, 3))
    init = lambda _: optax.EmptyState()  # noqa: E731
    taking = optax.GradientTransformationExtraArgs(init, update)
    for first, times in (taking, 9.0), (optax.GradientTransformation(init, refuses), 1.0):
        step = jaxmem.train_step(loss, optax.chain(first, optax.sgd(0.1)))
        state, _ = step(step.init(jnp.copy(params)), batch)
        np.testing.assert_allclose(
            state.params, params - 0.1 * times * jax.grad(loss)(params, batch)
        )
    alone = optax.GradientTransformationExtraArgs(init, refuses)  # takes nothing after all
    step = jaxmem.train_step(loss, alone)
    state, _ = step(step.init(jnp.copy(params)), batch)
    np.testing.assert_allclose(state.params, params + jax.grad(loss)(params, batch))


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda asks: optax.MultiSteps(asks, 1),
        lambda asks: optax.MultiSteps(asks, 1).gradient_transformation(),
        lambda asks: jaxmem.accumulate(optax.MultiSteps(asks, 1), 1),
        lambda asks: jaxmem.offload(optax.MultiSteps(asks, 1).gradient_transformation()),
        lambda asks: optax.conditionally_transform(asks, lambda step, **extra: step >= 0),
    ],
)
def test_what_is_around_an_optimizer_hands_the_loss_on(wrapper):
    """Whether or not it says by its type that it takes more than optax's three arguments."""

    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: g * value, updates), state

    def loss(params, batch):
        return jnp.mean((batch @ params) ** 2)

    asks = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    params, batch = jnp.ones(3), jnp.ones((4, 3))
    step = jaxmem.train_step(loss, wrapper(asks))
    state, _ = step(step.init(jnp.copy(params)), batch)
    np.testing.assert_allclose(state.params, params + 9.0 * jax.grad(loss)(params, batch))


@pytest.mark.parametrize("kind", ["keyword", "default", "jitted", "partial"])
def test_an_update_is_given_what_it_names(kind):
    """By its signature, of a plain `optax.GradientTransformation` too."""

    def by_keyword(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: g * value, updates), state

    def by_default(updates, state, params=None, value=None):
        return by_keyword(updates, state, params, value=value)

    def scaled(rate, updates, state, params=None, *, value):
        return by_keyword(jax.tree.map(lambda g: g * rate, updates), state, params, value=value)

    def loss(params, batch):
        return jnp.mean((batch @ params) ** 2)

    update = {
        "keyword": by_keyword,
        "default": by_default,
        "jitted": jax.jit(by_keyword),
        "partial": functools.partial(scaled, 1.0),
    }[kind]
    optimizer = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    params, batch = jnp.ones(3), jnp.ones((4, 3))
    step = jaxmem.train_step(loss, optimizer)
    state, _ = step(step.init(jnp.copy(params)), batch)
    np.testing.assert_allclose(state.params, params + 9.0 * jax.grad(loss)(params, batch))


@pytest.mark.filterwarnings("ignore:XLA did not reuse")  # the gradient is a value of this step
def test_a_line_search_that_keeps_the_gradient():
    search = optax.scale_by_backtracking_linesearch(10, store_grad=True)
    optimizer = optax.chain(optax.sgd(1.0), search)

    def loss(params, batch):
        return jnp.mean((batch @ params) ** 2)

    params, batch = jnp.ones(3), jnp.ones((4, 3))
    value, gradient = jax.value_and_grad(loss)(params, batch)
    updates, _ = optimizer.update(
        gradient, optimizer.init(params), params, value=value, grad=gradient,
        value_fn=lambda params: loss(params, batch),
    )  # fmt: skip
    step = jaxmem.train_step(loss, optimizer)
    state, _ = step(step.init(jnp.copy(params)), batch)
    np.testing.assert_allclose(state.params, optax.apply_updates(params, updates), rtol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.save_only_these_names("a"),
    ],
)
def test_a_policy_is_no_transformation(policy):
    with pytest.raises(
        jaxmem.JaxmemError, match=r"pass functools.partial\(jax.checkpoint, policy="
    ):
        jaxmem.train_step(loss_fn, optax.sgd(0.1), remat=policy)


@pytest.mark.parametrize("remat", [jax.checkpoint, jax.remat, functools.partial(jax.checkpoint)])
def test_regions_of_jax_are_transformations(remat):
    params, batches = arguments()
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1), remat=remat)
    assert jnp.isfinite(step(step.init(params), batches[0])[1]["loss"])


@pytest.mark.parametrize("key", [jax.random.key(0), 0])
def test_an_optimizer_keeps_the_arrays_that_it_holds(key):
    """Its key is in the state that a step takes over, and in the optimizer, for the next state."""
    noise = optax.add_noise(0.1, 0.5, key)
    step = jaxmem.train_step(loss_fn, optax.chain(noise, optax.sgd(0.1)))
    first, second = (step(step.init(arguments()[0]), arguments()[1][0])[0] for _ in range(2))
    chex.assert_trees_all_equal(first.params, second.params)


@pytest.mark.filterwarnings("error")
def test_an_nnx_module_warns_of_nothing():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step = jaxmem.train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1))
    metrics = step(step.init(model), jnp.ones((4, 3)))[1]
    assert jnp.isfinite(metrics["loss"])
