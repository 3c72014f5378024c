import warnings

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxmem
from jaxmem.levers.host import streaming

PARAMS = {f"layer{i}": jnp.linspace(-1, 1, 12).reshape(3, 4) * (i + 1) for i in range(4)}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "two groups": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)},
        {name: "ab"[index % 2] for index, name in enumerate(PARAMS)},
    ),
    "accumulated": lambda: jaxmem.accumulate(optax.adam(0.1), 2),
    "stateless": lambda: optax.sgd(0.1),
}


def run(optimizer, jitted, steps=3):
    def loss(params):
        return sum(jnp.sum(jnp.sin(leaf) ** 2) for leaf in jax.tree.leaves(params))

    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = optimizer.init(params)
    step = jax.jit(step, donate_argnums=(0, 1)) if jitted else step
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def kinds(state):
    return {
        jax.tree_util.keystr(path): leaf.sharding.memory_kind
        for path, leaf in jax.tree.leaves_with_path(state)
        if isinstance(leaf, jax.Array)
    }


@pytest.mark.parametrize(
    "jitted", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["jit", "eager"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_optimizer_with_its_state_on_the_host(name, jitted):
    plain_params, plain_state = run(OPTIMIZERS[name](), jitted)
    params, state = run(jaxmem.offload(OPTIMIZERS[name]()), jitted)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, plain_state)
    chex.assert_trees_all_close((params, state), (plain_params, plain_state), rtol=1e-12)
    for path, leaf in jax.tree.leaves_with_path(state):
        kind = "pinned_host" if leaf.ndim else "device"
        assert leaf.sharding.memory_kind == kind, path
    assert kinds(params) == dict.fromkeys(kinds(params), "device")


def test_a_part_of_the_state_stays_on_the_device():
    def on_host(optimizer):
        _, state = run(optimizer, jitted=True)
        return {path for path, kind in kinds(state).items() if kind == "pinned_host"}

    adam = optax.adam(0.1)
    second = on_host(jaxmem.offload(adam, what=lambda path, leaf: ".nu" in path))
    assert second == {f"[0].nu['{name}']" for name in PARAMS}
    quarter = on_host(jaxmem.offload(adam, fraction=0.25))
    assert quarter == {"[0].mu['layer0']", "[0].mu['layer1']"}
    assert on_host(jaxmem.offload(adam, fraction=0)) == set()
    plain = run(adam, jitted=True)
    some = run(jaxmem.offload(adam, fraction=0.6), jitted=True)
    chex.assert_trees_all_close(*map(jax.device_get, (some, plain)), rtol=1e-12)
    with pytest.raises(jaxmem.JaxmemError, match=r"from 0 \(all on the device\) to 1.*got 1.5"):
        jaxmem.offload(adam, fraction=1.5)


def test_extra_arguments_reach_the_optimizer():
    optimizer = jaxmem.offload(optax.contrib.reduce_on_plateau(patience=1))
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(PARAMS, state, PARAMS, value=jnp.asarray(1.0))
    chex.assert_trees_all_close(state.best_value, 1.0)


def test_state_on_the_device_is_an_error_that_names_the_leaf():
    optimizer = jaxmem.offload(optax.adam(0.1))
    with pytest.raises(jaxmem.OffloadError) as caught:
        jax.jit(optimizer.update)(PARAMS, optax.adam(0.1).init(PARAMS), PARAMS)
    text = str(caught.value)
    assert "The optimizer state[0].mu['layer0'] should be in host memory and is on the" in text
    assert "jaxmem.eval_shape" in text and "jaxmem.place" in text


@pytest.mark.parametrize("name", ["accumulate", "MultiSteps", "apply_if_finite"])
def test_what_takes_the_state_whole_is_warned_of(name, monkeypatch):
    wrapper = {
        "accumulate": lambda tx: jaxmem.accumulate(tx, 2),
        "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    }[name]
    monkeypatch.setattr(streaming, "CHUNK", 700)  # the state is of 768 bytes
    optimizer = jaxmem.offload(wrapper(optax.adam(0.1)))
    expected = r"has all of .* B of the optimizer's state \(state.*mu\['layer0'\] is the first\) on"
    with pytest.warns(jaxmem.JaxmemWarning, match=expected) as caught:
        jax.eval_shape(optimizer.update, PARAMS, optimizer.init(PARAMS), PARAMS)
    assert "Offload inside: jaxmem.accumulate(jaxmem.offload(optimizer), every)" in str(
        caught[0].message
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(wrapper(jaxmem.offload(optax.adam(0.1))), jitted=True, steps=1)
        run(jaxmem.offload(optax.contrib.muon(0.1)), jitted=True, steps=1)  # loops of its own
        monkeypatch.setattr(streaming, "CHUNK", 2000)
        run(optimizer, jitted=True, steps=1)


def test_offload_inside_of_what_changes_the_state_is_refused():
    inside = jaxmem.offload(optax.adam(0.1))
    small = jaxmem.optim.small_moments(inside, keep=lambda path, leaf: False)
    with pytest.raises(jaxmem.OffloadError) as caught:
        jax.jit(small.init)(PARAMS)
    assert str(caught.value) == (
        "jaxmem.optim.small_moments was given an optimizer whose state[0].mu['layer0'] is in "
        "host memory. jaxmem.offload goes outside: "
        "jaxmem.offload(jaxmem.optim.small_moments(optimizer))."
    )
    fsdp = jaxmem.shard(AbstractMesh((8,), ("data",)))
    with pytest.raises(jaxmem.OffloadError) as caught:
        fsdp.optimizer(inside).init(PARAMS)
    assert str(caught.value) == (
        "Sharding.optimizer was given an optimizer whose state[0].mu['layer0'] is in host memory. "
        "jaxmem.offload goes outside: jaxmem.offload(Sharding.optimizer(optimizer))."
    )


def test_a_restored_state_is_put_back():
    optimizer = jaxmem.offload(optax.adam(0.1))
    state = optimizer.init(PARAMS)
    mu = state[0].mu["layer0"]
    # What orbax restores: the sharding of the host, the type of the device.
    odd = jax.make_array_from_single_device_arrays(mu.shape, mu.sharding, [mu])
    restored = jax.device_put(state, jax.memory.Space.Device)
    restored[0].mu["layer0"] = odd
    placed = jaxmem.place(restored, like=state)
    assert kinds(placed) == kinds(state)
    chex.assert_trees_all_close(
        jax.jit(optimizer.update)(PARAMS, placed, PARAMS), optimizer.update(PARAMS, state, PARAMS)
    )
    with pytest.raises(jaxmem.JaxmemError, match="two trees of one structure; got PyTreeDef"):
        jaxmem.place(restored[0], like=state)
    wider = optimizer.init({name: jnp.ones((5, 4)) for name in PARAMS})
    with pytest.raises(jaxmem.JaxmemError, match=r"\['layer0'\] is \[5, 4\] in the given one and"):
        jaxmem.place(wider, like=state)


def test_a_restored_state_is_measured_where_it_is():
    optimizer = jaxmem.offload(optax.sgd(0.1, momentum=0.9))
    state = optimizer.init(jnp.ones((64, 64)))
    trace = state[0].trace
    odd = jax.make_array_from_single_device_arrays(trace.shape, trace.sharding, [trace])
    state = (state[0]._replace(trace=odd), *state[1:])
    report = jaxmem.memory(optimizer.update, trace, state, target="h200")
    assert report.on_host.argument >= 64 * 64 * 8


def test_the_state_of_another_optimizer_is_refused():
    adam = jaxmem.offload(optax.adam(0.1))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        adam.update(PARAMS, jaxmem.offload(optax.sgd(0.1, momentum=0.9)).init(PARAMS), PARAMS)
    assert str(caught.value) == (
        "optimizer state[0].count is missing in this call; expected an int32 scalar, as by this "
        "optimizer's init."
    )
    other = adam.init(PARAMS | {"layer0": jnp.ones((5, 4))})
    with pytest.raises(jaxmem.JaxmemError, match=r"mu\['layer0'\] is \[5, 4\] in this call"):
        jax.jit(adam.update)(PARAMS, other, PARAMS)


def test_a_state_of_another_structure_or_dtype_is_refused():
    adam, adamw = (jaxmem.offload(make(0.1)) for make in (optax.adam, optax.adamw))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jax.jit(adam.update)(PARAMS, adamw.init(PARAMS), PARAMS)
    assert str(caught.value) == (
        "optimizer state is tuple of 3 in this call and tuple of 2 by this optimizer's init. Both "
        "must have one structure."
    )
    masked = jaxmem.offload(optax.chain(optax.adam(0.1), optax.identity()))
    other = masked.init(PARAMS)
    other = (other[0], optax.MaskedNode())
    with pytest.raises(jaxmem.JaxmemError, match=r"state\[1\] is MaskedNode of 0 in this call"):
        masked.update(PARAMS, other, PARAMS)
    half = jaxmem.offload(optax.adam(0.1, mu_dtype=jnp.bfloat16)).init(PARAMS)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jax.jit(adam.update)(PARAMS, half, PARAMS)
    assert str(caught.value) == (
        "optimizer state[0].mu['layer0'] is bfloat16 in this call and float64 by this optimizer's "
        "init. Cast it, if it is to be the same."
    )
    with pytest.raises(jaxmem.JaxmemError, match="is bfloat16 in the given one and float64 in the"):
        jaxmem.place(half, like=adam.init(PARAMS))


def test_gradients_may_be_wider_than_parameters():
    adam = jaxmem.offload(optax.adam(0.1))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    state = adam.init(params)
    for _ in range(2):  # optax makes the moments as wide as the gradients
        _, state = jax.jit(adam.update)(PARAMS, state, params)
    assert state[0].mu["layer0"].dtype == jnp.float64
    narrow = adam.init(PARAMS)  # and without parameters nobody knows
    adam.update(params, narrow)


def test_empty_arrays_and_scalars_stay_on_the_device():
    optimizer = jaxmem.offload(optax.adam(0.1))
    params = {"empty": jnp.zeros((0, 3)), "scalar": jnp.ones(()), "matrix": jnp.ones((3, 4))}
    _, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    on_host = {path for path, kind in kinds(state).items() if kind == "pinned_host"}
    assert on_host == {"[0].mu['matrix']", "[0].nu['matrix']"}
    assert state[0].mu["empty"].shape == (0, 3)


def test_a_platform_without_host_memory(monkeypatch):
    monkeypatch.setattr(jaxmem.jaxprs, "memory_kinds", lambda: ["device"])
    expected = r"kept in pinned host memory, and the devices of this platform \(cpu\) have device\."
    with pytest.raises(jaxmem.OffloadError, match=expected):
        jaxmem.offload(optax.adam(0.1)).init(PARAMS)
    with pytest.raises(jaxmem.OffloadError, match=expected):
        jaxmem.layers(lambda w, x: w * x).init(lambda w: w, jnp.ones((3, 2)))


def test_eval_shape_keeps_memory_kinds():
    optimizer = jaxmem.offload(optax.adam(0.1))
    state = jaxmem.eval_shape(optimizer.init, PARAMS)
    assert state[0].mu["layer0"].sharding.memory_kind == "pinned_host"
    assert state[0].count.sharding is None
    chex.assert_trees_all_equal_shapes_and_dtypes(state, optimizer.init(PARAMS))
    again = jaxmem.eval_shape(lambda state: optimizer.update(PARAMS, state, PARAMS)[1], state)
    assert again[0].nu["layer1"].sharding.memory_kind == "pinned_host"


def test_not_an_optimizer():
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.offload("adam")
    assert str(caught.value) == (
        "jaxmem.offload takes an optax.GradientTransformation, such as optax.adam(1e-3); got "
        "'adam'."
    )


@pytest.mark.parametrize("shape", [(), (0, 4)])
@pytest.mark.parametrize("name", ["adam", "prodigy", "momo", "lbfgs"])
def test_numbers_and_empty_arrays_beside_large_ones(name, shape, monkeypatch):
    """Whose update needs all of the state: there is nothing to cut of them."""
    monkeypatch.setattr(streaming, "CHUNK", 700)
    optimizer = {
        "adam": optax.adam(1e-2),
        "prodigy": optax.contrib.prodigy(),
        "momo": optax.contrib.momo_adam(1e-2),
        "lbfgs": optax.lbfgs(memory_size=2, linesearch=None),
    }[name]

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["other"] ** 2)

    params = {"other": jnp.ones(shape), "w": jnp.eye(16)}
    found = []
    for one in (jaxmem.offload(optimizer), optimizer):
        step = jaxmem.train_step(loss, one)
        state = step.init(jax.tree.map(jnp.copy, params))
        for _ in range(2):
            state, _ = step(state, jnp.ones((4, 16)))
        found.append(jax.device_get(state.params))
    chex.assert_trees_all_close(*found, rtol=1e-6)
