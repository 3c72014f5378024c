"""What the emitted regions keep, and derivatives that are taken once."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jaxmem
from jaxmem import jaxprs
from jaxmem.planning import Loop, Region
from jaxmem.program import read_program
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_facts import OwnRegions, Predicted
from jaxmem.rematerialization.traced import TracedFunction

PLANNERS = ["dp", "dots", "sqrt"]


def plan_of(fun, args, *regions, loops=(), keeps=False):
    leaves = [jaxprs.abstract(x) for x in args]
    program = read_program(jaxprs.flatten(fun, leaves, not keeps, merge=True))
    costs = Predicted(0, 0, program.flops, 0)
    own = OwnRegions(kept=keeps)
    return Plan("by hand", program.fingerprint, regions, tuple(loops), costs, own_regions=own)


def kept(fun, *args):
    """Shapes of the values that the backward pass needs, arguments apart."""
    found = jaxprs.saved_residuals(fun, args)
    return sorted(value.aval.shape for value in found if value.argument is None)


# ---- a rule that is not linear in the cotangent runs once


def gradient_clipping():
    @jax.custom_vjp
    def clip(x):
        return x * 1.0

    clip.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
    return clip


def sign_of_gradient():
    @jax.custom_vjp
    def sign(x):
        return jnp.tanh(x)

    sign.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.sign(g) * (1 + x**2),))
    return sign


def quantised_gradient():
    """As in fp8 training: the cotangent is scaled by its own largest element and rounded."""

    @jax.custom_vjp
    def quantise(x):
        return jnp.round(x * 8) / 8

    def backward(_, g):
        scale = jnp.max(jnp.abs(g)) / 7
        return (jnp.round(g / scale) * scale,)

    quantise.defvjp(lambda x: (jnp.round(x * 8) / 8, None), backward)
    return quantise


def rounding():
    return lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)


def straight_through():
    return lambda x: x + jax.lax.stop_gradient(jnp.round(x * 8) / 8 - x)


def reversal():
    @jax.custom_vjp
    def reverse(x):
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))
    return reverse


def own_transpose():
    """A linear function with a transpose of the user's own, in the rule of a custom_jvp."""

    @jax.custom_jvp
    def scaled(x):
        return jnp.sin(x)

    @scaled.defjvp
    def _(primals, tangents):
        call = jax.custom_derivatives.linear_call
        along = call(lambda c, t: c * t, lambda c, g: jnp.clip(c * g, -0.01, 0.01),
                     jnp.cos(*primals), *tangents)  # fmt: skip
        return scaled(*primals), along

    return scaled


def linear_call():
    def call(x):
        return jax.custom_derivatives.linear_call(
            lambda _, x: 2.0 * x, lambda _, g: jnp.clip(g, -0.01, 0.01), (), x
        )

    return call


RULES = [
    gradient_clipping, sign_of_gradient, quantised_gradient, straight_through, reversal,
    own_transpose, linear_call, rounding,
]  # fmt: skip


def two_readers(rule):
    """The value of the rule is read by two kernels, and by layers after them."""

    def loss(ws, x):
        h = rule(x @ ws[0])
        a, b = jnp.sin(h) @ ws[1], jnp.cos(h) @ ws[2]
        for w in ws[3:]:
            a, b = jnp.tanh(a @ w), jnp.tanh(b @ w)
        return jnp.sum((a - b) ** 2) + jnp.sum(h * 0.1)

    return loss


def in_a_scan(rule):
    def loss(ws, x):
        def body(h, w):
            h = rule(h @ w)
            return jnp.sin(h) @ w + jnp.cos(h) @ w, jnp.sum(h)

        h, sums = jax.lax.scan(body, x, jnp.stack(ws))
        return jnp.sum(h**2) + jnp.sum(sums)

    return loss


def under_jit(rule):
    return two_readers(jax.jit(rule))


def in_a_region(rule):
    return two_readers(jax.checkpoint(lambda x: rule(x) * 1.0))


@pytest.mark.parametrize("program", [two_readers, in_a_scan, under_jit, in_a_region])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_run_once(rule, program):
    loss = program(rule())
    ws = [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(6)]
    x = jnp.ones((4, 8))
    expected = jax.grad(loss, (0, 1))(ws, x)
    for planner in PLANNERS if program is two_readers else PLANNERS[:1]:
        actual = jax.grad(jaxmem.remat(loss, planner=planner), (0, 1))(ws, x)
        for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


