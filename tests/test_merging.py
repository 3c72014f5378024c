"""What a function has twice is planned, and run, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import Mesh, PartitionSpec

import jaxmem
from jaxmem import jaxprs

ROWS, WIDTH, CLASSES = 512, 256, 2048


def losses(weights, x, labels):
    """A cross-entropy that writes its logits down twice."""
    picked = jnp.take_along_axis(x @ weights, labels[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(x @ weights, -1) - picked)


def in_a_row(part):
    return lambda weights, x, labels: part(weights, x, labels)


def in_a_map(part):
    def loss(weights, x, labels):
        pieces = x.reshape(4, -1, WIDTH), labels.reshape(4, -1)
        return jax.lax.map(lambda piece: part(weights, *piece), pieces).mean()

    return loss


def on_each_device(part):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def run(weights, x, labels):
        return jax.lax.pmean(part(weights, x, labels), "data")

    rows = PartitionSpec("data")
    specs = (PartitionSpec(), rows, rows)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


def in_a_loop(part):
    def loss(weights, x, labels):
        def turn(at, total):
            return total + part(weights, x * (1.0 + at), labels)

        return jax.lax.fori_loop(0, 3, turn, 0.0)

    return loss


PLACES = [in_a_row, in_a_map, on_each_device, in_a_loop]


@pytest.mark.parametrize("place", PLACES)
def test_a_matmul_that_is_there_twice_runs_once_more_at_most(place):
    plain = place(losses)
    by_hand = place(jax.checkpoint(losses))
    shapes = [
        jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    ]

    def compiled(fun, **options):
        step = jax.jit(jax.value_and_grad(fun), **options)
        return jaxmem.memory(step, *shapes, target="h100", timeline=False)

    hand = compiled(by_hand)
    plan = jaxmem.plan(plain, *shapes, target="h100", budget=hand.device)
    planned = compiled(plan.apply(plain), compiler_options=plan.compiler_options)
    assert planned.device <= hand.device
    assert planned.work.flops <= hand.work.flops


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "planner", ["dp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dots", "sqrt"))]
)
def test_gradients_are_those_of_the_function_as_it_is_written(place, planner):
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 2)
        weights = jax.random.normal(keys[0], (WIDTH, 16), jnp.float64) / 16
        x = jax.random.normal(keys[1], (32, WIDTH), jnp.float64)
        labels = jnp.arange(32) % 16
        fun = place(losses)
        planned = jaxmem.plan(fun, weights, x, labels, planner=planner).apply(fun)
        expected = jax.value_and_grad(fun, (0, 1))(weights, x, labels)
        found = jax.jit(jax.value_and_grad(planned, (0, 1)))(weights, x, labels)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


def flattened(fun, *args):
    return jaxprs.flatten(fun, args, merge=True)


def test_what_differs_in_a_parameter_a_literal_or_a_dtype_stays_apart():
    x = jnp.arange(6.0).reshape(2, 3)
    key = jax.random.key(0)

    def fun(x, key):
        return (
            (x.sum(0), x.sum(1), x.sum((0, 1))),
            (x + 1.0, x + 2.0, x - 1.0, x + jnp.nan),
            (x.astype(jnp.bfloat16), x.astype(jnp.float16)),
            (jax.random.bits(key, (3,)), jax.random.bits(key, (4,))),
            (jnp.zeros((2,)), jnp.zeros((3,)), jnp.ones((2,)), jnp.zeros((2,), jnp.int32)),
            (jax.lax.rev(x, (0,)), jax.lax.rev(x, (1,))),
        )

    flat = flattened(fun, x, key)
    values = dict(enumerate([*flat.consts, x, key]))
    flat.run(flat.steps, values)
    found = [jaxprs.read(values, output) for output in flat.outputs]
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.leaves(fun(x, key)))


# Pairs that Python takes for equal, or that print alike.
NUMBERS = [(0.0, -0.0), (1, 1.0), (True, 1), (float("nan"), -float("nan"))]


def of_one_number(number):
    return lambda x: jnp.copysign(x, number) + jnp.arctan2(0.0 * x, jnp.where(x > 9, x, number))


KEPT_OR_SQRT = [{"planner": "sqrt"}, {"regions": "keep"}]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("place", ["flat", "scan", "calls"])
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in KEPT_OR_SQRT)],
)
def test_numbers_that_differ_in_a_bit_or_in_their_type_stay_apart(numbers, place, options):
    first, second = map(of_one_number, numbers)
    if place == "calls":
        first, second = jax.jit(first), jax.jit(second)

    def both(x):
        y = jnp.sin(x @ jnp.eye(3)) + 2.0
        return first(y) - 3.0 * second(y)

    def loss(x):
        if place == "scan":
            return jnp.sum(jax.lax.scan(lambda c, _: (both(c), c.sum()), x, length=6)[0])
        return jnp.sum(both(x))

    x = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    planned = jaxmem.plan(loss, x, **options).apply(loss)
    expected, found = (jax.jit(jax.value_and_grad(one))(x) for one in (loss, planned))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_numbers_in_parameters_stay_apart_too():
    x = jnp.ones((3,))

    def fun(x):
        return [jax.lax.pad(x, number, [(1, 1, 0)]) for number in (0.0, -0.0)]

    zeros = [step for step in flattened(fun, x).steps if step.primitive == "pad"]
    assert len(zeros) == 2


def test_traced_values_that_print_alike_stay_apart():
    """Numbers that rules of the user's close over, inside of another transformation."""

    def inside(one, other):
        @jax.custom_jvp
        def times_one(x):
            return x * one

        @jax.custom_jvp
        def times_other(x):
            return x * other

        times_one.defjvp(lambda primals, tangents: (primals[0] * one, tangents[0] * one))
        times_other.defjvp(lambda primals, tangents: (primals[0] * other, tangents[0] * other))

        def loss(x):
            return jnp.sum(times_one(jnp.sin(x)) - times_other(jnp.sin(x)))

        return jax.grad(jaxmem.remat(loss))(jnp.ones(3))

    found = jax.jit(inside)(2.0, 5.0)
    np.testing.assert_allclose(found, -3.0 * np.cos(1.0) * np.ones(3), rtol=1e-6)


