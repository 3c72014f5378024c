"""Policies over names: exact by the model, proved by compiled bytes, in regions that stay."""

import functools
import itertools
import pathlib
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import jaxprs
from jaxmem.ground.budget import Budget
from jaxmem.planning import (
    MOST,
    Names,
    Rates,
    Region,
    marginal_savings,
    of_each,
    simulate,
    simulate_block,
)
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.choices import NamedChoices
from jaxmem.rematerialization.named.places import named_place, names_of
from jaxmem.rematerialization.named.search import NamedSearch
from jaxmem.rematerialization.traced import TracedFunction

MIB = 2**20
TARGET = "a100-40gb"
LAYERS, ROWS, LENGTH, WIDTH, HEADS = 6, 4, 128, 128, 4
NAMES = ["layer_input", "query", "key", "value", "context", "mlp"]
BUILT_INS = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(p, x):
    x = checkpoint_name(x, "layer_input")
    h = norm(x)
    q, k, v = (checkpoint_name(h @ p[name], name) for name in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", heads(q), heads(k))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), heads(v))
    x = x + checkpoint_name(mixed.reshape(x.shape), "context") @ p["out"]
    return x + jax.nn.gelu(checkpoint_name(norm(x) @ p["up"], "mlp")) @ p["down"]


def scanned(p, x, policy=None):
    region = jax.checkpoint(block, policy=policy)
    return jnp.mean(jax.lax.scan(lambda x, p: (region(p, x), None), x, p)[0] ** 2)


def unrolled(p, x, policy=None):
    region = jax.checkpoint(block, policy=policy)
    for of_layer in p:
        x = region(of_layer, x)
    return jnp.mean(x**2)


def shapes(fun, dtype="float32", width=WIDTH):
    """Parameters, stacked for a scan or a list of layers, and what goes in."""
    wide = {"up": (width, 4 * width), "down": (4 * width, width)}
    every = wide | dict.fromkeys(("query", "key", "value", "out"), (width, width))

    def params(*stacked):
        return {name: jax.ShapeDtypeStruct((*stacked, *s), dtype) for name, s in every.items()}

    made = params(LAYERS) if fun is scanned else [params()] * LAYERS
    return made, jax.ShapeDtypeStruct((ROWS, LENGTH, width), dtype)


FUNCTIONS = {"scan": scanned, "unrolled": unrolled}


def choices_over(fun, host=False):
    traced = TracedFunction(fun, shapes(fun), {}, 0)
    names, _ = names_of(traced)
    target = jaxmem.target(TARGET)
    place = named_place(traced, target, names)
    rates = Rates(target, target.host_bandwidth if host else 0.0)
    return Names(place, len(names), rates), place, names


def plain_count(place, rates, saved):
    """Seconds, price and FLOPs by the layout's own account of what runs again."""
    found = np.zeros(3)
    for one, times in place.all():
        saved_values = {value for name in saved for value in one.groups[name]}
        kernels = one.program.kernels
        regions = [
            Region(a, b, tuple(sorted(saved_values & {v for k in kernels[a:b] for v in k.results})))
            for a, b in one.spans
        ]
        if one is place:
            runs = {at: n - 1 for at, n in simulate(one.program, regions).runs.items()}
        else:
            inside = {at for a, b in one.spans for at in range(a, b)}
            kept = {v for at, k in enumerate(kernels) for v in k.results if at not in inside}
            runs = simulate_block(one.program, 0, len(kernels), saved_values | kept, regions).runs
        for number, of in enumerate((rates.seconds, rates.price, lambda kernel: kernel.flops)):
            each = [of(kernel) for kernel in kernels] if number == 2 else of_each(one.program, of)
            found[number] += times * sum(each[at] * n for at, n in runs.items())
    return found


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_sets_of_names_recompute_is_what_the_layout_runs_again(kind):
    found, place, names = choices_over(FUNCTIONS[kind])
    assert names == NAMES
    for number in range(2 ** len(names)):
        saved = [name for name in range(len(names)) if number >> name & 1]
        seconds, price, flops = plain_count(place, found.rates, saved)
        assert found.tables.seconds[number] == pytest.approx(seconds)
        assert found.tables.price[number] == pytest.approx(price)
        assert found.tables.flops[number] == flops
    alone = marginal_savings(place, len(names), found.rates)
    sets = [found.tables.seconds[0] - found.tables.seconds[1 << n] for n in range(len(names))]
    assert alone == pytest.approx(sets)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_choice_is_the_best_of_all_there_are(kind, host):
    found, place, names = choices_over(FUNCTIONS[kind], host)
    able = [bool(found.sizes[n]) and not place.groups[n] for n in range(len(names))]
    every = []
    for how in itertools.product("rsh", repeat=len(names)):
        if "h" in how and not (host and all(able[n] for n, one in enumerate(how) if one == "h")):
            continue
        number = sum(1 << n for n, one in enumerate(how) if one != "r")
        offloaded = sum(1 << n for n, one in enumerate(how) if one == "h")
        every.append(found.choice(number, offloaded))
    assert len(every) == (3 if host and kind == "scan" else 2) ** len(names)
    low, high = (of(one.bytes for one in every) for of in (min, max))
    for budget in np.linspace(low, high, 17):
        best = min(one.price for one in every if one.bytes <= budget)
        chosen = found.cheapest_for(budget)
        assert chosen.bytes <= budget
        assert chosen.price == pytest.approx(best, rel=1e-6)
    assert found.cheapest_for(low - 1) is None
    assert found.smallest().bytes == low
    front = found.front
    assert [one.price for one in front] == sorted(one.price for one in front)
    assert [one.bytes for one in front] == sorted((one.bytes for one in front), reverse=True)


def test_twenty_names_are_all_weighed():
    def wide(ws, x):
        def layer(x):
            for at in range(MOST + 2):
                x = jnp.sin(checkpoint_name(x @ ws[at % 2][: 8 + at // 2, :], f"dot{at}"))
                x = x[:, : 8 + (at + 1) // 2]
            return x

        return jnp.sum(jax.checkpoint(layer)(x))

    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(2, 32, 32), (64, 8)]]
    policy = jaxmem.plan(wide, *args).as_policy()
    assert len(policy.names) == MOST + 2
    assert "20 that spare the most time are weighed" in str(policy)


BUDGETS = {"scan": ("19MiB", "24MiB", "32MiB"), "unrolled": ("17MiB", "21MiB", "27MiB")}


@functools.cache
def policy_for(kind, budget):
    plan = jaxmem.plan(
        FUNCTIONS[kind], *shapes(FUNCTIONS[kind]), budget=budget, target=TARGET, compilations=0
    )
    return plan.as_policy()


@functools.cache
def compiled(kind, policy):
    step = jax.value_and_grad(functools.partial(FUNCTIONS[kind], policy=policy))
    return jaxmem.memory(step, *shapes(FUNCTIONS[kind]), target=TARGET, timeline=False)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        pytest.param(kind, budget, marks=[pytest.mark.slow] * (at != 1 or kind == "unrolled"))
        for kind in BUDGETS
        for at, budget in enumerate(BUDGETS[kind])
    ],
)
def test_the_policy_compiles_to_what_it_says_and_loses_to_no_built_in(kind, budget):
    policy = policy_for(kind, budget)
    report = compiled(kind, policy)
    assert policy.compiled
    assert report.device == policy.bytes <= policy.budget
    plain = compiled(kind, jax.checkpoint_policies.everything_saveable)
    assert report.work.flops / plain.work.flops == pytest.approx(policy.recompute)
    told = {one.name: one for one in policy.built_ins}
    for name in BUILT_INS:
        rival = compiled(kind, getattr(jax.checkpoint_policies, name))
        if name in told:
            assert told[name].bytes == rival.device
        if rival.device <= policy.budget and rival.work.flops < 0.999 * report.work.flops:
            assert told[name].better and told[name].unnamed, "what is better has no names"
            assert f"{name} fits, recomputes less, and keeps values without a name" in str(policy)
    assert any(how == "save" for how in policy.names.values())
    assert max(map(len, str(policy).splitlines())) <= 100


@pytest.mark.slow
def test_more_bytes_recompute_less():
    for kind in BUDGETS:
        flops = [policy_for(kind, budget).recompute for budget in BUDGETS[kind]]
        assert flops == sorted(flops, reverse=True)
        assert flops[0] > flops[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_of_all_sets_compiled_none_that_fits_recomputes_less(kind):
    report = {}
    for count in range(len(NAMES) + 1):
        for saved in itertools.combinations(NAMES, count):
            policy = jax.checkpoint_policies.save_only_these_names(*saved)
            report[saved] = compiled(kind, policy)
    for budget in BUDGETS[kind]:
        policy = policy_for(kind, budget)
        fits = [one.work.flops for one in report.values() if one.device <= policy.budget]
        assert compiled(kind, policy).work.flops <= 1.01 * min(fits)


def values(fun):
    dtype = "float64"
    params, x = shapes(fun, dtype, 16)
    key = jax.random.key(0)
    draw = lambda shape: jax.random.normal(key, shape.shape, dtype) / 4  # noqa: E731
    return jax.tree.map(draw, params), draw(x)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gradients_are_those_without_a_policy(kind):
    fun, args = FUNCTIONS[kind], values(FUNCTIONS[kind])
    plan = jaxmem.plan(fun, *args)
    names = jaxmem.plan(fun, *args, budget=plan.plain_bytes // 2).as_policy(
        fixed={"query": "save", "mlp": "recompute"}
    )
    assert names.names["query"] == "save"
    loss, gradients = jax.jit(jax.value_and_grad(fun))(*args)
    other, same = jax.jit(jax.value_and_grad(functools.partial(fun, policy=names)))(*args)
    np.testing.assert_allclose(other, loss, rtol=1e-12)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-14), same, gradients
    )


