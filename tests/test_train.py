"""The composed step: equal to the plain one, donated, and refusing what cannot work."""

import contextlib
import functools
import itertools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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
PLANNERS = ["sqrt"]
with contextlib.suppress(jaxmem.PlanError):
    jaxmem.remat(planner="dp")
    PLANNERS.append("dp")


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
COMBINATIONS = list(itertools.product(["fp32", "bf16", "fp16"], [None, *PLANNERS], [1, 4], [1, 3]))


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
    assert "opt_state[0].count is absent in the state and [] by this optimizer's init" in str(
        caught.value
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


def test_nnx_modules_with_every_lever():
    _, batches = arguments()
    step = jaxmem.train_step(
        module_loss,
        jaxmem.accumulate(optax.adam(0.01), 2),
        precision="fp16",
        remat="sqrt",
        microbatches=2,
        loss_scale=SCALE,
    )
    state = step.init(Module(nnx.Rngs(0)))
    for batch in batches[:2]:
        state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"]) and int(metrics["count"]) == 2
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
        assert "1 donated arrays of the state, 16.00 KiB in all (state.opt_state['big'])" in said[0]


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
    monkeypatch.setattr("jaxmem._exhausted.resolve", lambda _: small)
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
    assert ": projected 1" in text and " (unchecked) ms a step.\n" in text
    assert text.endswith(f"XLA said: {EXHAUSTED}")
    monkeypatch.setattr(
        "jaxmem._exhausted.resolve",
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
    monkeypatch.setattr("jaxmem._exhausted.resolve", lambda _: small)
    monkeypatch.setattr("jaxmem._exhausted.jax.local_devices", lambda: [Device()])
    assert "  measured  12.00 MiB at the peak\n" in run_out(step, state, batch)


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


def test_other_errors_at_run_time_stay_what_they_are():
    params, batch = wide()
    step = jaxmem.train_step(loss_fn, optax.sgd(0.1))

    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    step._jitted = fail
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: something else"):
        step(step.init(params), batch)
