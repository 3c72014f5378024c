"""The planned function equals the plain one: values, gradients, under every transformation."""

import contextlib
import functools
import io
import json
import operator
import re

import chex
import flax.linen as nn
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxmem
from jaxmem import jaxprs
from jaxmem.planning import Region
from jaxmem.program import read_program
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_facts import Predicted

WIDTH = 8


def mlp(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b[None])
    return jnp.sum(x**2)


def mlp_arguments(layers=9):
    keys = jax.random.split(jax.random.key(1), layers)
    params = [(jax.random.normal(k, (WIDTH, WIDTH)) / 3, jnp.arange(WIDTH) / 10.0) for k in keys]
    return params, jax.random.normal(jax.random.key(2), (64, WIDTH))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for features in (4, 4, 8, 8):
            x = nn.Conv(features, (3, 3), param_dtype=jnp.float64)(x)
            x = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(x)
            x = nn.relu(x)
        return x.mean((1, 2))


class TransformerBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        make = functools.partial(nn.Dense, param_dtype=jnp.float64)
        y = nn.LayerNorm(param_dtype=jnp.float64)(x)
        attend = nn.MultiHeadDotProductAttention(
            num_heads=2, dropout_rate=0.2, deterministic=not train, param_dtype=jnp.float64
        )
        x = x + nn.Dropout(0.1, deterministic=not train)(attend(y))
        y = nn.gelu(make(16)(nn.LayerNorm(param_dtype=jnp.float64)(x)))
        return x + nn.Dropout(0.1, deterministic=not train)(make(x.shape[-1])(y))


def convnet_case():
    x = jax.random.normal(jax.random.key(3), (4, 8, 8, 3))
    variables = ConvNet().init(jax.random.key(4), x)

    def loss(params, stats, x):
        out, new = ConvNet().apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return jnp.sum(out**2), new["batch_stats"]

    return loss, (variables["params"], variables["batch_stats"], x), True


def transformer_case():
    x = jax.random.normal(jax.random.key(5), (32, 6, 8))
    params = TransformerBlock().init(jax.random.key(6), x, False)["params"]

    def loss(params, x, key):
        for layer in range(2):
            rngs = {"dropout": jax.random.fold_in(key, layer)}
            x = TransformerBlock().apply({"params": params}, x, rngs=rngs)
        return jnp.sum(x**2)

    return loss, (params, x, jax.random.key(7, impl="rbg")), False


def scan_case():
    params, x = mlp_arguments()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def loss(stacked, x):
        total = 0.0
        for _ in range(3):
            x = jnp.tanh(x @ stacked[0][0])
            x, norms = jax.lax.scan(
                lambda x, p: (jnp.tanh(x @ p[0] + p[1][None]), jnp.sum(x)), x, stacked
            )
            total += jnp.sum(norms)
        return jnp.sum(jnp.cos(x)) + total

    return loss, (stacked, x), False


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))


@jax.custom_jvp
def softstep(x):
    return jax.nn.sigmoid(3 * x)


@softstep.defjvp
def _(primals, tangents):
    y = softstep(*primals)
    return y, 3 * y * (1 - y) * tangents[0]


def custom_case():
    params, x = mlp_arguments()

    def loss(params, x):
        for w, b in params:
            x = jax.nn.relu(clipped(x @ w)) + softstep(x + b[None])
        return jnp.sum(x**2)

    return loss, (params, x), False


def cond_case():
    params, x = mlp_arguments()

    def loss(params, x):
        for w, _ in params:
            x = jax.lax.cond(
                jnp.sum(x) > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: jnp.sin(x), x, w
            )
        return jnp.sum(x**2)

    return loss, (params, x), False


def integer_case():
    table = jax.random.normal(jax.random.key(8), (11, WIDTH))
    params, _ = mlp_arguments()
    tokens = jnp.tile(jnp.array([1, 4, 4, 10]), 16)

    def loss(params, table, tokens, key):
        x = table[tokens]
        for layer, (w, b) in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(key, layer), 0.8, x.shape)
            x = jnp.where(keep, jnp.tanh(x @ w + b[None]), 0.0)
        return jnp.sum(x**2), {"tokens": tokens + 1, "activation": x}

    return loss, ((params, table), tokens, jax.random.key(9)), True


