import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

GOOD = {"a": jnp.ones(2, jnp.float32), "b": jnp.zeros(3, jnp.float32)}
BAD = {"a": jnp.ones(2, jnp.float32), "b": jnp.array([0.0, jnp.inf, jnp.nan], jnp.float32)}


def run(scaling, gradients, **options):
    state, scales = scaling.init(), []
    for gradient in gradients:
        state = jax.jit(scaling.update)(gradient, state, **options)
        scales.append(float(state.scale))
    return state, scales


def test_doubles_for_the_very_next_step_and_halves_at_overflow():
    scaling = jaxmem.LossScale(initial=8.0, growth_interval=3)
    state, scales = run(scaling, [GOOD, GOOD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD])
    assert scales == [8, 8, 16, 16, 8, 8, 8, 16]
    assert int(state.skipped) == 1 and int(state.good_steps) == 0


def test_the_default_is_that_of_the_paper():
    state, scales = run(jaxmem.LossScale(), [BAD, GOOD])
    assert scales == [2**15, 2**15]
    almost = state._replace(good_steps=jnp.asarray(1999, jnp.int32))
    assert float(jaxmem.LossScale().update(GOOD, almost).scale) == 2**16


def test_the_floor_and_the_ceiling_hold_and_scales_below_one_are_allowed():
    scaling = jaxmem.LossScale(initial=1.0, growth_interval=1, floor=0.25, ceiling=4.0)
    assert run(scaling, [BAD] * 4)[1] == [0.5, 0.25, 0.25, 0.25]
    assert run(scaling, [GOOD] * 4)[1] == [2, 4, 4, 4]


def test_a_static_scale_stays_and_counts_what_it_skips():
    state, scales = run(jaxmem.LossScale(initial=100.0, growth_interval=None), [GOOD, BAD, GOOD])
    assert scales == [100, 100, 100]
    assert int(state.skipped) == 1


def test_the_scale_is_held_through_a_cycle():
    scaling = jaxmem.LossScale(initial=8.0, growth_interval=2)
    state, scales = scaling.init(), []
    for index, gradient in enumerate([GOOD, BAD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD]):
        state = scaling.update(gradient, state, cycle_ends=index % 3 == 2)
        scales.append(float(state.scale))
    assert scales == [8, 8, 4, 4, 4, 4, 4, 4, 8]  # a cycle is one good step


def test_names_the_first_leaf_that_is_not_finite():
    scaling = jaxmem.LossScale()
    state = scaling.init()
    assert scaling.nonfinite_leaf(state, GOOD) is None
    state, _ = run(scaling, [GOOD, BAD, GOOD])
    assert scaling.nonfinite_leaf(state, GOOD) == "['b']"


def test_scales_and_unscales_in_float32():
    scaling = jaxmem.LossScale(initial=2.0**20)
    state = scaling.init()
    assert float(scaling.scale(jnp.asarray(2.0, jnp.float16), state)) == 2**21
    gradient = scaling.unscale(jnp.asarray(2.0**-20, jnp.float16), state)
    assert gradient.dtype == jnp.float32 and float(gradient) == 2.0**-40
    assert scaling.scale(jnp.asarray(2.0), state).dtype == jnp.float64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"floor": 0.0}, "0 < floor <= initial <= ceiling; got floor=0.0, initial=65536.0"),
        ({"initial": 2.0**30}, "got floor=6.103515625e-05, initial=1073741824.0, ceiling=16777216"),
        ({"initial": float("nan")}, "initial=nan"),
        ({"growth_interval": 0}, "growth_interval= takes a number of steps of 1 or more, or None"),
    ],
)
def test_bad_bounds(options, said):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.LossScale(**options)
    assert said in str(caught.value)


# ---- in the step


def overflowing(params, batch):
    """Gradients are not finite where the batch says so."""
    return jnp.sum(batch["x"] @ params["w"]) * jnp.where(batch["bad"][0], jnp.inf, 1.0)


def batch_of(bad):
    return {"x": jnp.ones((1, 3), jnp.float32), "bad": jnp.array([bad])}


def fp16_step(optimizer, **options):
    scaling = jaxmem.LossScale(initial=8.0, growth_interval=4)
    return jaxmem.train_step(overflowing, optimizer, loss_scale=scaling, **options)


def test_an_overflow_changes_nothing_but_the_scale():
    step = fp16_step(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    state, metrics = step(step.init({"w": jnp.ones(3, jnp.float32)}), batch_of(False))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    assert float(metrics["loss_scale"]) == 8 and int(metrics["skipped"]) == 0
    state, metrics = step(state, batch_of(True))
    chex.assert_trees_all_equal((state.params, state.opt_state), before)
    assert float(state.loss_scale.scale) == 4 and int(metrics["skipped"]) == 1
    assert step.loss_scale.nonfinite_leaf(state.loss_scale, state.params) == "['w']"
    state, _ = step(state, batch_of(False))
    chex.assert_tree_all_finite(state)
    assert float(state.params["w"][0]) < float(before[0]["w"][0])


def test_gradients_are_unscaled_once_before_clipping():
    """Clipped at 10, the gradient of norm 1.7 is not clipped, though its scaled one is 13.9."""
    step = fp16_step(optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(1.0)))
    state, _ = step(step.init({"w": jnp.ones(3, jnp.float32)}), batch_of(False))
    np.testing.assert_allclose(state.params["w"], 0.0, atol=1e-7)


