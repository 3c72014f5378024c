import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.reports.xla.traffic import count_bytes


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


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("target", ["local", "h200"])
def test_a_waiting_step_leaves_parameters_and_state_alone(target, skip):
    """In the compiled program, where XLA turns a cond of elementwise operations into a select of
    both branches, and copies what the branches of others pass on."""
    width, layers = 512, 4
    size = layers * width * width * 4

    def loss_fn(params, batch):
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    batch = jax.ShapeDtypeStruct((64, width), jnp.float32)
    gradient = jaxmem.memory(jax.grad(loss_fn), params, batch, target=target)
    inner = optax.adam(1e-3)
    optimizer = jaxmem.accumulate(inner, 4, skip_nonfinite=skip)
    step = jaxmem.train_step(loss_fn, optimizer)
    whole = step.memory(jaxmem.eval_shape(step.init, params), batch, target=target)
    waiting, applying = (count_bytes(whole.hlo, taken) for taken in (False, True))
    # Gradients are looked at for infinities, then read, added to the mean and not written.
    most = (3 + skip + (1 if target == "local" else 0.1)) * size
    assert waiting <= count_bytes(gradient.hlo, False) + most
    assert applying >= waiting + 7 * size  # parameters, two moments and their mean
    if target == "h200":
        assert whole.device <= (5 + 2 * skip) * size + 2**21


def run_with(optimizer, gradients):
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("count_skipped", [False, True])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad, at, count_skipped):
    """Anywhere in its cycle, its end included; the next cycle is as if nothing had been. The cycle
    takes another gradient in its place, or is shorter by one."""
    optimizer = jaxmem.accumulate(optax.sgd(1.0), 3, count_skipped=count_skipped)
    good = micro_gradients(5 if count_skipped else 6)
    poison = {"w": jnp.array([0.0, bad, 0.0]), "b": jnp.asarray(0.0)}
    params, state = run_with(optimizer, [*good[:at], poison, *good[at:]])
    first = 2 if count_skipped else 3
    cycles = good[:first], good[first:]
    means = [jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *cycle) for cycle in cycles]
    expected = jax.tree.map(lambda first, second: -first - second, *means)
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    assert int(state.skip_state["skipped"]) == 1
    assert int(state.gradient_step) == 2 and int(state.mini_step) == 0


def test_a_skipped_gradient_is_as_with_optax():
    gradients = micro_gradients(7)
    gradients[4] = {"w": jnp.array([0.0, np.nan, 0.0]), "b": jnp.asarray(0.0)}
    ours = jaxmem.accumulate(optax.adam(0.1), 2)
    theirs = optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation()
    (params, state), (expected, expected_state) = (
        run_with(optimizer, gradients) for optimizer in (ours, theirs)
    )
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    chex.assert_trees_all_close(state[:4], expected_state[:4], rtol=1e-6)


@pytest.mark.parametrize("count_skipped", [False, True])
def test_a_cycle_of_nothing_finite_does_not_update(count_skipped):
    optimizer = jaxmem.accumulate(optax.sgd(1.0, momentum=0.9), 2, count_skipped=count_skipped)
    state = optimizer.init(PARAMS)
    bad = jax.tree.map(lambda leaf: leaf + jnp.nan, PARAMS)
    for flush in (False, False, True):
        updates, state = optimizer.update(bad, state, PARAMS, flush=flush)
        chex.assert_trees_all_equal(updates, PARAMS)
    assert int(state.gradient_step) == int(state.mini_step) == 0
    poisoned = jaxmem.accumulate(optax.sgd(1.0), 2, skip_nonfinite=False)
    state = poisoned.init(PARAMS)
    for gradient in (bad, *micro_gradients(3)):
        updates, state = poisoned.update(gradient, state, PARAMS)
    chex.assert_tree_all_finite(updates)  # a cycle that was not skipped spoils itself alone


def test_a_partial_cycle_is_flushed_with_its_own_mean():
    optimizer = jaxmem.accumulate(optax.sgd(1.0), 4)
    state = optimizer.init(PARAMS)
    gradients = micro_gradients(3)
    for index, gradient in enumerate(gradients):
        last = index == len(gradients) - 1
        updates, state = jax.jit(optimizer.update)(gradient, state, PARAMS, flush=last)
    mean = jax.tree.map(lambda *leaves: -sum(leaves) / 3, *gradients)
    chex.assert_trees_all_close(updates, mean, rtol=1e-6)
    assert int(state.mini_step) == 0 and int(state.gradient_step) == 1


def test_a_schedule_of_cycle_lengths():
    optimizer = jaxmem.accumulate(optax.sgd(1.0), lambda step: jnp.where(step < 1, 1, 3))
    state = optimizer.init(PARAMS)
    steps = []
    for gradient in micro_gradients(7):
        _, state = jax.jit(optimizer.update)(gradient, state, PARAMS)
        steps.append(int(state.gradient_step))
    assert steps == [1, 1, 1, 2, 2, 2, 3]


def test_the_mean_has_the_dtype_asked_for():
    params = {"w": jnp.zeros(3, jnp.bfloat16), "n": jnp.zeros((), jnp.float32)}
    for dtype in (jnp.float32, jnp.bfloat16):
        optimizer = jaxmem.accumulate(optax.sgd(1.0), 2, dtype=dtype)
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = jax.jit(optimizer.update)(params, state, params)
            assert state.acc_grads["w"].dtype == dtype
            chex.assert_trees_all_equal_dtypes(updates, params)