def test_the_policy_saves_what_it_names_and_nothing_else():
    fun = functools.partial(unrolled, policy=jaxmem.plan(unrolled, *shapes(unrolled)).as_policy(
        fixed={"context": "save", "query": "save", "key": "recompute", "value": "recompute",
               "layer_input": "recompute", "mlp": "recompute"},
    ))  # fmt: skip
    kept = jaxmem.residuals(fun, *shapes(unrolled))
    named = jaxmem.residuals(
        functools.partial(
            unrolled, policy=jax.checkpoint_policies.save_only_these_names("context", "query")
        ),
        *shapes(unrolled),
    )
    assert sorted(one.bytes for one in kept) == sorted(one.bytes for one in named)


@pytest.mark.slow
def test_names_wait_in_host_memory_where_that_recomputes_less():
    plan = jaxmem.plan(scanned, *shapes(scanned), budget="24MiB", target=TARGET, compilations=0)
    policy = plan.as_policy(offload=True, fixed={"mlp": "offload"})
    assert policy.names["mlp"] == "offload"
    report = compiled("scan", policy)
    assert report.device == policy.bytes
    assert report.host >= LAYERS * ROWS * LENGTH * 4 * WIDTH * 4
    assert policy.host_bytes >= LAYERS * ROWS * LENGTH * 4 * WIDTH * 4
    assert "mlp=offload" in str(policy).replace("\n  ", " ")
    text = policy.config("python")
    assert "names_which_can_be_offloaded=['mlp'" in text
    assert callable(eval(text))  # the call of jax.checkpoint_policies


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = checkpoint_name(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)), "up")
        return x + checkpoint_name(nn.Dense(WIDTH)(nn.gelu(h)), "down"), None