# ---- names of saved values


def layers(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x


def test_an_outer_plan_does_not_keep_what_an_inner_one_saves():
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    program = read_program(jaxprs.flatten(layers, [w, x]))
    values = [value for kernel in program.kernels for value in kernel.results]
    inner = plan_of(layers, (w, x), Region(0, len(program.kernels), tuple(values)))

    def outer(w, x):
        y = jnp.sum(inner.apply(layers)(w, x), keepdims=True)
        for _ in range(max(values)):  # every number of a value inside is one of a value outside
            y = y @ jnp.ones((1, 1))
        return y[0, 0]

    whole = plan_of(outer, (w, x), keeps=True)
    outside = read_program(jaxprs.flatten(outer, [w, x]))
    everything = {*range(outside.input_count), *(v for k in outside.kernels for v in k.results)}
    assert everything.issuperset(values)
    whole = dataclasses.replace(
        whole, regions=(Region(0, len(outside.kernels), tuple(everything)),)
    )
    kept_outside = kept(whole.apply(outer), w, x)
    assert kept_outside.count((16, 8)) <= 1, kept_outside


def test_what_waits_for_a_region_keeps_nothing_that_nobody_needs():
    """A saved value waits for the turn of its region: it waited for what that reads first, though
    no derivative did. A GPT's attention kept queries, keys and values, and what they are cut
    from."""

    def loss(weights, x):
        first, frozen, *others = weights
        narrow = (x @ first) @ jax.lax.stop_gradient(frozen)
        for weight in others:
            narrow = jnp.tanh(narrow) @ weight
        return jnp.sum(narrow**2)

    sizes = 16, 48, 32, 24, 8
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(keys[at], sizes[at : at + 2]) for at in range(4)]
    args = weights, jax.random.normal(keys[4], (64, 16))
    program = TracedFunction(loss, args, {}, 0).program
    (saved,) = program.kernels[1].results
    inner = Region(1, 3, saved=(saved,))
    plan = plan_of(loss, args, Region(1, 5, saved=(saved,), regions=(inner,)))
    found = kept(plan.apply(loss), *args)
    assert (64, 32) in found
    assert (64, 48) not in found  # x @ first
    chex.assert_trees_all_close(
        jax.grad(plan.apply(loss))(*args), jax.grad(loss)(*args), rtol=1e-12
    )


def test_a_loop_does_not_keep_what_the_program_around_it_saves():
    """Values of a scan's body have numbers of their own."""

    def loss(w, x):
        def body(x, _):
            for _ in range(3):
                x = jnp.tanh(x @ w)
            return x, None

        y = jnp.sin(jax.lax.scan(body, x, length=5)[0] @ w)
        return jnp.sum(y @ w)

    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    program = read_program(jaxprs.flatten(loss, [w, x]))
    (scan,) = program.scans
    values = {value for kernel in program.kernels for value in kernel.results}
    region = Region(0, len(program.kernels), tuple(values - {program.kernels[scan].residuals}))
    plan = plan_of(loss, (w, x), region, loops=[Loop(scan)])
    assert (5, 16, 8) not in kept(plan.apply(loss), w, x)


# ---- cotangents that are not there


def test_values_whose_cotangents_are_absent():
    """A region's matmul reads parameters that are not differentiated, or whose result is dead."""

    def loss(w, frozen, x):
        h = jnp.tanh(x @ w)
        dead = jnp.mean(jnp.argmax(h @ frozen, -1) == 0)
        side = jnp.sin(jax.lax.stop_gradient(h) @ frozen)
        return jnp.sum(jnp.tanh(h @ w) * side), (dead, side @ w)

    w, frozen, x = (jax.random.normal(jax.random.key(i), (4, 4)) for i in range(3))
    count = len(read_program(jaxprs.flatten(loss, [w, frozen, x])).kernels)
    for first in range(count):
        for last in range(first + 1, count + 1, 3):
            planned = plan_of(loss, (w, frozen, x), Region(first, last)).apply(loss)
            for fun in (lambda f: jax.grad(f, has_aux=True)(w, frozen, x)[0],
                        lambda f: jax.grad(lambda w: f(w, frozen, x)[0])(w)):  # fmt: skip
                np.testing.assert_allclose(fun(planned), fun(loss), rtol=1e-10, atol=1e-12)