def integer_wrapped():
    loss, ((params, table), tokens, key), _ = integer_case()
    return lambda both, tokens, key: loss(*both, tokens, key), ((params, table), tokens, key), True


CASES = {
    "mlp": lambda: (mlp, mlp_arguments(), False),
    "cnn_batchnorm": convnet_case,
    "transformer_dropout": transformer_case,
    "scan": scan_case,
    "custom_rules": custom_case,
    "cond": cond_case,
    "integers_and_keys": integer_wrapped,
}
OTHERS = ("sqrt", "every_kernel")
SLOW = {  # planners by case
    "cnn_batchnorm": OTHERS,
    "transformer_dropout": ("dp", *OTHERS),
    "cond": OTHERS,
    "integers_and_keys": OTHERS,
}


def every_kernel(fun, *args):
    """A plan with a region round every single kernel but the last: the hardest to emit."""
    dynamic, call = jaxprs.split_arrays(fun, args, {})
    program = read_program(jaxprs.flatten(call, dynamic, merge=True))
    regions = tuple(Region(i, i + 1) for i in range(len(program.kernels) - 1))
    return Plan("each", program.fingerprint, regions, (), Predicted(0, 0, program.flops, 0))


def assert_same(actual, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "planned_by"),
    [
        pytest.param(name, by, marks=[pytest.mark.slow] * (by in SLOW.get(name, ())))
        for name in CASES
        for by in ("dp", *OTHERS)
    ],
)
def test_value_and_gradient_equal_plain(name, planned_by):
    loss, args, has_aux = CASES[name]()
    if planned_by == "every_kernel":
        chosen = every_kernel(loss, *args)
    else:
        chosen = jaxmem.plan(loss, *args, planner=planned_by)
    assert chosen.regions or chosen.loops, "nothing planned: the test would compare plain to plain"
    planned = jaxmem.remat(loss, plan=chosen)
    plain = jax.jit(jax.value_and_grad(loss, has_aux=has_aux))(*args)
    assert_same(jax.jit(jax.value_and_grad(planned, has_aux=has_aux))(*args), plain)


def test_without_jit():
    params, x = mlp_arguments()
    plain = jax.value_and_grad(mlp)(params, x)
    assert_same(jax.value_and_grad(jaxmem.remat(mlp))(params, x), plain)


def test_regions_reach_the_gradient():
    """What the plan says is recomputed is recomputed: matmuls counted in the gradient's jaxpr."""
    args = mlp_arguments()
    chosen = jaxmem.plan(mlp, *args)
    one = 2 * 64 * WIDTH * WIDTH

    def matmuls(fun):
        def count(jaxpr):
            inner = sum(count(j) for eqn in jaxpr.eqns for j in jaxprs.inner_jaxprs(eqn))
            return inner + sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)

        return count(jax.make_jaxpr(jax.grad(fun))(*args).jaxpr)

    extra = matmuls(jaxmem.remat(mlp, plan=chosen)) - matmuls(mlp)
    assert extra == chosen.predicted.recompute_flops // one > 0


def test_vmap_per_example_gradients():
    params, x = mlp_arguments()
    planned = jaxmem.remat(mlp)
    gradients = jax.vmap(jax.grad(planned), (None, 0))(params, x[:, None])
    assert_same(gradients, jax.vmap(jax.grad(mlp), (None, 0))(params, x[:, None]))


def test_gradient_of_gradient():
    params, x = mlp_arguments(5)

    def penalty(fun):
        return lambda params: jnp.sum(jax.grad(fun, 1)(params, x) ** 2)

    assert_same(jax.grad(penalty(jaxmem.remat(mlp)))(params), jax.grad(penalty(mlp))(params))