class Stack(nn.Module):
    policy: object = None

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer, policy=self.policy, prevent_cse=False),
            variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS,
        )  # fmt: skip
        return layers()(x, None)[0]


def test_a_flax_model_with_its_own_scan_and_remat():
    x = jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32)
    params = jax.eval_shape(Stack().init, jax.random.key(0), x)

    def loss(params, x, policy=None):
        return jnp.mean(Stack(policy).apply(params, x) ** 2)

    plan = jaxmem.plan(loss, params, x, budget="50MiB", target=TARGET, compilations=0)
    policy = plan.as_policy()
    step = jax.value_and_grad(functools.partial(loss, policy=policy))
    report = jaxmem.memory(step, params, x, target=TARGET, timeline=False)
    assert report.device == policy.bytes <= 50 * MIB
    assert policy.names == {"up": "save", "down": "recompute"}
    assert policy.recompute == pytest.approx(1.0, abs=1e-3)
    told = {one.name: one for one in policy.built_ins}
    assert not told["dots_saveable"].unnamed, "each matmul's result has a name, past its bias"
    rows = jaxmem.suggest_names(loss, params, x, target=TARGET).rows
    assert {row.name: row.count for row in rows if row.named} == {"up": LAYERS, "down": LAYERS}
    assert all("test_names.py" in row.line for row in rows)


def test_what_a_built_in_keeps_is_a_choice_where_all_of_it_has_names():
    def loss(w, x, policy=None):
        def layer(x):
            x = jax.nn.silu(checkpoint_name(x @ w, "one"))
            return jax.nn.silu(checkpoint_name(x @ w, "two"))

        return jnp.sum(jax.checkpoint(layer, policy=policy)(x))

    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(256, 256), (8192, 256)]]
    traced = TracedFunction(loss, args, {}, 0)
    target = jaxmem.target(TARGET)
    search = NamedSearch(NamedChoices(traced, Limits(Budget(64 * MIB), target), {}), target)
    assert search._equivalent_choice("dots_saveable").saved == {0, 1}
    assert search._equivalent_choice("everything_saveable") is None, "the first layer has no name"
    plan = jaxmem.plan(loss, *args, budget="64MiB", target=TARGET, compilations=0)
    policy = plan.as_policy()
    assert not any(one.better for one in policy.built_ins)
    assert policy.recompute == 1