def test_what_is_the_same_is_there_once_in_calls_too():
    def fun(x, w):
        return jnp.tanh(x @ w) + jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w) * jnp.sin(x @ w)

    flat = flattened(fun, jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert [step.primitive for step in flat.steps].count("dot_general") == 1
    assert [step.primitive for step in flat.steps].count("tanh") == 1


def test_what_has_passed_a_barrier_or_has_effects_stays_apart():
    def fun(x):
        again = jax.lax.optimization_barrier(x)
        jax.debug.print("{x}", x=x)
        jax.debug.print("{x}", x=x)
        return jnp.sin(x) + jnp.sin(again) + jax.lax.optimization_barrier(x)

    names = [step.primitive for step in flattened(fun, jnp.ones(3)).steps]
    assert (names.count("sin"), names.count("optimization_barrier")) == (2, 2)
    assert sum("print" in name or "callback" in name for name in names) == 2


def test_regions_of_the_users_own_are_counted_where_they_begin_with_what_is_there_already():
    def fun(x, w):
        y = x @ w
        z = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)(x, w)
        return (y + z).sum()

    args = jnp.ones((4, 4)), jnp.ones((4, 4))
    flat = jaxprs.flatten(fun, args, open_regions=True, merge=True)
    ((start, stop),) = flat.regions
    assert [step.primitive for step in flat.steps[start:stop]] == ["tanh", "dot_general"]
    plan = jaxmem.plan(fun, *args)
    expected, found = jax.grad(fun)(*args), jax.grad(plan.apply(fun))(*args)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def clipped_along(x):
    return x * 1.0


@clipped_along.defjvp
def _(primals, tangents):
    def forward(_, t):
        return t

    def backward(_, g):
        return jnp.clip(g, -0.1, 0.1)

    along = jax.custom_derivatives.linear_call(forward, backward, (), tangents[0])
    return primals[0] * 1.0, along


def rounded(x):
    return jax.lax.reduce_precision(x, 5, 2)