@pytest.mark.parametrize("params", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gradients", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(0.1),
        pytest.param(optax.adam(0.1, mu_dtype=jnp.float32), marks=pytest.mark.slow),
    ],
)
def test_gradients_and_parameters_of_other_dtypes(params, gradients, inner):
    """As by optax.MultiSteps, whose state keeps its dtypes."""
    params = jax.tree.map(lambda leaf: leaf.astype(params), PARAMS)
    steps = jaxmem.accumulate(inner, 2), optax.MultiSteps(inner, 2).gradient_transformation()
    ours, theirs = (optimizer.init(params) for optimizer in steps)
    for gradient in micro_gradients(4):
        gradient = jax.tree.map(lambda leaf: leaf.astype(gradients), gradient)
        updates, ours = jax.jit(steps[0].update)(gradient, ours, params)
        expected, theirs = steps[1].update(gradient, theirs, params)
        chex.assert_trees_all_equal_dtypes(updates, expected)
        chex.assert_trees_all_close(updates, expected, rtol=1e-2)
        chex.assert_trees_all_equal_dtypes(ours.inner_opt_state, theirs.inner_opt_state)


def test_in_a_chain_and_in_a_scan():
    inner = optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"})
    optimizer = optax.chain(optax.clip(0.5), jaxmem.accumulate(inner, 2), optax.scale(0.5))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *micro_gradients(4))

    def body(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    (scanned, _), _ = jax.lax.scan(body, (PARAMS, optimizer.init(PARAMS)), stacked)
    carry = PARAMS, optimizer.init(PARAMS)
    for gradient in micro_gradients(4):
        carry, _ = body(carry, gradient)
    chex.assert_trees_all_close(scanned, carry[0], rtol=1e-6)


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
        jaxmem.JaxmemError, match=r"gradients\['b'\] is missing in this call; expected a float"
    ):
        optimizer.update({"w": jnp.zeros(3)}, optimizer.init(PARAMS), PARAMS)


def test_not_an_optimizer():
    with pytest.raises(jaxmem.JaxmemError, match=r"jaxmem.accumulate takes an optax.Gradient.*0.1"):
        jaxmem.accumulate(0.1, 2)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.accumulate(jnp.ones((99, 99), jnp.float32), 2)
    assert str(caught.value).endswith("; got an array float32[99, 99].")
    with pytest.raises(jaxmem.JaxmemError, match="; got an array float64.99.."):
        jaxmem.accumulate(optax.sgd(0.1), jnp.ones(99))


def test_under_strict_promotion_of_dtypes():
    optimizer = jaxmem.accumulate(optax.sgd(1.0), 2)
    gradient = jnp.ones(3, jnp.bfloat16)
    state = optimizer.init(gradient)
    with jax.numpy_dtype_promotion("strict"):
        _, state = optimizer.update(gradient, state, gradient)
    assert int(state.mini_step) == 1


def test_calls_that_do_not_belong_to_the_state():
    optimizer = jaxmem.accumulate(optax.adam(0.1), 2)
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)
    for gradients, other, flush, said in [
        ({"v": params["w"]}, state, False, r"gradients\['v'\]|gradients\['w'\]"),
        ({"w": params["w"][:2]}, state, False, r"gradients\['w'\] is \[2, 4\] in this call"),
        (params, optax.adam(0.1).init(params), False, "takes the state that its init made; got a"),
        (params, state, "yes", "flush= is True or False"),
    ]:
        with pytest.raises(jaxmem.JaxmemError, match=said):
            optimizer.update(gradients, other, params, flush=flush)


@pytest.mark.parametrize(
    "wrap", [jaxmem.offload, jaxmem.optim.small_moments], ids=["offload", "small_moments"]
)
def test_of_an_optimizer_whose_state_ends_in_numbers_of_its_own(wrap):
    """Its update is traced, and what it returns of those is no array then."""

    def init(params):
        return {"first": jnp.array(True), "rate": jnp.zeros(()), "mean": jnp.zeros_like(params)}

    def update(gradients, state, params=None):
        mean = 0.5 * state["mean"] + gradients
        rate = jnp.where(state["first"], 0.1, 0.2)
        return -rate * mean, {"first": jnp.array(False), "rate": jnp.array(0.2), "mean": mean}

    optimizer = optax.GradientTransformation(init, update)

    def trained(optimizer):
        params = jnp.arange(1.0, 5.0)
        state = optimizer.init(params)
        for turn in range(4):
            updates, state = optimizer.update(jnp.cos(params + turn), state, params)
            params = optax.apply_updates(params, updates)
        return params

    plain = trained(jaxmem.accumulate(optimizer, 2))
    wrapped = trained(jaxmem.accumulate(wrap(optimizer), 2))
    assert jnp.all(plain != jnp.arange(1.0, 5.0))
    assert jnp.allclose(wrapped, plain, rtol=1e-12 if wrap is jaxmem.offload else 1e-2)


def test_the_mean_is_as_wide_as_the_gradients():
    """Or float32, where they are shorter."""
    params = {name: jnp.zeros(2, name) for name in ("float64", "float32", "bfloat16", "int32")}
    state = jaxmem.accumulate(optax.sgd(1.0), 3).init(params)
    dtypes = {name: str(leaf.dtype) for name, leaf in state.acc_grads.items()}
    assert dtypes == {
        "float64": "float64", "float32": "float32", "bfloat16": "float32", "int32": "int32",
    }  # fmt: skip
    with jax.numpy_dtype_promotion("strict"):
        bytes_ = jaxmem.accumulate(optax.sgd(1.0), 3).init(jnp.zeros(2, jnp.float8_e4m3fn))
    assert bytes_.acc_grads.dtype == jnp.float32
    shorter = jaxmem.accumulate(optax.sgd(1.0), 3, dtype=jnp.float32).init(params)
    assert shorter.acc_grads["float64"].dtype == jnp.float32