def test_nnx_modules_are_arguments_like_others():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.two(jnp.sin(checkpoint_name(self.one(x), "hidden")))

    def loss(net, x):
        return jnp.mean(nnx.remat(lambda net, x: net(x))(net, x) ** 2)

    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    policy = jaxmem.plan(loss, Net(nnx.Rngs(0)), x).as_policy()
    assert list(policy.names) == ["hidden"]


def test_values_of_one_name_go_together():
    def loss(w, x):
        def layer(x):
            x = checkpoint_name(jnp.sin(x @ w), "same")
            return jnp.sin(checkpoint_name(x @ w, "same") @ w)

        return jnp.sum(jax.checkpoint(layer)(x))

    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)]]
    policy = jaxmem.plan(loss, *args, budget="7MiB").as_policy()
    assert list(policy.names) == ["same"]
    (row,) = [row for row in jaxmem.suggest_names(loss, *args).rows if row.named]
    assert (row.name, row.count) == ("same", 2)


def test_the_configuration_of_trainers():
    plan = jaxmem.plan(unrolled, *shapes(unrolled), budget="26MiB")
    how = ("save", "recompute", "recompute", "save", "save", "recompute")
    policy = plan.as_policy(fixed=dict(zip(NAMES, how, strict=True)))
    assert policy.config("maxtext") == (
        "remat_policy: custom\nlayer_input: device\nquery: remat\nkey: remat\nvalue: device\n"
        "context: device\nmlp: remat"
    )
    assert policy.config("python") == (
        "jax.checkpoint_policies.save_only_these_names('layer_input', 'value', 'context')"
    )
    with pytest.raises(jaxmem.JaxmemError, match="are 'maxtext' and 'python'; got 'toml'"):
        policy.config("toml")
    assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
    assert "(projected)" in str(policy).splitlines()[0]


def test_a_plan_from_json_asks_for_its_function():
    plan = jaxmem.plan(unrolled, *shapes(unrolled), budget="20MiB")
    read = jaxmem.Plan.from_json(plan.to_json())
    assert read == plan
    with pytest.raises(jaxmem.PlanError, match=r"Pass the function and its arguments: plan\.as"):
        read.as_policy()
    assert read.as_policy(unrolled, *shapes(unrolled)) == plan.as_policy()
    with pytest.raises(jaxmem.PlanError, match="belongs to another program"):
        read.as_policy(scanned, *shapes(scanned))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_regions_without_names_keep_their_policy():
    dots = jax.checkpoint_policies.dots_saveable

    def loss(w, x):
        named = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(x @ w, "hidden") @ w))
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w), policy=dots)(named(x)))

    closed = jax.make_jaxpr(loss)(*[jnp.ones((4, 4))] * 2)
    changed = jaxprs.with_policy(closed, jax.checkpoint_policies.everything_saveable)
    policies = [
        jaxprs.equations.parameters_of(one)["policy"]
        for one in changed.jaxpr.eqns
        if jaxprs.is_region(one)
    ]
    assert policies == [jax.checkpoint_policies.everything_saveable, dots]


def plain(w, x):
    return jnp.sum(jnp.sin(x @ w))


def outside(w, x):
    return jnp.sum(checkpoint_name(x @ w, "hidden"))


@pytest.mark.parametrize(
    ("fun", "given", "said"),
    [
        (plain, {}, r"no names that a policy could save, and no regions.*jaxmem\.suggest_names"),
        (jax.checkpoint(plain), {}, r"no names that a policy could save\. Give the values.*sugges"),
        (outside, {}, r"names of the function \(hidden\) are in no region"),
        (
            jax.checkpoint(outside),
            {"fixed": {"hiden": "save"}},
            r"fixed= has 'hiden', and .* no such name; they have hidden",
        ),
        (
            jax.checkpoint(outside),
            {"fixed": {"hidden": "keep"}},
            "fixed={'hidden': 'keep'} is none of 'save', 'offload' and 'recompute'",
        ),
    ],
)
def test_what_cannot_be_a_policy_says_why(fun, given, said):
    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)]]
    with pytest.raises(jaxmem.PlanError, match=said):
        jaxmem.plan(fun, *args).as_policy(**given)


