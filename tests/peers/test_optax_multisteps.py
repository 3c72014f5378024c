"""The cases of optax's tests of `MultiSteps`, in our words, of `jaxmem.accumulate`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

SCALAR = {"a": jnp.zeros([])}


def has_updated(state):
    """As `optax.MultiSteps.has_updated`."""
    return bool((state.mini_step == 0) & (state.gradient_step > 0))


def model_and_loss():
    model = nn.Dense(10)

    def loss(params, data):
        return jnp.sum(model.apply({"params": params}, data) ** 2)

    return model, loss


@pytest.mark.parametrize(("value", "left_out"), [(np.inf, 1), (-np.inf, 1), (np.nan, 1), (11.0, 0)])
def test_infinities_of_either_sign_and_nan_are_left_out(value, left_out):
    optimizer = jaxmem.accumulate(optax.sgd(1.0), 2)
    gradient = [jnp.asarray(value), jnp.zeros([])]
    updates, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    assert int(state.skip_state["skipped"]) == left_out
    assert int(state.mini_step) == 1 - left_out
    assert updates == [0, 0]


def test_parameters_change_at_the_end_of_each_cycle_alone_and_the_loss_falls():
    every, data = 4, jnp.ones((32, 7))
    model, loss = model_and_loss()
    params = model.init(jax.random.key(0), data)["params"]
    optimizer = jaxmem.accumulate(
        optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale(-1e-4)),
        every,
    )

    @jax.jit
    def train(data, state, params):
        return optimizer.update(jax.grad(loss)(params, data), state, params)

    state, before = optimizer.init(params), loss(params, data)
    for index in range(5 * every):
        updates, state = train(data, state, params)
        new = optax.apply_updates(params, updates)
        after = loss(new, data)
        if index % every < every - 1:
            jax.tree.map(np.testing.assert_array_equal, new, params)
            assert after == before and not has_updated(state)
        else:
            assert after < before and has_updated(state)
        params, before = new, after


def test_a_schedule_of_cycles():
    optimizer = jaxmem.accumulate(optax.sgd(1e-4), lambda step: jnp.where(step < 2, 1, 3))
    state = optimizer.init(SCALAR)
    assert not has_updated(state)
    seen = []
    for _ in range(2 + 5 * 3):
        _, state = optimizer.update(SCALAR, state, SCALAR)
        seen.append(has_updated(state))
    assert seen == [True] * 2 + [False, False, True] * 5


def test_the_accumulator_keeps_its_dtype_in_a_scan():
    optimizer = jaxmem.accumulate(optax.sgd(1e-4), 2, dtype=jnp.float32)
    params = {"a": jnp.zeros([], jnp.bfloat16)}

    def train(state, _):
        updates, state = optimizer.update({"a": jnp.ones([], jnp.bfloat16)}, state, params)
        return state, updates

    state, updates = jax.lax.scan(train, optimizer.init(params), jnp.arange(4))
    assert state.acc_grads["a"].dtype == jnp.float32
    np.testing.assert_allclose(updates["a"].astype(jnp.float32), [0, -1e-4, 0, -1e-4], rtol=1e-2)


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_around_zero_nans(skip_nonfinite):
    inner = optax.chain(optax.zero_nans(), optax.sgd(1e-4))
    optimizer = jaxmem.accumulate(inner, 2, skip_nonfinite=skip_nonfinite)
    state = optimizer.init(SCALAR)
    for _ in range(2):
        updates, state = optimizer.update(SCALAR, state, SCALAR)
    assert float(updates["a"]) == 0 and has_updated(state)


def test_the_mean_is_the_mean():
    optimizer = jaxmem.accumulate(optax.scale(1.0), 4)
    state, seen = optimizer.init(SCALAR), []
    for value in (1.0, 2.0, 3.0, 4.0):
        updates, state = optimizer.update({"a": jnp.asarray(value)}, state, SCALAR)
        seen.append((float(updates["a"]), has_updated(state)))
    assert seen == [(0, False), (0, False), (0, False), (2.5, True)]


def test_what_is_left_out_does_not_count_in_a_cycle():
    optimizer = jaxmem.accumulate(optax.sgd(1.0), 2)
    init, update = jax.jit(optimizer.init), jax.jit(optimizer.update)
    params, state, seen = SCALAR, init(SCALAR), []
    for value in (1.0, 1.0, np.inf, np.nan, 1.0, 1.0):
        updates, state = update({"a": jnp.asarray(value)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append((int(state.mini_step), float(params["a"])))
    assert seen == [(1, 0), (0, -1), (0, -1), (0, -1), (1, -1), (0, -2)]


HALVES = [jnp.float32, jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("options", [{}, {"mu_dtype": jnp.float32}])
@pytest.mark.parametrize("gradients", HALVES)
@pytest.mark.parametrize("kept", HALVES)
def test_dtypes_are_those_of_the_optimizer_alone(options, gradients, kept):
    every, data = 4, jnp.ones((32, 7), kept)
    model = nn.Dense(10, dtype=jnp.float32, param_dtype=kept)
    params = model.init(jax.random.key(0), data)["params"]
    inner = optax.adam(0.1, **options)
    accumulated = jaxmem.accumulate(inner, every)

    def loss(params):
        return jnp.sum(model.apply({"params": params}, data) ** 2)

    dtypes = lambda tree: jax.tree.map(jnp.result_type, tree)  # noqa: E731
    state, plain_state = accumulated.init(params), inner.init(params)
    before = dtypes(state)
    for _ in range(every + 1):
        gradient = jax.tree.map(lambda g: g.astype(gradients), jax.grad(loss)(params))
        expected, plain_state = inner.update(gradient, plain_state, params)
        updates, state = accumulated.update(gradient, state, params)
        assert dtypes(updates) == dtypes(expected)
        new = optax.apply_updates(params, updates)
        assert dtypes(new) == dtypes(params)
        params = new
    assert dtypes(state) == before
