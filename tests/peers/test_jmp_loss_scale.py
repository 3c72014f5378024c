"""The cases of jmp's tests of loss scales, in our words, of `jaxmem.LossScale`."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.levers.batch.skipping import update_if

GOOD, BAD = {"a": jnp.ones([])}, {"a": jnp.asarray(jnp.nan)}


def test_a_static_scale_of_one_changes_nothing():
    scaling = jaxmem.LossScale(initial=1.0, growth_interval=None)
    state = scaling.init()
    chex.assert_trees_all_equal(scaling.scale(jnp.ones([]), state), jnp.ones([]))
    chex.assert_trees_all_equal(scaling.unscale(GOOD, state), GOOD)
    assert float(scaling.update(GOOD, state).scale) == 1


@pytest.mark.parametrize("growth_interval", [None, 2000])
@pytest.mark.parametrize("scale", [2.0, 3.0, 4.0])
def test_scales_and_unscales(growth_interval, scale):
    scaling = jaxmem.LossScale(initial=scale, growth_interval=growth_interval)
    state = scaling.init()
    assert float(scaling.scale(jnp.asarray(1.0), state)) == scale
    chex.assert_trees_all_equal(scaling.unscale({"a": jnp.asarray(scale)}, state), GOOD)


def test_no_warnings_and_a_float_from_an_integer():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = jaxmem.LossScale(2.0**15).init()
        whole = jaxmem.LossScale(initial=8, floor=1).init()
    assert not caught
    assert state.scale.dtype == whole.scale.dtype == jnp.float32


def test_the_state_is_a_pytree():
    state = jaxmem.LossScale().init()
    assert float(jax.tree.leaves(state)[0]) == 2.0**16
    assert jax.tree.map(lambda leaf: leaf, state) == state


@pytest.mark.parametrize("period", [20, 30])
def test_grows_after_a_period_of_finite_gradients(period):
    scaling = jaxmem.LossScale(initial=10.0, growth_interval=period)
    state, update = scaling.init(), jax.jit(scaling.update)
    for step in range(1, period):
        state = update(GOOD, state)
        assert (float(state.scale), int(state.good_steps)) == (10, step)
    state = update(GOOD, state)
    assert (float(state.scale), int(state.good_steps)) == (20, 0)


@pytest.mark.parametrize("floor", [1.0, 0.3125, 0.37])
def test_falls_to_its_floor(floor):
    scaling = jaxmem.LossScale(initial=10.0, growth_interval=20, floor=floor)
    state, update = scaling.init(), jax.jit(scaling.update)
    for step in range(100):
        state = update(BAD, state)
        np.testing.assert_allclose(state.scale, max(floor, 10.0 / 2.0 ** (step + 1)), rtol=1e-5)
        assert int(state.good_steps) == 0


def test_a_floor_of_zero_is_refused():
    with pytest.raises(jaxmem.JaxmemError, match=r"0 < floor .*; got floor=0\.0"):
        jaxmem.LossScale(floor=0.0)


def test_a_scale_that_would_be_infinite_stays():
    """There at the largest finite number, here at the ceiling."""
    scaling = jaxmem.LossScale(initial=2.0**127, growth_interval=1, ceiling=2.0**127)
    assert float(scaling.update(GOOD, scaling.init()).scale) == 2.0**127


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_which_gradients_are_finite(bad):
    scaling, bad = jaxmem.LossScale(), jnp.asarray(bad)
    one = jnp.ones([])
    for tree, skipped in (
        (None, 0),
        ({}, 0),
        ({"a": bad}, 1),
        ({"a": one, "b": bad}, 1),
        ({"a": bad, "b": one}, 1),
        ({"a": one, "b": one}, 0),
    ):
        assert int(scaling.update(tree, scaling.init()).skipped) == skipped


def test_one_of_two_trees_by_a_condition():
    """There a selection, here an update that is made or not."""
    first = {"a": jnp.ones([]), "b": jnp.zeros([])}
    second = {"a": jnp.zeros([]), "b": jnp.ones([])}
    for condition in (True, False):
        chosen = update_if(jnp.asarray(condition), lambda _: first, second)
        chex.assert_trees_all_equal(chosen, first if condition else second)
        assert update_if(jnp.asarray(condition), lambda _: None, None) is None
