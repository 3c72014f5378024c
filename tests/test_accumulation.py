import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem


def micro_gradients(count):
    random = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(random.normal(size=3)), "b": jnp.asarray(1.0 * i)} for i in range(count)
    ]


PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_equals_the_optimizer_on_means(every, jitted):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1, 0, 9)))
    optimizer = jaxmem.accumulate(inner, every)
    update = jax.jit(optimizer.update) if jitted else optimizer.update
    params, state = PARAMS, optimizer.init(PARAMS)
    expected, inner_state = PARAMS, inner.init(PARAMS)
    gradients = micro_gradients(2 * every)
    for index, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        if (index + 1) % every == 0:
            group = gradients[index + 1 - every : index + 1]
            mean = jax.tree.map(lambda *leaves: sum(leaves) / every, *group)
            updates, inner_state = inner.update(mean, inner_state, expected)
            expected = optax.apply_updates(expected, updates)
        chex.assert_trees_all_close(params, expected, rtol=1e-6)
    assert isinstance(state, optax.MultiStepsState)
    assert int(state.gradient_step) == 2
    chex.assert_trees_all_close(state.inner_opt_state, inner_state, rtol=1e-6)


def test_the_optimizer_runs_once_per_cycle():
    calls = []

    def count(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), count)
    optimizer = jaxmem.accumulate(inner, 4)
    state = optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    for gradient in micro_gradients(9):
        _, state = update(gradient, state, PARAMS)
    jax.effects_barrier()
    assert len(calls) == 2


def test_offloaded_state_stays_on_the_host_between_updates():
    optimizer = jaxmem.accumulate(jaxmem.offload(optax.adam(1e-3)), 2)
    state = optimizer.init(PARAMS)
    for gradient in micro_gradients(3):
        _, state = jax.jit(optimizer.update)(gradient, state, PARAMS)
        assert state.inner_opt_state[0].mu["w"].sharding.memory_kind == "pinned_host"
        assert state.acc_grads["w"].sharding.memory_kind == "device"


@pytest.mark.parametrize("every", [0, -2, 1.5, True, "3"])
def test_every_below_one_is_refused(every):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.accumulate(optax.sgd(1.0), every)
    assert f"as an int of 1 or more; got {every!r}." in str(caught.value)


def test_gradients_of_another_structure():
    optimizer = jaxmem.accumulate(optax.sgd(1.0), 2)
    with pytest.raises(
        jaxmem.JaxmemError, match=r"gradients\['b'\] is absent in this call and \[\]"
    ):
        optimizer.update({"w": jnp.zeros(3)}, optimizer.init(PARAMS), PARAMS)


def test_not_an_optimizer():
    with pytest.raises(jaxmem.JaxmemError, match=r"jaxmem.accumulate takes an optax.Gradient.*0.1"):
        jaxmem.accumulate(0.1, 2)
