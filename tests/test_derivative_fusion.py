"""What is recomputed for derivatives alone is made with them: projections of layers, by hand and
planned, against what XLA compiles."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from projections import planned_and_compiled

import jaxmem
from jaxmem import rematerialization
from jaxmem.planning import derivative_fusion, simulate_block
from jaxmem.planning.events import Event
from jaxmem.program import apply_compiler_rules
from jaxmem.rematerialization.traced import TracedFunction

LAYERS, ROWS, WIDTH = 4, 16, 512
HEADS, LENGTH = 8, 512


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def network(function):
    """A layer of two matmuls with a function between them, four times as wide as the layer."""

    def layer(x, weights):
        inner, outer = weights
        return x + function(x @ inner) @ outer

    return layer, (array(LAYERS, WIDTH, 8192), array(LAYERS, 8192, WIDTH)), array(8192, WIDTH)


def attention(kind):
    """A layer of attention whose scores are much larger than the layer."""

    def attended(query, key, value):
        if kind == "causal":
            return jax.nn.dot_product_attention(query, key, value, is_causal=True)
        if kind == "groups":
            key, value = (x[:, :, ::4] for x in (key, value))
            return jax.nn.dot_product_attention(query, key, value)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8
        if kind == "softmax in float32":
            scores = scores.astype(jnp.float32)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)

    def layer(x, weights):
        heads = (x @ each for each in weights[:3])
        heads = (each.reshape(*each.shape[:2], HEADS, -1) for each in heads)
        return x + attended(*heads).reshape(x.shape) @ weights[3]

    width = HEADS * 32
    return layer, array(LAYERS, 4, width, width), array(ROWS, LENGTH, width)


def loss(layer, in_a_loop, weights, x):
    if in_a_loop:
        x, _ = jax.lax.scan(lambda x, each: (layer(x, each), None), x, weights)
    else:
        for at in range(LAYERS):
            x = layer(x, jax.tree.map(lambda each, at=at: each[at], weights))
    return jnp.sum(x.astype(jnp.float32) ** 2)


NETWORKS = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def relative_error(plan) -> float:
    return plan.projected_bytes / plan.compiled_bytes - 1


@pytest.mark.parametrize("in_a_loop", [True, False])
@pytest.mark.parametrize("name", ["gelu", *map(slow, ("relu", "silu"))])
def test_a_function_between_matmuls_is_made_with_its_derivative(name, in_a_loop):
    """Three arrays of it were projected, once four, where XLA has two."""
    layer, *args = network(NETWORKS[name])
    fun = functools.partial(loss, jax.checkpoint(layer), in_a_loop)
    plan = jaxmem.plan(fun, *args, budget="60GiB", target="h100", regions="keep", compilations=1)
    assert abs(relative_error(plan)) < 0.06


ATTENTION = {
    "plain": (-0.05, 0.05),
    "softmax in float32": (-0.05, 0.05),
    "causal": (-0.08, 0.05),
    # XLA copies scores into the orders of matmuls, at the peak or not.
    "groups": (-0.05, 0.2),
}


@pytest.mark.parametrize("in_a_loop", [True, slow(False)])
@pytest.mark.parametrize("kind", ["plain", *map(slow, list(ATTENTION)[1:])])
def test_regions_of_attention_by_hand(kind, in_a_loop):
    """A fifth to two fifths too few were projected: cotangents inside of a region of its author's
    were not counted, nor that rows of scores are summed where their cotangent is written."""
    layer, *args = attention(kind)
    fun = functools.partial(loss, jax.checkpoint(layer), in_a_loop)
    plan = jaxmem.plan(fun, *args, budget="60GiB", target="h100", regions="keep", compilations=1)
    least, most = ATTENTION[kind]
    assert least < relative_error(plan) < most


@pytest.mark.parametrize("share", [0.35, slow(0.5), slow(0.8)])
@pytest.mark.parametrize("kind", ["plain", slow("softmax in float32"), slow("causal")])
def test_plans_of_scans_over_attention(kind, share):
    """Saved rows part the sums from scores; saved scores are read where they are stacked; a loop
    of single turns is none. Plans were off by up to 37 per cent."""
    layer, *args = attention(kind)
    fun = functools.partial(loss, layer, True)
    plain = jaxmem.plan(fun, *args, target="h100", compilations=0).plain_bytes
    budget = int(share * plain)
    # (The second plan of two leaves room for what may be off: it is another one.)
    plan = jaxmem.plan(fun, *args, budget=budget, target="h100", compilations=5)
    # Too few where one row is saved in a region inside, whose barrier XLA looks through.
    assert (-0.16 if kind == "causal" else -0.09) < relative_error(plan) < 0.25


@pytest.mark.parametrize("share", [0.35, slow(0.3), slow(None)])
def test_probabilities_have_no_room_over_a_cotangent(share):
    """A softmax in float32 of causal attention in bfloat16: probabilities are recomputed with the
    derivative of scores, from those alone, and not written over their own cotangent, which is as
    large. Plans took 18 to 22 per cent more than was projected."""
    layer, *args = attention("causal")
    plan, compiled = planned_and_compiled(functools.partial(loss, layer, True), tuple(args), share)
    assert plan.recomputes and compiled == pytest.approx(plan.projected_bytes, rel=0.03)


def body_of(function, target):
    layer, *args = network(function)
    fun = functools.partial(loss, layer, True)
    program = TracedFunction(fun, args, {}, 0, False).program
    program = apply_compiler_rules(program, jaxmem.target(target).rules)
    return program.body_of(program.scans[0])


@pytest.mark.parametrize(("target", "arrays"), [("h100", 2), ("a100-40gb", 2), ("t4", 4)])
def test_where_gpus_have_matmuls_of_their_own_the_recomputation_comes_first(target, arrays):
    body = body_of(jax.nn.silu, target)
    wide = max(body.sizes[value] for kernel in body.kernels for value in kernel.results)
    peak = simulate_block(body, 0, len(body.kernels), frozenset()).peak
    assert peak // wide == arrays


def test_what_a_loop_has_stacked_is_read_there():
    """Saved, it takes one array less inside: kernels that go element by element read the stack."""
    body = body_of(jax.nn.silu, "h100")
    hidden = next(k.results[0] for k in body.kernels if k.flops)
    wide = body.sizes[hidden]
    recomputed = simulate_block(body, 0, len(body.kernels), frozenset())
    saved = simulate_block(body, 0, len(body.kernels), frozenset([hidden]))
    apart = simulate_block(body, 0, len(body.kernels), frozenset([hidden]), looped=False)
    assert recomputed.peak - saved.peak > 0.9 * wide > recomputed.peak - apart.peak


@pytest.mark.parametrize(
    ("found_bytes", "offloaded"), [(0, False), (49, False), (50, True), (100, True)]
)
def test_most_of_what_waits_in_host_memory_has_to_be_there(found_bytes, offloaded):
    """XLA has one of two values that are equal, and `fit` refused all residuals for it."""
    plan = types.SimpleNamespace(predicted=types.SimpleNamespace(host_peak=100))
    assert rematerialization.is_offloaded(plan, found_bytes) is offloaded


def test_what_waits_is_looked_at_as_often_as_something_that_it_needs_is_made():
    """A thousand layers that wait for the last event: in calls, those of builtins among them."""
    calls, order = [], []

    def count_call(_frame, event, _argument):
        calls[-1] += event in ("call", "c_call")

    for count in (100, 1000):
        events = [Event(number, [number], [number + 1], True) for number in range(count)]
        events.append(Event(count, [], [0], True))
        calls.append(0)
        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            order = [event.kernel for event in derivative_fusion._as_soon_as_possible(events)]
        finally:
            sys.setprofile(before)
    assert order == [1000, *range(1000)]
    assert calls[1] < 12 * calls[0], calls


def test_events_that_need_their_own_results_are_left_out():
    first, second = Event(0, [1], [2], True), Event(1, [2], [1], True)
    assert derivative_fusion._as_soon_as_possible([first, second, Event(2, [3], [4], True)]) == [
        Event(2, [3], [4], True)
    ]


@pytest.mark.parametrize("activation", [jnp.tanh, lambda x: x])
def test_both_gradients_of_a_matmul_read_what_an_activation_in_it_is_made_of(activation):
    """The one of the activation reads it again; of the operands as they are each is read for the
    other's gradient alone."""
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2
    args = weights, jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    target = jaxmem.target("h100")
    traced = TracedFunction(
        lambda w, x: jnp.sum(activation(x @ w[0]) @ w[1]), args, {}, 0, False, target=target
    )
    program = apply_compiler_rules(traced.program, target.rules)
    number = next(at for at, one in enumerate(program.kernels) if one.gradients.operands and at)
    kernel = program.kernels[number]
    left, right = kernel.gradients.operands
    event = Event(number, [*kernel.reads, 1000], [1001, 1002], True)  # from a cotangent
    first, second = derivative_fusion._split_gradients(program, [event])
    assert {*first.uses} | {*second.uses} == {*event.uses}
    shared = {*event.uses} - left - right
    assert shared <= {*first.uses} & {*second.uses}
    assert len(shared) == (2 if activation is jnp.tanh else 1)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.sigmoid, jax.nn.silu])
def test_what_a_library_made_is_there_until_the_derivative_of_an_activation(activation):
    """A `tanh` that is read for its own derivative is computed with it, and nothing is written over
    what a convolution returned."""

    def loss(kernels, x):
        for kernel in kernels:
            x = activation(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.mean(x**2)

    args = [jax.ShapeDtypeStruct((64, 64, 3, 3), jnp.float32)] * 6
    args = args, jax.ShapeDtypeStruct((32, 64, 64, 64), jnp.float32)
    plan, compiled = planned_and_compiled(loss, args, None)
    assert plan.regions
    assert plan.projected_bytes == pytest.approx(compiled, rel=0.01)
