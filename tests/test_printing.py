"""Functions that print while they run: each print once, in its order, whatever is recomputed."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem

LAYERS = 6


def data():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return jnp.stack([jax.random.normal(key, (8, 8)) / 3 for key in keys]), jnp.ones((32, 8))


def said(number, x):
    jax.debug.print("{n} {m:.6f}", n=number, m=jnp.mean(x))


def layer(x, w, number=0):
    x = jnp.tanh(x @ w)
    said(number, x)
    return x


def unrolled(ws, x):
    for at, w in enumerate(ws):
        x = layer(x, w, at)
    return jnp.sum(x**2)


def in_regions(ws, x):
    for at, w in enumerate(ws):
        x = jax.checkpoint(functools.partial(layer, number=at))(x, w)
    return jnp.sum(x**2)


def in_a_call(ws, x):
    for w in ws:
        x = jax.jit(layer)(x, w)
    return jnp.sum(x**2)


def in_a_scan(ws, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


def in_a_region_in_a_scan(ws, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)[0] ** 2)


def in_a_reversed_scan_that_returns(ws, x):
    x, ys = jax.lax.scan(lambda x, w: (layer(x, w), x[0]), x, ws, reverse=True)
    return jnp.sum(x**2) + jnp.sum(ys)


def in_a_loop(ws, x):
    def turn(at, x):
        return layer(x, ws[at], at)

    return jnp.sum(jax.lax.fori_loop(0, LAYERS, turn, x) ** 2)


def in_a_scan_in_a_scan(ws, x):
    def outer(x, pair):
        said(9, x)
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, pair)[0], None

    return jnp.sum(jax.lax.scan(outer, x, ws.reshape(3, 2, 8, 8))[0] ** 2)


def of_slices_in_reverse(ws, x):
    """What is printed is handed to the loop: a result of it that it does not compute."""

    def turn(x, pair):
        at, w = pair
        x = jnp.tanh(x @ w)
        jax.debug.print("{n} {w}", n=at, w=w[0, :2])
        jax.lax.cond(at > 2, lambda at: jax.debug.print("late {n}", n=at), lambda at: None, at)
        return x, at

    x, numbers = jax.lax.scan(turn, x, (jnp.arange(LAYERS), ws), reverse=True, unroll=2)
    return jnp.sum(x**2) + jnp.sum(numbers)


def in_regions_of_nested_scans(ws, x):
    @jax.checkpoint
    def outer(x, pair):
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, pair)
        said(9, x)
        return x, None

    return jnp.sum(jax.lax.scan(outer, x, ws.reshape(3, 2, 8, 8))[0] ** 2)


def where_it_is_positive(ws, x):
    for at, w in enumerate(ws):
        x = jnp.tanh(x @ w)
        jax.lax.cond(jnp.mean(x) > 0, lambda x, at=at: said(at, x), lambda x: None, x)
    return jnp.sum(x**2)


def all_at_the_end(ws, x):
    kept = []
    for w in ws:
        x = jnp.tanh(x @ w)
        kept.append(jnp.mean(x))
    jax.lax.scan(lambda _, m: (None, said(0, m)), None, jnp.stack(kept))
    return jnp.sum(x**2)


def of_what_is_fused(ws, x):
    for at, w in enumerate(ws):
        x = jnp.tanh(x @ w)
        jax.debug.print("{n} {m}", n=at, m=2 * x[0, :2] + 1)
    return jnp.sum(x**2)


FUNCTIONS = [
    unrolled,
    in_regions,
    in_a_call,
    in_a_scan,
    in_a_region_in_a_scan,
    in_a_reversed_scan_that_returns,
    in_a_loop,
    in_a_scan_in_a_scan,
    of_slices_in_reverse,
    in_regions_of_nested_scans,
    where_it_is_positive,
    all_at_the_end,
    of_what_is_fused,
]


def printed(capfd, fun, *args):
    capfd.readouterr()
    result = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return result, [line for line in capfd.readouterr().out.splitlines() if line]


def lines(capfd, fun):
    """What a function prints as it is, in the order of its equations."""
    return printed(capfd, jax.jit(fun), *data())[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": "lowest"},
        pytest.param({"planner": "sqrt"}, marks=pytest.mark.slow),
        pytest.param({"planner": "dots"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_each_print_is_once_and_gradients_are_the_same(fun, jitted, options, capfd):
    ws, x = data()
    if options.get("budget"):
        with pytest.raises(jaxmem.BudgetError) as caught:
            jaxmem.plan(fun, ws, x, budget=1)
        options = {"budget": caught.value.lowest}
    planned = jax.grad(jaxmem.remat(fun, **options))
    found, said = printed(capfd, jax.jit(planned) if jitted else planned, ws, x)
    chex.assert_trees_all_close(found, jax.grad(fun)(ws, x), rtol=1e-12)
    assert sorted(said) == sorted(lines(capfd, fun)) and len(said) >= 3


def test_ordered_prints_keep_their_order(capfd):
    def loss(ws, x):
        for at, w in enumerate(ws):
            x = jnp.tanh(x @ w)
            jax.debug.print("{n} {m:.6f}", n=at, m=jnp.mean(x), ordered=True)
        return jnp.sum(x**2)

    _, said = printed(capfd, jax.jit(jax.grad(jaxmem.remat(loss))), *data())
    assert said == lines(capfd, loss) and len(said) == LAYERS


def test_callbacks_see_each_value_once():
    seen = []

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
        return jnp.sum(x**2)

    jax.block_until_ready(jax.jit(jax.grad(jaxmem.remat(loss)))(*data()))
    jax.effects_barrier()
    ws, x = data()
    expected = []
    for w in ws:
        expected.append(x := jnp.tanh(x @ w))
    order = np.argsort([one.sum() for one in seen]), np.argsort([one.sum() for one in expected])
    for at, wanted in zip(*order, strict=True):
        np.testing.assert_allclose(seen[at], expected[wanted], rtol=1e-12)


def test_kept_regions_print_once(capfd):
    for fun in (in_regions, in_a_region_in_a_scan):
        planned = jaxmem.remat(fun, regions="keep")
        found, said = printed(capfd, jax.jit(jax.grad(planned)), *data())
        expected, plain = printed(capfd, jax.jit(jax.grad(fun)), *data())
        chex.assert_trees_all_close(found, expected, rtol=1e-12)
        assert set(said) == set(plain) and len(said) == LAYERS  # JAX prints again


@pytest.mark.parametrize("fun", [unrolled, in_a_scan])
def test_plans_are_those_of_the_function_without_prints(fun):
    """But for the numbers that are printed, which are there to the end."""
    shapes = [jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in data()]
    shapes = [shapes[0], jax.ShapeDtypeStruct((2**15, 8), jnp.float32)]
    options = {"budget": "80%", "target": "h100", "compilations": 2}
    with pytest.warns(jaxmem.JaxmemWarning, match="are left out of this estimate"):
        plan = jaxmem.plan(fun, *shapes, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.debug, "print", lambda *_, **__: None)
        quiet = jaxmem.plan(fun, *shapes, **options)
    assert plan.projected_bytes == pytest.approx(quiet.projected_bytes, rel=0.01)
    assert plan.compiled_bytes == pytest.approx(quiet.compiled_bytes, rel=0.01)


def test_steps_of_fit_print(capfd):
    """Once for each slice of the batch."""
    ws, x = data()
    with pytest.warns(jaxmem.JaxmemWarning, match="left out"):
        step = jaxmem.fit(
            lambda ws, x: unrolled(ws, x) / len(x), optax.sgd(1e-2), ws, x, budget="80%",
            target="h100", keep=["batch"],
        )  # fmt: skip
    _, said = printed(capfd, step, step.init(ws), x)
    assert len(said) == LAYERS


def test_what_prints_and_computes_in_one_is_refused():
    def loss(ws, x):
        x = x @ ws[0]
        x = jax.lax.cond(jnp.mean(x) > 0, lambda x: (said(0, x), x)[1], jnp.sin, x)
        return jnp.sum(x)

    refused = (
        r"has a side effect, and a region would run it twice: cond \(DebugEffect\) at "
        r"test_printing.py:.*, in it debug_print at test_printing.py:"
    )
    with pytest.raises(jaxmem.PlanError, match=refused):
        jaxmem.plan(loss, *data())


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_on_a_mesh(kind, capfd):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        ws, x = data()
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        for fun in (unrolled, in_a_scan):
            found, said = printed(capfd, jax.jit(jax.grad(jaxmem.remat(fun))), ws, x)
            chex.assert_trees_all_close(found, jax.jit(jax.grad(fun))(ws, x), rtol=1e-12)
            assert len(said) >= LAYERS