def in_a_byte(x):
    return x.astype(jnp.float8_e5m2).astype(x.dtype)


def solved(x):
    """A solver whose transposed one stops where it likes."""

    def inverse(_, b):
        return b / 2.0

    def clipped(_, b):
        return jnp.clip(b / 2.0, -0.05, 0.05)

    return jax.lax.custom_linear_solve(lambda x: 2.0 * x, x, inverse, clipped)


def primitive_of(name):
    one = Primitive(name)
    one.def_impl(lambda x: x)
    one.def_abstract_eval(lambda x: x)
    mlir.register_lowering(one, lambda _, x: [x])
    return one


def transposed(x):
    return TRANSPOSED.bind(x)


def moved_along(x):
    return MOVED_ALONG.bind(x)


# Rules of the user's own that helpers of JAX hold.
TRANSPOSED, MOVED_ALONG = primitive_of("transposed"), primitive_of("moved_along")
ad.deflinear2(TRANSPOSED, lambda g, _: [jnp.clip(g, -0.1, 0.1)])
ad.defjvp(MOVED_ALONG, lambda t, _: TRANSPOSED.bind(t))


def in_a_branch(rule):
    return lambda x: jax.lax.cond(x[0] > -1.0, rule, jnp.sin, x)


def in_a_scan(rule):
    return lambda x: jax.lax.scan(lambda x, _: (rule(x), None), x, length=2)[0]


@pytest.mark.parametrize(
    "inside",
    [
        lambda rule: rule,
        pytest.param(jax.checkpoint, marks=pytest.mark.slow),
        pytest.param(in_a_branch, marks=pytest.mark.slow),
        in_a_scan,
    ],
)
@pytest.mark.parametrize(
    "rule", [clipped, clipped_along, rounded, in_a_byte, solved, transposed, moved_along]
)
def test_a_rule_that_is_not_linear_acts_on_each_cotangent(rule, inside):
    """And not on their sum, where the same is computed twice: it need not be the same."""
    shared = jax.jit(inside(rule))  # one program, called twice

    def loss(x):
        y = jnp.sin(x)
        return jnp.sum(3.3 * shared(y)) + jnp.sum(jnp.cos(5.7 * shared(y)))

    x = jnp.linspace(0.1, 1.0, 4)
    expected = jax.grad(loss)(x)
    for planned in (jaxmem.remat(loss), jaxmem.remat(loss, regions="keep")):
        np.testing.assert_allclose(jax.grad(planned)(x), expected, rtol=1e-13)
        np.testing.assert_allclose(jax.jit(jax.grad(planned))(x), expected, rtol=1e-13)


def test_a_plan_is_one_of_its_program_once_names_have_been_emitted():
    """What is merged does not depend on what was planned before."""
    named = jax.jit(lambda x: checkpoint_name(jnp.sin(x), "part"))

    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
            x = named(x) * named(x)
        return jnp.sum(x)

    w, x = jnp.eye(4), jnp.linspace(0.1, 1.0, 12).reshape(3, 4)
    plan = jaxmem.plan(loss, w, x)
    jaxprs.named(x, "another")
    np.testing.assert_allclose(jax.grad(plan.apply(loss))(w, x), jax.grad(loss)(w, x), rtol=1e-12)
    assert jaxmem.plan(loss, w, x).fingerprint == plan.fingerprint


@pytest.mark.parametrize("parts", [jnp.unstack, list], ids=["unstack", "by index"])
def test_looking_for_what_is_alike_takes_no_longer_for_many_parts_of_one_array(parts, monkeypatch):
    """All slices of an array read the same: parameters are looked at once, and not by pairs."""
    looks = []
    compare = jaxprs.merging._same

    def counted(value):
        looks[-1] += 1
        return compare(value)

    monkeypatch.setattr(jaxprs.merging, "_same", counted)
    for count in (50, 200):
        looks.append(0)
        jaxprs.flatten(
            lambda x: jnp.stack([jnp.sin(one) for one in parts(jnp.tanh(x))]),
            [jnp.ones((count, 3))],
            merge=True,
        )
    assert looks[1] < 5 * looks[0]
