"""The user's own regions are opened: planned in place of, in scans too, with the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem import jaxprs

LAYERS, ROWS, WIDTH = 12, 8192, 512
MIB = 2**20


def block(x, w):
    y = checkpoint_name(jnp.sin(x @ w), "hidden")
    return x + jnp.tanh(y @ w), jnp.mean(x)


def scanned(region, ws, x):
    """Layers in a scan whose body is a region, in a call."""
    y, means = jax.lax.scan(jax.jit(region(block)), x, ws)
    return jnp.mean(y**2) + jnp.sum(means)


def unrolled(region, ws, x):
    for w in ws:
        x, mean = region(block)(x, w)
        x = x + mean
    return jnp.mean(x**2)


POLICIES = jax.checkpoint_policies
REGIONS = {
    "everything again": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "names": functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("hidden")),
    "to the host": functools.partial(
        jax.checkpoint,
        policy=POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["hidden"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
    "regions in regions": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "planned already": jaxmem.remat,
}
SHAPES = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
)


@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("fun", [scanned, unrolled])
def test_plans_are_those_of_the_function_without_its_regions(fun, kind):
    written = functools.partial(fun, REGIONS[kind])
    without = functools.partial(fun, lambda f: f)
    plain = jaxmem.plan(without, *SHAPES)
    budget = (plain.plain_bytes + plain.projected_bytes) // 2
    for regions in ("open", "keep") if kind == "everything again" else ("open",):
        plan = jaxmem.plan(written, *SHAPES, budget=budget, regions=regions)
        other = jaxmem.plan(without if regions == "open" else written, *SHAPES, budget=budget)
        assert plan.projected_bytes <= budget
        if kind not in ("planned already",):  # whose barriers stay
            assert (plan.projected_bytes == other.projected_bytes) == (regions == "open")
        assert bool(plan.own_regions.count) == (regions == "open")
        if regions == "open":
            assert plan.plain_bytes >= 0.99 * plain.plain_bytes


# By one planner in all combinations; by the others there is no more that could differ.
@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("fun", [scanned, unrolled])
@pytest.mark.parametrize(
    "planner", ["dp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dots", "sqrt"))]
)
def test_gradients_are_the_same(fun, kind, planner):
    if kind == "to the host":
        pytest.skip("the CPU has no other memory")
    keys = jax.random.split(jax.random.key(0))
    ws = 0.3 * jax.random.normal(keys[0], (4, 8, 8), jnp.float64)
    x = jax.random.normal(keys[1], (6, 8), jnp.float64)
    written = functools.partial(fun, REGIONS[kind])
    expected = jax.value_and_grad(written, (0, 1))(ws, x)
    for regions in ("open", "keep"):
        planned = jaxmem.remat(written, planner=planner, regions=regions)
        for transform in (lambda f: f, jax.jit):
            actual = transform(jax.value_and_grad(planned, (0, 1)))(ws, x)
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12),
                actual,
                expected,
            )


def test_a_plan_says_what_the_regions_cost():
    """24 layers under `jax.checkpoint` were one plan at every budget."""
    written = functools.partial(scanned, jax.checkpoint)
    plan = jaxmem.plan(written, *SHAPES, budget="2GiB", target="h200")
    assert plan.own_regions.count == 1 and not plan.own_regions.kept
    assert plan.own_regions.written.recompute_flops == LAYERS * 2 * 2 * ROWS * WIDTH * WIDTH
    assert plan.predicted.recompute_flops == 0
    report = jaxmem.memory(jax.value_and_grad(written), *SHAPES, target="h200")
    assert abs(plan.own_regions.written.bytes - report.device) <= 0.1 * report.device
    assert plan.own_regions.written.bytes < plan.plain_bytes / 2
    text = " ".join(str(plan).split())
    size = jaxmem.format_bytes(plan.own_regions.written.bytes)
    assert f"as written, with 1 region of its own: projected {size}, recomputes 103.1 GF" in text
    saved = jaxmem.plan(functools.partial(scanned, REGIONS["dots"]), *SHAPES).own_regions.written
    assert saved.recompute_flops == 0 and saved.bytes > 2 * plan.own_regions.written.bytes
    assert jaxmem.plan(functools.partial(scanned, lambda f: f), *SHAPES).own_regions.written is None
    again = type(plan).from_json(plan.to_json())
    assert again == plan


def test_the_planned_program_is_the_one_that_was_compiled():
    written = functools.partial(unrolled, jax.checkpoint)
    plan = jaxmem.plan(written, *SHAPES, budget="250MiB", target="h200")
    report = jaxmem.memory(
        jax.value_and_grad(plan.apply(written)),
        *SHAPES,
        target="h200",
        compiler_options=plan.compiler_options,
    )
    assert report.device == plan.compiled_bytes <= 250 * MIB


def test_a_scan_in_a_scan_keeps_its_own():
    """No plan decides there: opened, it would only keep more."""

    def outer(x, ws):
        return jax.lax.scan(jax.checkpoint(block), x, ws)[0], None

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(jax.checkpoint(outer), x, ws)[0] ** 2)

    flat = jaxprs.flatten(loss, [jnp.ones((2, 3, 4, 4)), jnp.ones((5, 4))], True)
    assert flat.inlined_checkpoints == 1
    (scan,) = [step for step in flat.steps if step.primitive == "scan"]
    text = str(scan.equation.params["jaxpr"])
    assert text.count("scan[") == 1 and text.count("checkpoint") + text.count("remat") > 0


@pytest.mark.slow
def test_linen_and_nnx_layers_in_a_scan():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16, param_dtype=jnp.float64)(jnp.tanh(x)), None

    layers = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=5
    )()
    x = jnp.ones((4, 16))
    params = layers.init(jax.random.key(0), x, None)

    def loss(params):
        return jnp.mean(layers.apply(params, x, None)[0] ** 2)

    plan = jaxmem.plan(loss, params)
    assert plan.own_regions.count == 1 and plan.recomputes
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12),
        jax.grad(plan.apply(loss))(params),
        jax.grad(loss)(params),
    )

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(16, 16, param_dtype=jnp.float64, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def apply(x, layer):
        return x + jnp.tanh(layer(x))

    stack = make(jax.random.split(jax.random.key(0), 5))

    def of_model(stack):
        return jnp.mean(apply(x, stack) ** 2)

    plan = jaxmem.plan(of_model, stack)
    assert plan.own_regions.count == 1 and plan.recomputes
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12),
        nnx.grad(plan.apply(of_model))(stack),
        nnx.grad(of_model)(stack),
    )


@pytest.mark.slow
def test_fit_gets_a_step_faster_that_has_memory_to_spare(capsys):
    params, x = SHAPES

    def loss(params, batch):
        return scanned(jax.checkpoint, params, batch)

    fit = functools.partial(jaxmem.fit, loss, optax.sgd(0.1), params, x, target="h200")
    step = fit(budget="2GiB")
    said = " ".join(capsys.readouterr().out.split())
    written = step.fitting.written
    assert (
        "the loss's own regions recompute "
        f"{written.recompute_seconds / 3 / step.fitting.chosen.plan.predicted.seconds:.1%} of a "
        f"step (projected {jaxmem.format_bytes(written.bytes)}, "
        f"{jaxmem.format_bytes(2**31 - written.bytes)} of the budget unused); the chosen step "
        "recomputes 0.0%. They are opened; keep='regions' keeps them"
    ) in said
    kept = fit(budget="2GiB", keep="regions")
    assert kept.fitting.written is None
    assert "not searched: regions: it is to be kept" in str(kept.fitting)
    assert kept.fitting.chosen.compiled < step.fitting.chosen.compiled / 2

    def flops(step):
        state = step.abstract(params)
        return jaxmem.memory(step, state, x, target="h200", timeline=False).work.flops

    assert flops(kept) - flops(step) == written.recompute_flops
    capsys.readouterr()
    small = fit(budget="120MiB").fitting
    said = " ".join(capsys.readouterr().out.split())
    assert small.chosen.compiled <= 120 * MIB and small.chosen.levers.microbatches > 1
    over = jaxmem.format_bytes(written.bytes - 120 * MIB)
    assert f"{over} over the budget); the chosen step, {small.chosen.levers}, recomputes" in said
    assert f"regions recompute {written.recompute_share:.1%} of a step" in said


def test_regions_is_open_or_keep():
    expected = (
        r"regions= is 'open' \(plan in place of the function's own regions\) or 'keep' \(beside "
        r"them\); got 'both'"
    )
    for call in (
        lambda: jaxmem.plan(lambda x: x.sum(), jnp.ones(3), regions="both"),
        lambda: jaxmem.remat(lambda x: x.sum(), regions="both"),
        lambda: jaxmem.pareto(lambda x: x.sum(), jnp.ones(3), regions="both"),
    ):
        with pytest.raises(jaxmem.PlanError, match=expected):
            call()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["nothing", "names", "dots_with_no_batch_dims", "dots", "everything"]
)
def test_what_policies_of_regions_save_is_projected(policy):
    """Outside of scans too, where the regions stay and in what is said of them as written."""
    policies = jax.checkpoint_policies
    saves = policies.save_only_these_names("up")
    if policy != "names":
        saves = getattr(policies, f"{policy}_saveable")

    def layer(x, weights):
        square, up, down = weights
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = (jnp.reshape(one, (4, 512, 4, 32)) for one in (normed @ square, x @ square, x))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ square
        return x + jax.nn.gelu(checkpoint_name(x @ up, "up")) @ down

    def loss(weights, x):
        for one in weights:
            x = jax.checkpoint(layer, policy=saves)(x, one)
        return jnp.sum(x**2)

    sizes = [(128, 128), (128, 512), (512, 128)]
    weights = [[jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]] * 4
    args = weights, jax.ShapeDtypeStruct((4, 512, 128), jnp.float32)
    kept = jaxmem.plan(loss, *args, budget="10GiB", target="h100", regions="keep", compilations=1)
    assert kept.projected_bytes == pytest.approx(kept.compiled_bytes, rel=0.12)
    opened = jaxmem.plan(loss, *args, target="h100", compilations=0)
    assert opened.own_regions.written.bytes == kept.projected_bytes


@pytest.mark.parametrize("offloaded", [["hidden", "out"], ["hidden"]])
def test_what_a_policy_sends_to_the_host_is_not_counted_on_the_device(offloaded):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        hidden = checkpoint_name(x @ w, "hidden")
        return x + jnp.tanh(checkpoint_name(jnp.sin(hidden) @ w, "out"))

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)

    args = [jax.ShapeDtypeStruct(size, jnp.float32) for size in [(6, 512, 512), (4096, 512)]]
    kept = jaxmem.plan(loss, *args, budget="10GiB", target="h100", regions="keep", compilations=1)
    assert kept.projected_bytes == pytest.approx(kept.compiled_bytes, rel=0.1)
    opened = jaxmem.plan(loss, *args, target="h100", compilations=0)
    assert opened.own_regions.written.bytes == kept.projected_bytes


def two_layers(x, weights):
    up, down = weights
    return x + jnp.tanh(jax.nn.gelu(jax.nn.gelu(x @ up) @ down))


def in_regions(x, weights):
    """Two layers, each in a region, in one."""
    inner = jax.checkpoint(two_layers)
    return jax.checkpoint(lambda x, weights: inner(inner(x, weights), weights))(x, weights)


def in_a_scan(x, weights):
    layer = jax.checkpoint(two_layers)
    return jax.lax.scan(lambda x, _: (layer(x, weights), None), x, length=3)[0]


def in_a_scan_in_a_region(x, weights):
    return jax.checkpoint(in_a_scan)(x, weights)


def plain_in_a_scan_in_a_region(x, weights):
    def turns(x, weights):
        return jax.lax.scan(lambda x, _: (two_layers(x, weights), None), x, length=3)[0]

    return jax.checkpoint(turns)(x, weights)


# Regions round scans, one after the other, are not among them: XLA runs all scans again at once.
NESTED = [
    (in_regions, False),
    (in_regions, True),
    (in_a_scan, False),
    (in_a_scan, True),
    (in_a_scan_in_a_region, True),
    (plain_in_a_scan_in_a_region, True),
]


@pytest.mark.parametrize(("layer", "scanned"), NESTED)
def test_what_regions_hold_is_counted_however_deep_they_lie(layer, scanned):
    if scanned and layer is in_regions and jax.__version_info__ >= (0, 12):
        pytest.xfail("the newest XLA has stacks of half as many bytes more in memory")

    def loss(stack, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, stack)
        else:
            for weights in stack:
                x = layer(x, weights)
        return jnp.mean(x**2)

    def shapes(*stacked):
        sizes = [(*stacked, 256, 1024), (*stacked, 1024, 256)]
        return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    args = shapes(4) if scanned else [shapes()] * 4, jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    kept = jaxmem.plan(loss, *args, budget="20GiB", target="h100", regions="keep", compilations=1)
    # All that a turn makes is taken to be there at once, which is a quarter too much at most here.
    assert 0.95 < kept.projected_bytes / kept.compiled_bytes < 1.25