def test_a_budget_below_all_choices_names_the_lowest():
    plan = jaxmem.plan(unrolled, *shapes(unrolled), budget="15MiB")
    with pytest.raises(jaxmem.BudgetError, match="No policy over 6 names fits") as caught:
        plan.as_policy()
    again = jaxmem.plan(unrolled, *shapes(unrolled), budget=caught.value.lowest)
    assert again.as_policy().bytes == caught.value.lowest


def test_what_xla_does_not_keep_in_host_memory_is_an_error(monkeypatch):
    class Refusing:
        start = stop = lambda self: None

        def report(self):
            raise jaxmem.OffloadError("it stays on the device")

    def begin(function, *args, **options):
        return Refusing()

    monkeypatch.setattr("jaxmem.rematerialization.named.compiler.begin", begin)
    given = {"budget": "30MiB", "target": TARGET, "compilations": 0}
    plan = jaxmem.plan(scanned, *shapes(scanned), **given)
    with pytest.raises(jaxmem.OffloadError, match="could be compiled: not offloaded: it stays on"):
        plan.as_policy(fixed={"mlp": "offload"}, compilations=1)


def test_names_in_a_loop_inside_of_a_region_are_told():
    def loss(w, x):
        def turn(x, _):
            return jnp.sin(checkpoint_name(x @ w, "inner")), None

        def layer(x):
            return checkpoint_name(jax.lax.scan(turn, x, None, 3)[0] @ w, "outer") ** 2

        return jnp.sum(jax.checkpoint(layer)(x))

    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)]]
    policy = jaxmem.plan(loss, *args).as_policy()
    assert policy.names["inner"] == "recompute"
    assert "not weighed: inner (in a loop inside of a region" in str(policy)


def test_names_in_no_region_are_told():
    def loss(w, x):
        hidden = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(x @ w, "inner")))(x)
        return jnp.sum(checkpoint_name(hidden @ w, "outer"))

    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)]]
    policy = jaxmem.plan(loss, *args).as_policy()
    assert list(policy.names) == ["inner"]
    assert "in no region, where no policy decides: outer" in str(policy)


def test_suggestions_are_lines_of_the_user_with_what_the_budget_chooses():
    found = jaxmem.suggest_names(unrolled, *shapes(unrolled), target=TARGET, budget="24MiB")
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "fits: " in text.splitlines()[0]
    rows = {row.name: row for row in found.rows}
    assert set(NAMES) <= set(rows)
    assert {row.count for row in found.rows} == {LAYERS, 2 * LAYERS}, "norms on one line"
    assert rows["query"].bytes == ROWS * LENGTH * WIDTH * 4
    assert [row.worth for row in found.rows] == sorted((r.worth for r in found.rows), reverse=True)
    assert {row.action for row in found.rows} == {"save", "recompute"}
    assert "checkpoint_name(x, " in text
    fresh = [row for row in found.rows if not row.named]
    source = pathlib.Path(__file__).read_text().splitlines()
    lines = [source[int(row.line.split(":")[1].split()[0]) - 1] for row in fresh]
    assert any("jnp.einsum" in line for line in lines), "the scores have no name"
    assert not any(row.operation.startswith("reduce") for row in fresh), "inside of jax.nn.softmax"
    unlimited = jaxmem.suggest_names(unrolled, *shapes(unrolled), most=3)
    assert len(unlimited.rows) == 3
    assert {row.action for row in unlimited.rows} == {""}


def test_suggestions_for_a_function_without_regions():
    def free(p, x):
        for of_layer in p:
            x = block(of_layer, x)
        return jnp.mean(x**2)

    def free_scan(p, x):
        return jnp.mean(jax.lax.scan(lambda x, p: (block(p, x), None), x, p)[0] ** 2)

    blocks = jaxmem.suggest_names(free, *shapes(unrolled))
    scans = jaxmem.suggest_names(free_scan, *shapes(scanned))
    assert f"each of {LAYERS} blocks counts as one" in str(blocks)
    assert "the body of each scan counts as one" in str(scans)
    for found in (blocks, scans):
        assert {row.count for row in found.rows if row.named} == {LAYERS}


def test_suggestions_where_there_are_none():
    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (4096, 64)]]
    with pytest.raises(jaxmem.PlanError, match="no value in the function that a name would save"):
        jaxmem.suggest_names(lambda w, x: jnp.sum(x) * jnp.sum(w), *args)
    with pytest.raises(jaxmem.PlanError, match="most= is a number of rows, 1 to 16; got 99"):
        jaxmem.suggest_names(plain, *args, most=99)
