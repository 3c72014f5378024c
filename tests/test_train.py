"""The composed step: equal to the plain one, donated, and refusing what cannot work."""

import contextlib
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
def test_state_on_the_host_trains_as_the_plain_step(remat, every):
    inner = optax.adam(0.01)
    optimizer = jaxmem.offload(inner)
    optimizer = jaxmem.accumulate(optimizer, every) if every > 1 else optimizer
    scaling = {"precision": "fp16", "loss_scale": SCALE}
    step = jaxmem.train_step(loss_fn, optimizer, remat=remat, microbatches=2, **scaling)
    params, batches = arguments()
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)
    chex.assert_trees_all_close(state.params, plain_training(inner, every), atol=1e-2)
    assert step._jitted._cache_size() == 1


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
    with pytest.raises(jaxmem.JaxmemError, match="called with .state, batch., .* of type dict"):
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
