"""What an optimizer's state holds, read from its program: against what it holds as it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxmem
from jaxmem.optim.state_analysis import analyze_state

SIZE = 300
OPTIMIZERS = {
    "acprop": lambda: contrib.acprop(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2),
    "adam, its rates in the state": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "adam, in a chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-2), optax.scale_by_adam()
    ),
    "adam, skipped": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "adam, every second time": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2
    ).gradient_transformation(),
    "adamax": lambda: optax.adamax(1e-2),
    "adan": lambda: optax.adan(1e-2),
    "ademamix": lambda: contrib.ademamix(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "cocob": contrib.cocob,
    "dadapt_adamw": contrib.dadapt_adamw,
    "dog": contrib.dog,
    "lamb": lambda: optax.lamb(1e-2),
    "lbfgs": lambda: optax.lbfgs(1e-2, linesearch=None),
    "lion": lambda: optax.lion(1e-2),
    "madgrad": lambda: contrib.madgrad(1e-2),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
    "momo_adam": contrib.momo_adam,
    "muon": lambda: contrib.muon(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "optimistic": lambda: optax.optimistic_gradient_descent(1e-2),
    "prodigy": contrib.prodigy,
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "rmsprop, centered": lambda: optax.rmsprop(1e-2, centered=True),
    "rprop": lambda: optax.rprop(1e-2),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
}
# What is kept as it is, beside what begins as the parameters' values.
KEPT = {
    "adan": [".g"],
    "lbfgs": [".params", ".updates", "_memory"],
    "optimistic": [".previous_gradient"],
    "rmsprop, centered": [".mu", ".nu"],
    "rprop": [".prev_updates"],
    "sm3": [".mu"],  # the largest of each row and column
}
NEW_VALUES = ("cocob", "dog", "madgrad", "mechanize", "prodigy", "schedule_free")
# Its step grows with the sum of what earlier steps won: of 8 bits they are a fifth longer.
BETTING = ("cocob",)
PARAMS = {"kernel": jnp.linspace(-1, 1, SIZE).reshape(10, 30)}


def after_steps(optimizer, count, decades=3):
    """The state after so many updates by gradients of either sign and of so many decades, and the
    updates."""
    optimizer = optax.with_extra_args_support(optimizer)
    scale = 10 ** jax.random.uniform(jax.random.key(1), (10, 30), minval=-decades, maxval=0)

    @jax.jit
    def step(carried, key):
        params, state = carried
        noise = 1 + 0.3 * jax.random.normal(key, scale.shape)
        gradients = {"kernel": params["kernel"] * scale * noise}
        value = jnp.sum(scale * params["kernel"] ** 2) / 2
        extra = {"value": value, "grad": gradients, "value_fn": lambda _: value}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return (optax.apply_updates(params, updates), state), updates

    keys = jax.random.split(jax.random.key(0), count)
    (_, state), updates = jax.lax.scan(step, (PARAMS, optimizer.init(PARAMS)), keys)
    return state, updates["kernel"]


def of_large(optimizer):
    def large(path, leaf):
        return leaf.size >= 10 and jnp.issubdtype(leaf.dtype, jnp.floating)

    optimizer = optax.with_extra_args_support(optimizer)
    return analyze_state(optimizer, PARAMS, large), large


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_second_moments_are_those_that_are_never_negative(name):
    optimizer = OPTIMIZERS[name]()
    read, large = of_large(optimizer)
    state, _ = after_steps(optimizer, 7)
    seen = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if path in read.moments:
            seen += 1
            assert (path in read.second) == bool(jnp.all(leaf >= 0)), path
        elif large(path, leaf) and name not in NEW_VALUES:
            assert any(kept in jax.tree_util.keystr(path) for kept in KEPT[name]), path
    assert seen or name in (*KEPT, "dog")


@pytest.mark.parametrize("name", NEW_VALUES)
def test_what_begins_as_the_parameters_is_kept(name):
    optimizer = OPTIMIZERS[name]()
    read, _ = of_large(optimizer)
    begins = jax.tree_util.tree_leaves_with_path(optimizer.init(PARAMS))
    copies = [path for path, leaf in begins if np.array_equal(leaf, PARAMS["kernel"])]
    assert copies and read.moments.isdisjoint(copies)


def test_sums_are_told_from_what_forgets():
    """And what is made of no gradients is no moment."""
    sums = {"adagrad": [".sum_of_squares"], "madgrad": [".grad_sum_sq", ".s"]}
    for name in (*sums, "adam", "amsgrad", "sgd", "simplified_ademamix", "yogi"):
        read, _ = of_large(OPTIMIZERS[name]())
        found = sorted(jax.tree_util.keystr(path) for path in read.sums)
        assert [any(end in one for one in found) for end in sums.get(name, [])] == [
            True for _ in found
        ]

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda s, p: 0.99 * s + 0.01 * p, state, params)

    average = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    assert not of_large(average)[0].moments


@pytest.mark.parametrize(("dtype", "kept"), [("8bit", True), ("bfloat16", False)])
def test_sums_stay_where_rounding_would_lose_what_is_added(dtype, kept):
    optimizer = optax.adagrad(0.3)
    small = jaxmem.optim.small_moments(optimizer, dtype, keep=lambda path, leaf: leaf.size < 10)
    state = small.init(PARAMS).inner[0].sum_of_squares["kernel"]
    assert (state.dtype == PARAMS["kernel"].dtype) == kept
    (_, ours), (_, theirs) = (after_steps(one, 200, 1) for one in (small, optimizer))
    assert np.median(np.abs(ours).sum(0) / np.abs(theirs).sum(0)) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("inside", [jax.checkpoint, jax.jit])
def test_moments_are_read_inside_of_calls(inside):
    def update(updates, state, params=None):
        mean = inside(lambda m, g: jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g))
        square = inside(lambda v, g: jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, g))
        return updates, {"m": mean(state["m"], updates), "v": square(state["v"], updates)}

    def init(params):
        return {name: jax.tree.map(jnp.zeros_like, params) for name in "mv"}

    read, _ = of_large(optax.GradientTransformation(init, update))
    assert len(read.moments) == 2 and len(read.second) == 1 and not read.sums


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["8bit", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in BETTING])
def test_rounded_moments_update_as_exact_ones_do(name, dtype):
    """Of each value, over 60 steps: no update is lost, or several times as large."""
    optimizer = OPTIMIZERS[name]()
    small = jaxmem.optim.small_moments(optimizer, dtype, keep=lambda path, leaf: leaf.size < 10)
    (_, ours), (_, theirs) = (after_steps(one, 60, 1) for one in (small, optimizer))
    assert bool(jnp.all(jnp.isfinite(ours)))
    ours, theirs = (np.abs(updates).sum(0) for updates in (ours, theirs))
    assert np.median(ours / theirs) == pytest.approx(1, abs=0.1)
    assert np.min(ours / theirs) > 0.3
    assert np.max(ours / theirs) < 3


def test_an_update_that_cannot_be_traced_is_told():
    def update(updates, state, params=None, *, hessian, **extra):
        return updates, state

    needs = optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)
    small = jaxmem.optim.small_moments(needs, keep=lambda path, leaf: False)
    with pytest.raises(jaxmem.JaxmemError) as caught:
        small.init(PARAMS)
    assert str(caught.value).startswith(
        "jaxmem.optim.small_moments reads from the optimizer's update what its state holds, and "
        "that raised TypeError: "
    )
    assert "missing 1 required keyword-only argument: 'hessian'" in str(caught.value)
    assert str(caught.value).endswith(
        " It gives gradients like the parameters, value=, grad= and value_fn=. Wrap the part with "
        "the moments: of a chain its link, of a wrapper what it is around."
    )