@pytest.mark.slow
def test_forward_mode_and_hessian():
    params, x = mlp_arguments(5)
    planned = jaxmem.remat(mlp)
    assert_same(
        jax.jvp(lambda x: planned(params, x), (x,), (x,)),
        jax.jvp(lambda x: mlp(params, x), (x,), (x,)),
    )
    assert_same(
        jax.hessian(lambda x: planned(params, x))(x), jax.hessian(lambda x: mlp(params, x))(x)
    )


def test_inside_scan_and_closed_over_tracers():
    params, x = mlp_arguments(5)

    def train(loss_of):
        def body(params, scale):
            value, gradient = jax.value_and_grad(loss_of(scale))(params, x)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value

        return jax.lax.scan(body, params, jnp.arange(1.0, 4.0))

    def plain(scale):
        return lambda params, x: mlp(params, x * scale)

    assert_same(train(lambda scale: jaxmem.remat(plain(scale))), train(plain))
    outer = jax.grad(lambda scale: jaxmem.remat(plain(scale))(params, x))(1.5)
    assert_same(outer, jax.grad(lambda scale: plain(scale)(params, x))(1.5))


def test_keyword_arguments_and_constants():
    @jaxmem.remat
    def loss(w, x, *, power, activation):
        for _ in range(6):
            x = activation(x @ w)
        return jnp.sum(x**power)

    x = jnp.ones((3, WIDTH))
    gradient = jax.grad(loss)(jnp.eye(WIDTH), x, power=3, activation=jnp.tanh)
    plain = jax.grad(loss.__wrapped__)(jnp.eye(WIDTH), x, power=3, activation=jnp.tanh)
    assert_same(gradient, plain)
    assert loss.__name__ == "loss"


def test_jitted_functions_that_close_over_arrays():
    table = np.linspace(0, 1, WIDTH)

    def loss(w, x, scale):
        @jax.jit
        def layer(x):
            return jnp.tanh(x @ w * scale + jnp.asarray(table)[None])

        for _ in range(6):
            x = layer(x)
        return jnp.sum(x)

    (w, _), *_ = mlp_arguments(1)[0]
    x = mlp_arguments(1)[1]
    gradient = jax.jit(jax.grad(jaxmem.remat(loss), (0, 2)))(w, x, 1.5)
    assert_same(gradient, jax.grad(loss, (0, 2))(w, x, 1.5))


def test_shard_map_with_a_collective():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = mlp_arguments(5)

    def per_shard(params, x):
        return jax.lax.pmean(mlp(params, x), "data")

    def sharded(fun):
        specs = (jax.P(), jax.P("data"))
        return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=jax.P())

    gradient = jax.jit(jax.grad(sharded(jaxmem.remat(per_shard))))(params, x)
    assert_same(gradient, jax.jit(jax.grad(sharded(per_shard)))(params, x))


def test_plan_survives_json_and_refuses_another_program():
    params, x = mlp_arguments()
    chosen = jaxmem.plan(mlp, params, x)
    again = jaxmem.Plan.from_json(chosen.to_json())
    assert again == chosen
    assert_same(jax.grad(jaxmem.remat(mlp, plan=again))(params, x), jax.grad(mlp)(params, x))
    with pytest.raises(jaxmem.PlanError, match="belongs to another program: .* Make another"):
        jaxmem.remat(mlp, plan=chosen)(params, x[:2])


@pytest.fixture(scope="module")
def written_plan():
    plan = jaxmem.plan(mlp, *mlp_arguments(), target="a100-80gb", compilations=0)
    assert plan.regions and plan.planned_for.rules.parts is not None
    return plan.to_json()