def test_cotangents_that_pass_together_may_be_absent():
    def fun(a, b, c):
        a, b, c = jaxprs.cotangent_barrier([a, b * 2, c])
        return jnp.sum(a), b, c

    x, whole = jnp.arange(3.0), jnp.arange(3)
    for wrapped in (fun, jax.checkpoint(fun), jax.jit(fun)):
        gradient = jax.grad(lambda *args: wrapped(*args)[0], (0, 1))(x, x, whole)  # noqa: B023
        np.testing.assert_array_equal(gradient[0], 1.0)
        np.testing.assert_array_equal(gradient[1], 0.0)


def test_arrays_that_a_custom_rule_closes_over():
    """They are constants of the program, and no region may take them for differentiated."""
    table = jnp.arange(64.0).reshape(16, 4) / 64
    rule = jax.custom_vjp(lambda x: x * table)
    rule.defvjp(lambda x: (x * table, None), lambda _, g: (g * table,))

    def loss(ws, x):
        for w in ws:
            x = x + rule(x @ w)
        return jnp.sum(x**2)

    ws, x = [jnp.eye(4)] * 4, jnp.ones((16, 4))
    for planner in PLANNERS:
        actual = jax.grad(jaxmem.remat(loss, planner=planner))(ws, x)
        for one, other in zip(actual, jax.grad(loss)(ws, x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.slow
def test_complex_values_are_saved():
    def loss(w, x):
        for _ in range(4):
            z = jnp.exp(1j * (x @ w))
            z = z * jnp.conj(z) + jnp.fft.fft(z) ** 2
            x = jnp.abs(z + 3)
        return jnp.sum(x)

    w, x = jnp.eye(4), jnp.ones((32, 4))
    program = read_program(jaxprs.flatten(loss, [w, x]))
    values = tuple(value for kernel in program.kernels for value in kernel.results)
    plan = plan_of(loss, (w, x), Region(0, len(program.kernels), values))
    np.testing.assert_allclose(jax.grad(plan.apply(loss))(w, x), jax.grad(loss)(w, x), rtol=1e-10)


# ---- inside shard_map


def scanned(w, x):
    def body(h, _):
        return jnp.tanh(h @ w), jnp.sum(jax.nn.relu(h))

    h, sums = jax.lax.scan(body, x, length=4)
    return jnp.sum(h**2) + jnp.sum(sums)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_scan_inside_shard_map(planner, check):
    """One device is enough: values vary over its axis all the same."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def sharded(fun):
        def local(w, x):
            return jax.lax.psum(fun(w, x), "data")

        specs = {"in_specs": (spec(), spec("data")), "out_specs": spec(), "check_vma": check}
        return jax.jit(jax.grad(jax.shard_map(local, mesh=mesh, **specs)))

    w, x = jax.random.normal(jax.random.key(0), (8, 8)), jnp.ones((4, 8))
    planned = sharded(jaxmem.remat(scanned, planner=planner))
    np.testing.assert_allclose(planned(w, x), sharded(scanned)(w, x), rtol=1e-12)


# ---- JAX's newer jax.checkpoint, and operations with parameters of any name


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def flag(request):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


def test_our_policy_saves_matmuls_and_convolutions(flag):
    policy = jaxmem.remat_policy(target="h200")

    def plain(w, k, x):
        x = jnp.sin(x @ w)
        return jnp.sin(jax.lax.conv(x.reshape(2, 64, 16, 16), k, (1, 1), "SAME")).sum()

    args = jnp.ones((256, 256)) / 256, jnp.ones((64, 64, 3, 3)) / 576, jnp.ones((128, 256))
    block = jax.checkpoint(plain, policy=policy)
    assert kept(block, *args) == [(2, 64, 16, 16), (128, 256)]
    gradients = (jax.grad(fun, (0, 1))(*args) for fun in (plain, block))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_plans_keep_what_they_save(flag):
    w, x = jnp.eye(8), jnp.ones((16, 8))
    program = read_program(jaxprs.flatten(layers, [w, x]))
    values = [value for kernel in program.kernels for value in kernel.results]
    nothing = plan_of(layers, (w, x), Region(0, len(program.kernels)))
    some = plan_of(layers, (w, x), Region(0, len(program.kernels), tuple(values[:3])))
    assert len(kept(nothing.apply(layers), w, x)) == 0
    assert 1 <= len(kept(some.apply(layers), w, x)) <= 3
    np.testing.assert_allclose(
        jax.grad(lambda w: some.apply(layers)(w, x).sum())(w),
        jax.grad(lambda w: layers(w, x).sum())(w), rtol=1e-12,
    )  # fmt: skip


def test_the_users_own_regions_are_known(flag):
    """To a policy for a loss, and to autocast."""

    def loss(w, x):
        for _ in range(4):
            x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w) @ w))(w, x)
        return jnp.sum(x**2)

    w, x = jnp.eye(256) / 2, jnp.ones((512, 256))
    policy = jaxmem.remat_policy(loss, w, x, budget="80MiB")
    assert policy(jax.lax.dot_general_p, *[jax.typeof(value) for value in (x, w)])
    np.testing.assert_allclose(
        jax.grad(jaxmem.remat(loss))(w, x), jax.grad(loss)(w, x), rtol=1e-9, atol=1e-12
    )
    assert jaxmem.plan(loss, w, x).own_regions.count == 4

    def scanned(w, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None))
        return jnp.sum(jax.lax.scan(body, x, jnp.stack([w] * 4))[0] ** 2)

    plan = jaxmem.plan(scanned, w, x)
    assert (
        plan.own_regions.count == 1 and plan.loops and plan.own_regions.written.recompute_flops > 0
    )
    np.testing.assert_allclose(
        jax.grad(plan.apply(scanned))(w, x), jax.grad(scanned)(w, x), rtol=1e-9, atol=1e-12
    )
    low = jax.grad(jaxmem.autocast(loss, "bf16"))(w, x)
    np.testing.assert_allclose(low, jax.grad(loss)(w, x), rtol=0.1, atol=1.0)


def test_parameters_of_an_operation_may_have_any_name():
    """Equinox's operations have one that is called ``prim``."""
    add = Primitive("add_with_prim")
    add.def_impl(lambda x, *, prim: x + 1)
    add.def_abstract_eval(lambda x, *, prim: x)
    ad.deflinear2(add, lambda cotangent, x, **_: [cotangent])
    mlir.register_lowering(add, lambda ctx, x, **_: [x])

    def loss(w, x):
        for _ in range(4):
            x = add.bind(jnp.tanh(x @ w), prim=1)
        return jnp.sum(x)

    w, x = jnp.eye(8), jnp.ones((16, 8))
    for planner in PLANNERS:
        planned = jax.grad(jaxmem.remat(loss, planner=planner))
        np.testing.assert_allclose(planned(w, x), jax.grad(loss)(w, x), rtol=1e-12)
    count = len(read_program(jaxprs.flatten(loss, [w, x])).kernels)
    planned = jax.grad(plan_of(loss, (w, x), Region(0, count)).apply(loss))
    np.testing.assert_allclose(planned(w, x), jax.grad(loss)(w, x), rtol=1e-12)
    policy = jax.checkpoint(loss, policy=jaxmem.remat_policy(target="h200"))
    np.testing.assert_allclose(jax.grad(policy)(w, x), jax.grad(loss)(w, x), rtol=1e-12)


def test_a_rule_that_refuses_to_be_traced():
    """As Equinox's, of tangents that are not differentiated: such a rule is never copied."""

    @jax.custom_jvp
    def refusing(x, table):
        return jnp.sin(x) * table

    @functools.partial(refusing.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        if not jaxprs.is_zero(tangents[1]):
            raise RuntimeError("Unexpected tangent")
        x, table = primals
        return refusing(x, table), jnp.cos(x) * table * tangents[0]

    table = jnp.ones((16, 8)) / 2

    def loss(w, x):
        for _ in range(4):
            h = refusing(x @ w, table)
            x = jnp.tanh(h) @ w + h
        return jnp.sum(x)

    w, x = jnp.eye(8), jnp.ones((16, 8))
    for planner in PLANNERS:
        planned = jax.grad(jaxmem.remat(loss, planner=planner))
        np.testing.assert_allclose(planned(w, x), jax.grad(loss)(w, x), rtol=1e-10)


ROWS = jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)
NUMBERS = jnp.array([2, 0, 1])
OF_ARRAYS = {
    "picked by numbers": lambda x: x + ROWS[NUMBERS].sum(),
    "picked": lambda x: x + ROWS[(x[:, 0] > 0).astype(int)],
    "picks": lambda x: x + x[NUMBERS].sum(),
    "concatenated": lambda x: x + jnp.concatenate([ROWS, ROWS]).sum(),
    "joined": lambda x: x + jnp.concatenate([x, ROWS]).sum(),
    "multiplied": lambda x: x * ROWS[:1] + x @ ROWS[:4],
    "divides": lambda x: (ROWS[:1] + 3) / (x + 3) + x / (ROWS[:1] + 3),
    "chosen": lambda x: jnp.where(ROWS[:1] > 0, x, jnp.where(x > 0, ROWS[:1], x)),
    "sliced": lambda x: x + jax.lax.dynamic_slice(ROWS, ((x[0, 0] > 0).astype(int), 0), (1, 4)),
    "written to": lambda x: x + ROWS.at[:1].set(x[:1]).sum(),
    "sorted": lambda x: x + jnp.sort(ROWS, 0)[:1],
    "looped over": lambda x: jax.lax.scan(lambda c, t: (c * t[None], None), x, ROWS)[0],
}


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arrays_that_a_jitted_function_closes_over(name, call):
    """They are literals where calls are written in place: operands that are no values."""
    called = call(OF_ARRAYS[name])

    def loss(w, x):
        return jnp.sum(jax.jit(called)(jnp.tanh(jax.jit(called)(x @ w) @ w)) ** 2)

    w, x = jnp.eye(4) + 0.1, jnp.linspace(0.0, 1.0, 12).reshape(3, 4)
    expected = jax.grad(loss)(w, x)
    for planner in PLANNERS:
        for regions in ("open", "keep"):
            actual = jax.grad(jaxmem.remat(loss, planner=planner, regions=regions))(w, x)
            np.testing.assert_allclose(actual, expected, rtol=1e-10)


@pytest.mark.slow
def test_a_plan_holds_where_arrays_of_numpy_are_closed_over():
    """They were tracers where the function was traced in another trace, and another program."""
    table = np.cos(np.arange(16.0)).reshape(4, 4)

    def loss(w, x):
        y = jnp.tanh(x @ w) + jnp.asarray(table)[(x[0, 0] > 0).astype(int)][None]
        y = jax.lax.cond(jnp.sum(y) > 0, lambda a: jnp.sin(a) * jnp.asarray(table), jnp.cos, y)
        step = lambda c, _: (jnp.maximum(c @ w, jnp.asarray(table)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, y, length=2)[0])

    w, x = jnp.eye(4) + 0.1, jnp.ones((4, 4))
    expected = jax.grad(loss)(w, x)
    for planner in PLANNERS:
        planned = jax.grad(jaxmem.plan(loss, w, x, planner=planner).apply(loss))
        for called in (planned, jax.jit(planned), jax.jit(jax.jit(planned))):
            np.testing.assert_allclose(called(w, x), expected, rtol=1e-10)


def test_a_scan_over_a_rule_that_closes_over_an_array():
    table = jnp.arange(64.0).reshape(16, 4) / 64
    rule = jax.custom_vjp(lambda x: x * table)
    rule.defvjp(lambda x: (x * table, None), lambda _, g: (g * table,))

    def loss(ws, x):
        def inner(x, w):
            return jax.checkpoint(lambda x, w: x + rule(x @ w))(x, w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, ws)[0], jnp.sum(rule(x))

        x, sums = jax.lax.scan(outer, x, length=2)
        return jnp.sum(x**2) + jnp.sum(sums)

    ws, x = jnp.stack([jnp.eye(4)] * 4), jnp.ones((16, 4))
    for planner in PLANNERS:
        actual = jax.grad(jaxmem.remat(loss, planner=planner))(ws, x)
        np.testing.assert_allclose(actual, jax.grad(loss)(ws, x), rtol=1e-10)