def chain(*inner):
    return optax.chain(optax.clip(9.0), jaxmem.accumulate(*inner))


@pytest.mark.parametrize("accumulate", [jaxmem.accumulate, chain])
def test_an_overflow_in_a_cycle_is_left_out_and_the_cycle_takes_one_more(accumulate):
    step = fp16_step(accumulate(optax.sgd(0.1), 3))
    state = step.init({"w": jnp.ones(3, jnp.float32)})
    scales = []
    for bad in (False, True, False, False):
        state, metrics = step(state, batch_of(bad))
        scales.append(float(state.loss_scale.scale))
    assert scales == [8, 4, 4, 4]  # for the very next micro-step: gradients are unscaled by now
    assert int(metrics["skipped"]) == 1
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


def test_a_skipped_overflow_may_count_in_its_cycle():
    step = fp16_step(jaxmem.accumulate(optax.sgd(0.1), 3, count_skipped=True))
    state = step.init({"w": jnp.ones(3, jnp.float32)})
    for bad in (False, True, False):
        state, _ = step(state, batch_of(bad))
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)
    assert float(state.loss_scale.scale) == 4


@pytest.mark.parametrize("accumulate", [jaxmem.accumulate, chain])
def test_a_cycle_in_which_all_overflow_comes_to_an_end(accumulate):
    """Gradients of 2^14 overflow float16 at a scale of 8 and of 4: held through its cycle, the
    scale would never fall, and the cycle never end."""

    def loss(params, batch):
        product = params["w"].astype(jnp.float16) * batch.astype(jnp.float16)
        return jnp.sum(product.astype(jnp.float32))

    scaling = jaxmem.LossScale(initial=8.0)
    step = jaxmem.train_step(loss, accumulate(optax.sgd(1.0), 2), loss_scale=scaling)
    state = step.init({"w": jnp.zeros(1, jnp.float32)})
    for batch in (1.0, 2.0**14, 2.0**14, 2.0**14):
        state, metrics = step(state, jnp.full(1, batch, jnp.float32))
    assert float(state.loss_scale.scale) == 2 and int(metrics["skipped"]) == 2
    clipped = 2.0**14 if accumulate is jaxmem.accumulate else 9.0
    assert float(state.params["w"][0]) == -(1 + clipped) / 2


def test_model_state_of_an_overflow_is_dropped():
    def loss(params, batch, *, model_state):
        scale = jnp.where(batch["bad"][0], jnp.inf, 1.0).astype(jnp.float32)
        return jnp.sum(params["w"]) * scale, {"mean": model_state["mean"] * scale + 1}

    step = jaxmem.train_step(loss, optax.sgd(0.1), loss_scale=jaxmem.LossScale())
    state = step.init({"w": jnp.ones(3, jnp.float32)}, model_state={"mean": jnp.ones(())})
    for bad in (True, False):
        state, _ = step(state, batch_of(bad))
    assert float(state.model_state["mean"]) == 2


def test_small_gradients_live_only_with_a_scale():
    """A gradient of 2e-9 is 0 in float16."""

    def loss(params, batch):
        return jnp.sum(jnp.sum(batch @ params["w"]) * jnp.float32(2.0**-30))

    moved = {}
    for scaling in (jaxmem.LossScale(initial=1.0), jaxmem.LossScale()):
        step = jaxmem.train_step(loss, optax.sgd(2.0**20), precision="fp16", loss_scale=scaling)
        state, _ = step(
            step.init({"w": jnp.zeros((2, 2), jnp.float32)}), jnp.ones((4, 2), "float32")
        )
        moved[scaling.initial] = float(jnp.abs(state.params["w"]).sum())
    assert moved[1.0] == 0
    np.testing.assert_allclose(moved[2.0**16], 4 * 4 * 2.0**-10, rtol=1e-3)


def test_a_state_of_another_step():
    params = {"w": jnp.ones(3, jnp.float32)}
    with_scale, without = fp16_step(optax.sgd(0.1)), jaxmem.train_step(overflowing, optax.sgd(0.1))
    with pytest.raises(
        jaxmem.JaxmemError, match="has no loss scale and the step has one.*_replace"
    ):
        with_scale(without.init(params), batch_of(False))
    with pytest.raises(jaxmem.JaxmemError, match="has a loss scale and the step has none"):
        without(with_scale.init(params), batch_of(False))
