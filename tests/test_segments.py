"""Regions as their author would write them: no plan loses to one line of `jax.checkpoint`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.planning import per_block_layouts
from jaxmem.planning.repeating import _Repeating
from jaxmem.rematerialization import Constraints, TracedFunction
from jaxmem.rematerialization.plan import Plan

POLICIES = {
    "nothing": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(up, down, x):
    return jax.nn.gelu(x @ up) @ down


def tower(layer, params, x):
    for up, down in params:
        x = layer(up, down, x)
    return x


def layers(count, width=256):
    return [(f32(width, 4 * width), f32(4 * width, width))] * count


def multiplied(wrap):
    """Two towers whose ends are multiplied: the last sum of each is in no kernel of its block."""
    layer = wrap(lambda up, down, x: x + jnp.tanh(mlp(up, down, x)))

    def loss(params, x, y):
        return jnp.mean(tower(layer, params[0], x) * tower(layer, params[1], y))

    return loss, ([layers(3)] * 2, f32(8192, 256), f32(8192, 256))


def contrasted(wrap):
    """Two towers whose ends are compared with one another."""
    layer = wrap(mlp)

    def ends(params, x):
        x = tower(lambda up, down, x: x + layer(up, down, x), params, x)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params, x, y):
        scores = ends(params[0], x) @ ends(params[1], y).T * 20
        each = [jnp.diag(jax.nn.log_softmax(one)) for one in (scores, scores.T)]
        return -jnp.mean(each[0] + each[1])

    return loss, ([layers(4)] * 2, f32(4096, 256), f32(4096, 256))


def taught(wrap):
    """A student beside its teacher."""
    net = functools.partial(tower, wrap(lambda up, down, x: x + mlp(up, down, x)))

    def loss(params, teacher, x):
        return jnp.mean((net(params, x) - jax.lax.stop_gradient(net(teacher, x + 1))) ** 2)

    return loss, (layers(5), layers(5), f32(4096, 256))


@jax.custom_vjp
def activation(x):
    return jax.nn.gelu(x)


def _back(x, g):
    gate = jax.nn.sigmoid(1.7 * x)
    return (g * gate * (1 + 1.7 * x * (1 - gate)),)


activation.defvjp(lambda x: (jax.nn.gelu(x), x), _back)


def own_rule(wrap):
    layer = wrap(lambda up, down, x: activation(x @ up) @ down)

    def loss(params, x):
        x = tower(lambda up, down, x: x + layer(up, down, x), params, x)
        return jnp.mean(x**2)

    return loss, (layers(6), f32(8192, 256))


def headed(wrap):
    """A head behind each layer, outside of what is wrapped."""
    layer = wrap(lambda up, down, x: x + mlp(up, down, x))

    def loss(params, heads, x):
        total = 0.0
        for (up, down), head in zip(params, heads, strict=True):
            x = layer(up, down, x)
            total += jnp.mean(jax.nn.logsumexp(x @ head, -1))
        return total

    return loss, (layers(5), [f32(256, 1024)] * 5, f32(4096, 256))


def pointwise(wrap):
    @wrap
    def layer(x, scale):
        for _ in range(4):
            x = jax.nn.softplus(x * scale + 0.1)
        return x

    def loss(scales, x):
        for at in range(6):
            x = layer(x, scales[at])
        return jnp.mean(x**2)

    return loss, (f32(6), f32(2**20))


def skipped(wrap):
    """From one end to the other, as a U-Net does: the second half adds what the first handed on."""
    layer = wrap(lambda up, down, x: x + activation(x @ up) @ down)

    def loss(params, x):
        passed = []
        for up, down in params[:4]:
            x = layer(up, down, x)
            passed.append(x)
        for up, down in params[4:]:
            x = layer(up, down, x + passed.pop())
        return jnp.mean(x**2)

    return loss, (layers(8), f32(4096, 256))


def transformed(wrap):
    """Complex numbers inside of each layer."""

    @wrap
    def layer(up, down, x):
        x = jnp.fft.fft(jax.lax.complex(x @ up, x @ up * jnp.sin(x @ up)))
        return activation((x * jnp.exp(1j * x.real)).real) @ down

    def loss(params, x):
        x = tower(lambda up, down, x: x + layer(up, down, x), params, x)
        return jnp.mean(x**2)

    return loss, (layers(5, 128), f32(4096, 128))


def sliced(wrap):
    """What a layer hands on is computed in the kernel of the next one."""

    @wrap
    def layer(kernel, x):
        return jax.nn.silu(x @ kernel)[:, ::2]

    def loss(kernels, x):
        for kernel in kernels:
            x = layer(kernel, x)
        return jnp.mean(x**2)

    return loss, ([f32(256, 512)] * 6, f32(4096, 256))


CASES = [
    (multiplied, "nothing"),
    (contrasted, "dots"),
    (taught, "nothing"),
    (taught, "dots"),
    (own_rule, "nothing"),
    (headed, "dots"),
    (pointwise, "nothing"),
    (skipped, "nothing"),
    (skipped, "dots"),
    (sliced, "dots"),
    (transformed, "nothing"),
]


def test_blocks_end_where_the_least_crosses_of_all_of_them():
    """Of skips, after the sum: from one block to the next as much crosses before it, too. What is
    before the first cut is of the row before it, and the last block has nothing of the loss."""
    plain, args = skipped(lambda layer: layer)
    steps = jaxmem.jaxprs.flatten(plain, args).steps
    (row,) = {
        tuple((one.start, one.stop) for one in plan.segments) for plan in written(plain, args)
    }
    names = [[step.primitive for step in steps[start:stop]] for start, stop in row]
    found = [(one.count("dot_general"), one.count("add"), len(one)) for one in names]
    assert found == [(2, 1, 4)] * 3 + [(2, 2, 5)] * 4 + [(2, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "policy"), CASES)
def test_a_plan_fits_where_one_line_does_and_recomputes_no_more(program, policy):
    by_hand, args = program(POLICIES[policy])
    plain, _ = program(lambda layer: layer)
    one_line = jaxmem.memory(jax.jit(jax.value_and_grad(by_hand)), *args, target="h100")
    plan = jaxmem.plan(plain, *args, budget=one_line.device, target="h100")
    assert plan.compiled_bytes <= one_line.device
    assert plan.compiled.flops <= 1.002 * one_line.work.flops


def written(fun, args, **options):
    """The plans of a function that are rows of segments."""
    traced = TracedFunction(fun, args, {}, **{"argnums": 0, **options})
    constraints = Constraints.parse(None, 0, "h100", "dp")
    planner = constraints.planner(traced.program)
    program = constraints.as_run(traced.program)
    for layout in per_block_layouts(planner, program, constraints.rates):
        if layout.segments:
            yield constraints.write(traced.program, layout, planner.plain)


def test_a_row_compiles_to_what_the_line_takes():
    plain, args = multiplied(lambda layer: layer)
    plans = {plan.segments[0].policy: plan for plan in written(plain, args)}
    names = {"nothing_saveable": "nothing", "dots_saveable": "dots"}
    assert {*plans} == {*names}
    for name, plan in plans.items():
        wrap = POLICIES[names[name]]
        line, row = (
            jaxmem.memory(jax.jit(jax.value_and_grad(fun)), *args, target="h100")
            for fun in (multiplied(wrap)[0], plan.apply(plain))
        )
        assert (row.device, row.work.flops) == (line.device, line.work.flops)


def convolved(wrap):
    """What one line saves of convolutions is their results, where it is said to."""
    form = jax.lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))

    @wrap
    def layer(kernel, x):
        return jnp.tanh(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=form)
        )

    def loss(kernels, x):
        for kernel in kernels:
            x = layer(kernel, x)
        return jnp.mean(x**2)

    return loss, ([f32(3, 3, 32, 32)] * 6, f32(16, 32, 32, 32))


def test_convolutions_are_saved_by_the_policy_that_is_named():
    plain, args = convolved(lambda layer: layer)
    plans = [*written(plain, args)]
    assert {plan.segments[0].policy for plan in plans} == {"nothing_saveable", "dots_saveable"}
    for plan in plans:
        policy = getattr(jax.checkpoint_policies, plan.segments[0].policy)
        by_hand, _ = convolved(functools.partial(jax.checkpoint, policy=policy))
        line, row = (
            jaxmem.memory(jax.jit(jax.value_and_grad(fun)), *args, target="h100")
            for fun in (by_hand, plan.apply(plain))
        )
        assert (row.device, row.work.flops) == (line.device, line.work.flops)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_come_in_order_and_none_is_empty(seed):
    """Whatever repeats in whatever is repeated."""
    rng = np.random.default_rng(seed)

    def made(depth):
        if depth == 3 or rng.random() < 0.3:
            return rng.integers(0, 6, rng.integers(1, 5)).tolist()
        return [
            one for _ in range(rng.integers(1, 4)) for one in made(depth + 1) * rng.integers(1, 5)
        ]

    for _ in range(20):
        signature = np.array(made(0))[:150]
        price = np.concatenate([[0], np.cumsum(rng.integers(0, 3, len(signature)))]).astype(float)
        crossing = rng.integers(0, 5, len(signature) + 1)
        for part, finer in ((0, False), (1.2, False), (np.inf, False), (0, True)):
            found = _Repeating(signature, price, crossing, part, finer)
            spans = list(found.between(0, len(signature), 0.0))
            bounds = [bound for span in spans for bound in span]
            assert bounds == sorted(bounds) and all(start < stop for start, stop in spans)


def test_complex_programs_are_planned():
    """JAX cannot save complex matmuls of a region: no rows of a policy that does."""

    def loss(params, x):
        for up, down in params:
            hidden = x @ up
            x = x + hidden * jnp.tanh(jnp.abs(hidden)) @ down
        return jnp.mean(jnp.abs(x) ** 2)

    def c64(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.complex64)

    args = [(c64(256, 1024), c64(1024, 256))] * 5, c64(4096, 256)
    assert {one.policy for plan in written(loss, args) for one in plan.segments} == {
        "nothing_saveable"
    }
    plain = jaxmem.memory(jax.jit(jax.value_and_grad(loss)), *args, target="h100").device
    plan = jaxmem.plan(loss, *args, budget=plain // 2, target="h100")
    assert plan.compiled_bytes <= plain // 2


def many(params, x, key, flag):
    """Keys, conditionals, loops, rules of its own, integers, and two results."""
    for at, (up, down) in enumerate(params):
        key, one = jax.random.split(key)
        hidden = activation(x @ up) * jax.random.bernoulli(one, 0.5, (x.shape[0], up.shape[1]))
        x = x + jax.lax.cond(flag > at, jnp.tanh, lambda h: 2 * h, hidden @ down)
        x = jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x)
    return jnp.sum(x**2), (x, jnp.argmax(x), key)


@pytest.mark.slow
def test_values_and_derivatives_are_those_of_the_function():
    keys = jax.random.split(jax.random.key(0), 9)
    params = [
        (jax.random.normal(keys[at], (8, 12)), jax.random.normal(keys[at + 4], (12, 8)))
        for at in range(4)
    ]
    args = params, jax.random.normal(keys[8], (6, 8)), keys[0], jnp.int32(2)
    plans = [*written(many, args, has_aux=True)]
    assert len(plans) >= 2

    def along(fun):
        def loss(params):
            return fun(params, *args[1:])[0]

        return jax.jvp(jax.grad(loss), (params,), (params,))

    (expected, (x, at, key)), gradient = jax.value_and_grad(many, has_aux=True)(*args)
    for plan in plans:
        planned = Plan.from_json(plan.to_json()).apply(many)
        for run in (lambda fun: fun, jax.jit):
            found = run(jax.value_and_grad(planned, has_aux=True))(*args)
            (value, (other_x, other_at, other_key)), other = found
            np.testing.assert_allclose(value, expected, rtol=1e-12)
            np.testing.assert_allclose(other_x, x, rtol=1e-12)
            assert other_at == at and other_key == key
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), other, gradient)
        for one, other in zip(
            jax.tree.leaves(along(many)), jax.tree.leaves(along(planned)), strict=True
        ):
            np.testing.assert_allclose(other, one, rtol=1e-9)


def test_regions_are_where_blocks_are():
    """As many as there are layers; with a head behind each, up to the head too."""
    plain, args = headed(lambda layer: layer)
    rows = {tuple((one.start, one.stop) for one in plan.segments) for plan in written(plain, args)}
    five = sorted((row for row in rows if len(row) == 5), key=lambda row: row[0][1])
    assert len(five) == 2
    (shorter, whole), steps = five, jaxmem.jaxprs.flatten(plain, args).steps
    assert all(a == c and b < d for (a, b), (c, d) in zip(shorter, whole, strict=True))
    matmuls = [
        sum(step.primitive == "dot_general" for step in steps[start:stop])
        for row in five
        for start, stop in row
    ]
    assert matmuls == [2] * 5 + [3] * 5


@pytest.mark.parametrize("program", [multiplied, own_rule])
def test_a_fitted_step_fits_where_one_line_does_and_recomputes_no_more(program):
    def step_of(wrap):
        loss, (params, *batch) = program(wrap)
        return lambda params, batch: loss(params, *batch), params, batch

    by_hand, params, batch = step_of(jax.checkpoint)
    step = jaxmem.train_step(by_hand, optax.sgd(0.1))
    one_line = step.memory(step.abstract(params), batch, target="h100")
    loss, _, _ = step_of(lambda layer: layer)
    found = jaxmem.fit(
        loss, optax.sgd(0.1), params, batch,
        target="h100", budget=one_line.device, keep=("batch", "placement"),
    )  # fmt: skip
    fitted = found.memory(found.abstract(params), batch, target="h100")
    assert fitted.device <= one_line.device
    assert fitted.work.flops <= one_line.work.flops