def _with(text, *path, value):
    fields = json.loads(text)
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-1], "Expecting ',' delimiter"),
        (lambda text: "{}", r"\(it has no 'planner'\)"),
        (lambda text: "3", r"\(it is not an object but 3\)"),
        (lambda text: '{"planner": "sqrt"}', "it has no 'fingerprint'"),
        (
            lambda text: _with(text, "of_a_later_version", value=1),
            "it has 'of_a_later_version',",
        ),
        (lambda text: _with(text, "budget", value="80%"), "budget is not a whole number but '80%'"),
        (lambda text: _with(text, "reserved", value=True), "reserved is not a whole number but T"),
        (lambda text: _with(text, "regions", value={}), "regions is not a list but an object"),
        (
            lambda text: _with(text, "regions", 0, "start", value=None),
            r"regions\[0\].start is not a whole number but null",
        ),
        (lambda text: _with(text, "regions", 0, value={"start": 1}), r"regions\[0\] has no 'stop'"),
        (
            lambda text: _with(text, "predicted", "timeline", "live", value=[1, "2"]),
            r"predicted.timeline.live\[1\] is not a whole number but '2'",
        ),
        (
            lambda text: _with(text, "planned_for", "family", value="abacus"),
            "planned_for.family is not known: 'abacus'",
        ),
        (lambda text: "[" * 100_000, "recursion"),
        (lambda text: _with(text, "budget", value=10**400), "budget has more than 30 digits"),
        (
            lambda text: _with(text, "predicted", "seconds", value=10**400),
            "predicted.seconds has more than 30 digits",
        ),
        (
            lambda text: _with(text, "planned_for", "rules", value=None),
            "planned_for.rules is not an object but null",
        ),
        (
            lambda text: _with(text, "planned_for", "rules", "tile", value=[1, 2, 3]),
            "planned_for.rules.tile has 3 values, not 2",
        ),
        (
            lambda text: _with(text, "planned_for", "rules", "parts", "cores", value="many"),
            "planned_for.rules.parts.cores is not a whole number but 'many'",
        ),
    ],
)
def test_what_is_wrong_with_the_json_of_a_plan_is_told(written_plan, change, said):
    with pytest.raises(jaxmem.PlanError, match=f"not the JSON of a plan .*{said}.*; pass text"):
        jaxmem.Plan.from_json(change(written_plan))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("regions", 0, "start"), -1, "kernels -1 to "),
        (("regions", 0, "stop"), 10**9, "kernels 0 to 1000000000"),
        (("regions", 0, "saved"), [-1], "value -1"),
        (("regions", 0, "saved"), [10**9], "value 1000000000"),
    ],
)
def test_plans_that_were_changed_are_refused(written_plan, path, value, said):
    changed = jaxmem.Plan.from_json(_with(written_plan, *path, value=value))
    with pytest.raises(jaxmem.PlanError, match=f"The plan has {said}.*, which its program has not"):
        changed.apply(mlp)(*mlp_arguments())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("kernel",), 99, "a loop at kernel 99"),
        (("saved",), [99], "value 99"),
        (("schedule", "length"), -1, "12 iterations by Schedule"),
        (("schedule", "length"), 10**20, "12 iterations by Schedule"),
        (("schedule", "states"), 0, "12 iterations by Schedule"),
        (("schedule", "block"), 0, "12 iterations by Schedule"),
        (("schedule", "blocks"), 10**20, "12 iterations by Schedule"),
        (("regions",), [{"start": 5, "stop": 2, "saved": [], "regions": []}], "kernels 5 to 2"),
    ],
)
def test_loops_of_plans_that_were_changed_are_refused(path, value, said):
    def loop(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=12)[0])

    args = jnp.eye(8), jnp.ones((1024, 8))
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.plan(loop, *args, budget=1)
    text = jaxmem.plan(loop, *args, budget=caught.value.lowest).to_json()
    assert json.loads(text)["loops"][0]["schedule"]
    jaxmem.Plan.from_json(text).apply(loop)(*args)
    changed = jaxmem.Plan.from_json(_with(text, "loops", 0, *path, value=value))
    with pytest.raises(jaxmem.PlanError, match=f"The plan has {said}.*, which its program has not"):
        changed.apply(loop)(*args)


def rounded_chain(weights, x):
    for w in weights:
        y = jnp.tanh(x @ w)
        x = y + jax.lax.stop_gradient(jnp.round(y * 8) / 8 - y)
    return jnp.mean(x**2)


def loop_of_two(weights, x):
    def body(x, w):
        return jnp.tanh(jnp.sin(x @ w) @ w), None

    return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)


def _numbers(plain, path=()):
    """The paths of the whole numbers in plain data."""
    if isinstance(plain, dict | list):
        for name, one in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from _numbers(one, (*path, name))
    elif isinstance(plain, int) and not isinstance(plain, bool):
        yield path


@pytest.mark.parametrize("more", [1, pytest.param(2, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize(("fun", "count"), [(rounded_chain, 6), (loop_of_two, 13)])
def test_no_plan_that_was_changed_ends_in_an_error_of_pythons(fun, count, more):
    """A saved value of the wrong kernel, the first iterations of another loop."""
    args = jax.ShapeDtypeStruct((count, 8, 8), "float32"), jax.ShapeDtypeStruct((64, 8), "float32")
    least = jaxmem.plan(fun, *args)
    room = least.plain_bytes - least.projected_bytes
    budgets = (int(least.projected_bytes + share / 10 * room) for share in range(1, 10))
    plans = (jaxmem.plan(fun, *args, budget=budget) for budget in budgets)
    wanted = (
        one
        for one in plans
        if any(loop.head for loop in one.loops) or any(region.saved for region in one.regions)
    )
    text = next(wanted).to_json()
    parts, refused = json.loads(text), 0
    for path in _numbers({"regions": parts["regions"], "loops": parts["loops"]}):
        value = functools.reduce(operator.getitem, path, parts) + more
        changed = jaxmem.Plan.from_json(_with(text, *path, value=value))
        try:
            jax.eval_shape(jax.grad(changed.apply(fun)), *args)
        except jaxmem.PlanError:
            refused += 1
    assert refused


def test_the_json_of_a_plan_is_text():
    with pytest.raises(jaxmem.PlanError, match="not the JSON of a plan .* not dict"):
        jaxmem.Plan.from_json({})


def test_plan_prints_its_regions():
    text = str(jaxmem.plan(mlp, *mlp_arguments()))
    assert text.startswith("takes ") and "\ndp plan, " in text and text.count("\n") >= 6
    assert "projected" in text and "recomputes" in text and "(lines of test_remat.py)" in text


def test_a_smaller_budget_recomputes_more():
    abstract = jax.tree.map(jaxprs.abstract, mlp_arguments(16))
    least = jaxmem.plan(mlp, *abstract)
    plain = jaxmem.plan(mlp, *abstract, budget=2 * least.plain_bytes)
    half = jaxmem.plan(mlp, *abstract, budget=int(0.75 * least.plain_bytes))
    assert plain.regions == ()
    assert 0 < half.predicted.recompute_flops < least.predicted.recompute_flops
    assert half.projected_bytes <= 0.75 * half.plain_bytes
    reserved = jaxmem.plan(mlp, *abstract, budget=2 * least.plain_bytes, reserved=1000)
    assert reserved.projected_bytes == plain.projected_bytes + 1000


def test_budget_below_every_plan_names_the_lowest():
    abstract = jax.tree.map(jaxprs.abstract, mlp_arguments(16))
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.plan(mlp, *abstract, budget=5000)
    least = int(re.search(r"\((\d+) bytes projected, ", str(caught.value))[1])
    assert "set by the backward pass of " in str(caught.value)
    assert jaxmem.plan(mlp, *abstract, budget=least).projected_bytes == least


def test_side_effects_are_refused_by_name():
    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
            io_callback(print, None, x.mean())
        return x.sum()

    with pytest.raises(jaxmem.PlanError) as caught:
        jaxmem.plan(loss, jnp.eye(WIDTH), jnp.ones((2, WIDTH)))
    text = str(caught.value)
    assert "side effect, and a region would run it twice: io_callback (IOEffect) at " in text
    assert "test_remat.py" in text and "outside" in text


def test_writing_to_a_reference_is_a_side_effect():
    """Of what is given as well as of what is closed over."""
    reference = jax.new_ref(jnp.zeros(WIDTH))

    def loss(w, x, to):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        to[...] = jax.lax.stop_gradient(x.mean(0))
        return x.sum()

    w, x = jnp.eye(WIDTH), jnp.ones((2, WIDTH))
    said = r"side effect, and a region would run it twice: swap \(WriteEffect\) at test_remat.py"
    for call in (
        lambda: jax.grad(jaxmem.remat(loss))(w, x, reference),
        lambda: jax.grad(jaxmem.remat(lambda w, x: loss(w, x, reference)))(w, x),
        lambda: jax.jit(jax.grad(jaxmem.remat(loss)))(w, x, reference),
        lambda: jaxmem.plan(loss, w, x, reference),
    ):
        with pytest.raises(jaxmem.PlanError, match=said):
            call()


def test_side_effects_in_a_loop_are_found():
    def loss(w, x):
        def body(x, _):
            io_callback(print, None, x.mean())
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, length=6)[0].sum()

    with pytest.raises(jaxmem.PlanError, match=r"scan \(IOEffect\) at .*, in it io_callback at "):
        jaxmem.plan(loss, jnp.eye(WIDTH), jnp.ones((2, WIDTH)))


def test_bad_arguments():
    with pytest.raises(
        jaxmem.PlanError, match="no planner named 'chen'; the known ones are 'dp', 'dots', 'sqrt'"
    ):
        jaxmem.remat(mlp, planner="chen")
    with pytest.raises(
        jaxmem.JaxmemError, match="takes a function of arrays; got the object builtins.int"
    ):
        jaxmem.remat(3)
    with pytest.raises(jaxmem.BudgetError, match="'11 gigs' does not parse"):
        jaxmem.remat(mlp, budget="11 gigs")
    with pytest.raises(jaxmem.BudgetError, match="there is no target"):
        jaxmem.remat(mlp, budget="80%")


# ---- the policy


def saved(fun, *args):
    """Shapes of what a function keeps for its backward pass, arguments aside."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jax.ad_checkpoint.print_saved_residuals(fun, *args)
    kept = [line for line in printed.getvalue().splitlines() if "argument" not in line]
    return sorted(line.split()[0] for line in kept)


def test_policy_saves_matmuls_and_convolutions_alone():
    x = jnp.ones((2, 8, 8, 3))
    kernel = jnp.ones((3, 3, 3, 5))
    w = jnp.ones((5, 7))

    def block(kernel, w, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jnp.tanh(jnp.sin(jax.nn.softmax(y))) @ w
        return jnp.sum(jnp.exp(y) * 2)

    policed = jax.checkpoint(block, policy=jaxmem.remat_policy(target="h200"))
    assert saved(policed, kernel, w, x) == ["f64[2,8,8,5]", "f64[2,8,8,7]"]
    assert_same(
        jax.grad(policed, (0, 1, 2))(kernel, w, x), jax.grad(block, (0, 1, 2))(kernel, w, x)
    )


def test_policy_recomputes_an_outer_product():
    def block(u, v):
        return jnp.sum(jnp.tanh(u[:, None] @ v[None]))

    policed = jax.checkpoint(block, policy=jaxmem.remat_policy())
    assert saved(policed, jnp.ones(512), jnp.ones(512)) == []


def test_policy_in_linen_and_nnx_remat():
    from flax import nnx

    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
    plain = ConvNet()
    policed = nn.remat(ConvNet, static_argnums=(2,), policy=jaxmem.remat_policy())()
    variables = plain.init(jax.random.key(1), x)

    def loss(model):
        def of(params):
            bound_variables = {"params": params, "batch_stats": variables["batch_stats"]}
            return jnp.sum(model.apply(bound_variables, x, True, mutable=["batch_stats"])[0] ** 2)

        return of

    expected = jax.jit(jax.grad(loss(plain)))(variables["params"])
    assert_same(jax.jit(jax.grad(loss(policed)))(variables["params"]), expected)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(8, 8, rngs=rngs, param_dtype=jnp.float64) for _ in range(3)]
            )

        @nnx.remat(policy=jaxmem.remat_policy())
        def policed(self, x):
            return self.plain(x)

        def plain(self, x):
            for layer in self.layers:
                x = nnx.tanh(layer(x))
            return jnp.sum(x**2)

    net, x = Net(nnx.Rngs(0)), x[..., 0]
    policed = nnx.grad(lambda net: net.policed(x))(net)
    assert_same(
        nnx.to_pure_dict(policed), nnx.to_pure_dict(nnx.grad(lambda net: net.plain(x))(net))
    )


@pytest.mark.slow
def test_linen_class_comes_back_as_a_class():
    x = jax.random.normal(jax.random.key(3), (4, 8, 8, 3))
    plain, planned = ConvNet(), jaxmem.remat(ConvNet)()
    variables = plain.init(jax.random.key(4), x)
    assert_same(planned.init(jax.random.key(4), x), variables)

    def loss(model):
        def of(params):
            bound_variables = {"params": params, "batch_stats": variables["batch_stats"]}
            out, new = model.apply(bound_variables, x, True, mutable=["batch_stats"])
            return jnp.sum(out**2), new

        return of

    gradient = jax.grad(loss(planned), has_aux=True)(variables["params"])
    assert_same(gradient, jax.grad(loss(plain), has_aux=True)(variables["params"]))
    assert planned_regions(loss(planned), variables["params"]) > 0

    block = jaxmem.remat(TransformerBlock)()
    x = jax.random.normal(jax.random.key(5), (8, 6, 8))
    params = block.init(jax.random.key(6), x, False)["params"]

    def dropped(model):
        def of(p):
            return jnp.sum(model.apply({"params": p}, x, rngs={"dropout": jax.random.key(7)}) ** 2)

        return of

    assert_same(jax.grad(dropped(block))(params), jax.grad(dropped(TransformerBlock()))(params))


def planned_regions(fun, *args):
    text = str(jax.make_jaxpr(jax.grad(fun, has_aux=True))(*args))
    return text.count("checkpoint") + text.count("remat")


def test_nnx_modules_keep_their_updates():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            make = functools.partial(nnx.Linear, 8, 8, rngs=rngs, param_dtype=jnp.float64)
            self.layers = nnx.List([make() for _ in range(4)])
            self.norm = nnx.LayerNorm(8, rngs=rngs, param_dtype=jnp.float64)
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.tanh(layer(x))
            self.calls[...] += x.sum()
            return self.norm(x)

    x = jax.random.normal(jax.random.key(1), (16, 8))
    plain = Net(nnx.Rngs(0))
    expected = nnx.grad(lambda net, x: jnp.sum(net(x) ** 3))(plain, x)
    for planned in (jaxmem.remat(Net)(nnx.Rngs(0)), jaxmem.remat(Net(nnx.Rngs(0)))):
        assert isinstance(planned, Net)
        gradient = nnx.grad(lambda net, x: jnp.sum(net(x) ** 3))(planned, x)
        assert_same(nnx.to_pure_dict(gradient), nnx.to_pure_dict(expected))
        assert_same(nnx.to_pure_dict(nnx.state(planned)), nnx.to_pure_dict(nnx.state(plain)))


def test_policy_needs_the_rates_of_a_gpu():
    with pytest.raises(jaxmem.JaxmemError, match="rates of the attached device .* Name a target"):
        jaxmem.remat_policy(target="local")
    assert callable(jaxmem.remat_policy(target=jaxmem.target("a100-40gb")))


def test_costs_count_every_contraction():
    x = jnp.ones((2, 8, 8, 6))
    kernel = jnp.ones((3, 3, 3, 4))

    def fun(x, w):
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            (2, 2),
            "SAME",
            feature_group_count=2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y, _ = jax.lax.scan(lambda c, _: (c @ w, None), y, length=5)
        return jax.lax.cond(jnp.sum(y) > 0, lambda y: y @ w, lambda y: y, y)

    flat = jaxprs.flatten(fun, [x, jnp.ones((4, 4))])
    from jaxmem.program import read_program

    convolution = 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)
    matmul = 2 * (2 * 4 * 4) * 4 * 4
    assert read_program(flat).flops == convolution + 5 * matmul + matmul
    assert np.prod(x.shape) * 8 in read_program(flat).sizes


def test_custom_rules_meet_constants_as_jax_arrays():
    @jax.custom_vjp
    def scaled(times, x):
        return times[0] * x

    def backward(residual, g):
        times, _ = residual
        body = lambda i, total: total + g * times[i]  # noqa: E731 (indexes with a tracer)
        return jnp.zeros_like(times), jax.lax.fori_loop(0, 2, body, jnp.zeros_like(g))

    scaled.defvjp(lambda times, x: (times[0] * x, (times, x)), backward)

    def loss(x):
        for _ in range(5):
            x = scaled(jnp.array([0.0, 1.0]), jnp.sin(x)) + x
        return jnp.sum(x)

    x = jnp.linspace(0.1, 1, 6)
    assert_same(jax.grad(jaxmem.remat(loss))(x), jax.grad(loss)(x))


def test_a_plan_is_for_one_set_of_dtypes():
    w, x = jnp.eye(WIDTH, dtype=jnp.float32), jnp.ones((2, WIDTH), jnp.float32)

    def loss(w, x):
        for _ in range(6):
            x = x @ w
        return x.sum()

    chosen = jaxmem.plan(loss, w, x)
    with pytest.raises(jaxmem.PlanError, match="belongs to another program"):
        jaxmem.remat(loss, plan=chosen)(w.astype(jnp.int32), x.astype(jnp.int32))


def test_arguments_of_another_call():
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.plan(mlp, mlp_arguments()[0])
    assert "jaxmem.plan was given mlp(params, x) and arguments that it does not take: missing" in (
        str(caught.value)
    )
    with pytest.raises(jaxmem.BudgetError, match="set by what is reserved"):
        jaxmem.plan(lambda x: x, jnp.ones(3), budget="1B", reserved=2)
    with pytest.raises(jaxmem.BudgetError, match="all of which is reserved .* reserve less,"):
        jaxmem.plan(mlp, *mlp_arguments(), budget="1MiB", reserved="2MiB")
    least = jaxmem.plan(mlp, *mlp_arguments(), reserved="1MiB")
    assert least.projected_bytes > least.reserved == 2**20


def test_remat_counts_gradients_of_all_arguments_and_says_so():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) ** 2)

    w, x = jnp.ones((64, 64), jnp.float32), jnp.ones((256, 64), jnp.float32)
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.plan(loss, w, x, budget="1B")
    lowest = caught.value.lowest
    with pytest.raises(jaxmem.BudgetError, match="counts a gradient of every floating") as refused:
        jax.grad(jaxmem.remat(loss, budget=lowest))(w, x)
    assert refused.value.lowest == lowest + x.nbytes
    planned = jaxmem.remat(loss, plan=jaxmem.plan(loss, w, x, budget=lowest))
    np.testing.assert_allclose(jax.grad(planned)(w, x), jax.grad(loss)(w, x), rtol=1e-5, atol=1e-6)
    jax.grad(jaxmem.remat(loss, budget=refused.value.lowest))(w, x)


def test_a_policy_leaves_complex_matmuls_to_be_made_again():
    """`jax.checkpoint` cannot save them: it would round them to their own precision."""

    def layer(w, x):
        z = (x + 1j * x) @ (w + 2j * w)
        return jnp.tanh(jnp.abs(z) ** 2) @ w

    w, x = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), jnp.linspace(0.0, 1.0, 12).reshape(3, 4)
    planned = jax.checkpoint(layer, policy=jaxmem.remat_policy(target="h100"))
    one, other = (jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in (layer, planned))
    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_plan_leaves_nothing_to_choose():
    def loss(x):
        return jnp.sum(jnp.tanh(x) ** 2)

    plan = jaxmem.plan(loss, jnp.ones(3))
    with pytest.raises(
        jaxmem.PlanError, match=r"has plan= already, so budget=, planner= would change nothing"
    ):
        jaxmem.remat(loss, plan=plan, budget="1KiB", planner="sqrt")
