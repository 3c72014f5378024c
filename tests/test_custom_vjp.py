"""Rules of `jax.custom_vjp`: which of them may be fused, and what that is worth."""

import gc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.jaxprs import custom_vjp
from jaxmem.jaxprs.flattening import flatten
from jaxmem.program.costs import calls, is_fused
from jaxmem.program.custom_rules import reading_of

TARGETS = ["h100", "rtx-3090", "t4", "v5e"]


def with_rule(fun, forward, backward, **options):
    own = jax.custom_vjp(fun)
    own.defvjp(forward, backward, **options)
    return own


def scaled_by(rule):
    """The sine of an array, with a rule of its own for the cotangent."""
    return with_rule(jnp.sin, lambda x: (jnp.sin(x), x), lambda x, g: (rule(x, g),))


def equation_of(fun, *operands):
    steps = flatten(fun, operands).steps
    (step,) = (one for one in steps if one.primitive == "custom_vjp_call")
    return step.equation


LINEAR = {
    "by the operand": lambda x, g: g * jnp.cos(x),
    "straight through": lambda x, g: g,
    "reversed": lambda x, g: -0.5 * g,
    "none": lambda x, g: jnp.zeros_like(x),
    "where the operand is positive": lambda x, g: jnp.where(x > 0, g, 0),
    "divided": lambda x, g: g / (1 + x**2),
    "mean and rest": lambda x, g: g - g.mean(-1, keepdims=True),
    "a sum of parts": lambda x, g: jnp.concatenate([g[:, :1] * 2, g[:, 1:]], -1) + g * x,
    "by JAX": lambda x, g: jax.vjp(lambda x: jnp.sin(x) * jax.nn.sigmoid(x), x)[1](g)[0],
    "shifted": lambda x, g: jnp.pad(g[:, 1:], ((0, 0), (0, 1))),
}
NOT_LINEAR = {
    "clipped": lambda x, g: jnp.clip(g, -1, 1),
    "its sign": lambda x, g: jnp.sign(g),
    "squared": lambda x, g: g * g,
    "over its size": lambda x, g: g / (1 + jnp.abs(g)),
    "where it is positive": lambda x, g: jnp.where(g > 0, g, 0),
    "rounded": lambda x, g: jnp.round(g * 8) / 8,
    "as integers": lambda x, g: (g * 256).astype(jnp.int32).astype(g.dtype),
    "through a shorter dtype": lambda x, g: g.astype(jnp.bfloat16).astype(g.dtype),
    "through one with smaller numbers": lambda x, g: g.astype(jnp.float16).astype(g.dtype),
    "in a byte": lambda x, g: g.astype(jnp.float8_e4m3fn).astype(g.dtype),
    "with noise added": lambda x, g: g + 0.1 * x,
    "one added": lambda x, g: g + 1,
    "a constant": lambda x, g: jnp.ones_like(x),
    "the operand": lambda x, g: jnp.cos(x),
    "padded with ones": lambda x, g: jnp.pad(g[:, 1:], ((0, 0), (0, 1)), constant_values=1.0),
    "or something else": lambda x, g: jnp.where(x > 0, g, 0.5),
    "over a sum of it": lambda x, g: x / (1 + g),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_rule_that_is_linear_by_its_operations_is_fused(name):
    assert is_fused(equation_of(scaled_by(LINEAR[name]), jnp.ones((4, 8))))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_rule_that_may_not_be_linear_is_not(name):
    assert not is_fused(equation_of(scaled_by(NOT_LINEAR[name]), jnp.ones((4, 8))))


def test_a_rule_that_keeps_what_rounding_leaves_is_not():
    """(Its gradients differ under `jax.jit` from those without: they are of rounding errors.)"""

    def rest(x, g):
        return 50 * (g - g.astype(jnp.bfloat16).astype(g.dtype))

    assert not is_fused(equation_of(scaled_by(rest), jnp.ones((4, 8))))


def several_readers(middle):
    """A loss whose plans copy what is fused."""

    def loss(params, x):
        skip = middle(x)
        for first, second in params:
            y = middle(jnp.tanh(x @ first))
            z = middle(y * skip)
            x = jnp.sin(z @ second) * y + jnp.mean(z * y, -1, keepdims=True)
            x = x + jnp.exp(-(y**2)) * skip
            x = x - x.mean(0, keepdims=True)
        return jnp.sum(jnp.tanh(x) * skip)

    random = np.random.default_rng(0)
    params = [tuple(0.5 * random.normal(size=(2, 8, 8))) for _ in range(2)]
    return loss, (params, random.normal(size=(16, 8)))


def error_of_plans(middle):
    """The largest relative error of gradients, and whether each plan copies the operation."""
    loss, args = several_readers(middle)
    wanted = jax.jit(jax.grad(loss, (0, 1)))(*args)
    errors, copies = [], []
    for planner in ("dp", "sqrt", "dots"):
        planned = jax.grad(jaxmem.remat(loss, planner=planner), (0, 1))
        found = jax.jit(planned)(*args)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        errors += [np.abs(a - b).max() / (np.abs(b).max() + 1e-30) for a, b in pairs]
        traced = str(jax.make_jaxpr(jaxmem.remat(loss, planner=planner))(*args))
        copies.append(traced.count("custom_vjp_call["))
    return max(errors), copies


QUICK = ("by the operand", "a sum of parts", "clipped", "a constant")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*LINEAR, *NOT_LINEAR)
    ],
)
def test_what_several_read_has_the_gradient_that_jax_has(name):
    """A fused operation is in each of its readers, with a part of the cotangent."""
    with jax.enable_x64(True):
        error, copies = error_of_plans(scaled_by((LINEAR | NOT_LINEAR)[name]))
    assert error < 1e-10
    assert all((count > 5) == (name in LINEAR) for count in copies)


def test_a_rule_taken_for_linear_would_be_found(monkeypatch):
    """The test above may fail."""
    monkeypatch.setattr(jaxmem.program.costs, "is_linear", lambda rules: True)
    with jax.enable_x64(True):
        error, copies = error_of_plans(scaled_by(NOT_LINEAR["clipped"]))
    assert error > 0.01 and min(copies) > 5


def test_a_gradient_may_be_rounded_to_its_dtype():
    """As of a layer in bfloat16 that computes in float32."""

    def backward(x, g):
        return ((g.astype(jnp.float32) * jnp.cos(x.astype(jnp.float32))).astype(x.dtype),)

    rule = with_rule(jnp.sin, lambda x: (jnp.sin(x), x), backward)
    assert is_fused(equation_of(rule, jnp.ones((4, 8), jnp.bfloat16)))


@pytest.mark.parametrize(("inner", "fused"), [("clipped", False), ("by the operand", True)])
def test_a_rule_that_calls_another_one_is_fused_if_that_is(inner, fused):
    """Second derivatives are by the rule that it calls."""
    called = scaled_by((LINEAR | NOT_LINEAR)[inner])
    middle = with_rule(
        jnp.sin, lambda x: (jnp.sin(x), x), lambda x, g: (g * (jnp.cos(x) + called(x)),)
    )
    assert is_fused(equation_of(middle, jnp.ones((4, 8)))) == fused

    def loss(weights, x):
        for weight in weights:
            y = middle(x @ weight)
            x = jnp.tanh(y @ weight) + jnp.cos(y @ weight.T) + y
        return jnp.sum(jnp.sin(x) ** 2)

    def penalty(fun):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jax.grad(fun, 1)(*args) ** 2)))

    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        weights, x = random.normal(size=(3, 8, 8)), random.normal(size=(4, 8))
        wanted = penalty(loss)(weights, x)
        found = penalty(jaxmem.remat(loss, planner="dp"))(weights, x)
        chex.assert_trees_all_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "fused"), [("by the operand", True), ("clipped", False)])
def test_a_rule_may_call_its_own_function(name, fused):
    """Most do, to have its result; or two call one another."""
    rule = (LINEAR | NOT_LINEAR)[name]
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (own(x), x), lambda x, g: (rule(x, g),))
    assert is_fused(equation_of(own, jnp.ones((4, 8)))) == fused

    sine, cosine = jax.custom_vjp(jnp.sin), jax.custom_vjp(jnp.cos)
    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (rule(x, g) + cosine(x) * g,))
    cosine.defvjp(lambda x: (cosine(x), x), lambda x, g: (-sine(x) * g,))
    began = len(custom_vjp._traced)
    equation = equation_of(sine, jnp.ones((4, 8)))
    assert is_fused(equation) == fused
    assert len(custom_vjp._traced) - began < 12


def test_a_rule_that_calls_itself_for_ever_is_not_fused():
    """On ever smaller arrays: JAX traces the rule of none that it does not differentiate."""
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (jnp.pad(own(x[1:]), (1, 0)), x), lambda x, g: (g,))
    assert not is_fused(equation_of(own, jnp.ones(64)))


def test_few_calls_of_a_rule_that_calls_itself_are_read():
    """On both halves of its operand: all of them took seconds."""
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(
        lambda x: (own(x), x),
        lambda x, g: (g * jnp.concatenate([own(x[: len(x) // 2]), own(x[len(x) // 2 :])]),),
    )
    began = len(custom_vjp._traced)
    assert not is_fused(equation_of(own, jnp.ones(256)))
    assert len(custom_vjp._traced) - began < 12


def test_a_rule_that_asks_which_cotangents_are_there_is_not_fused():
    rule = with_rule(
        jnp.sin, lambda x: (jnp.sin(x.value), x.value), lambda x, g: (g,), symbolic_zeros=True
    )
    assert not is_fused(equation_of(rule, jnp.ones((4, 8))))


def test_a_rule_that_cannot_be_traced_is_not_fused():
    def refuses(x):
        raise TypeError("not today")

    assert not is_fused(equation_of(with_rule(jnp.sin, refuses, refuses), jnp.ones((4, 8))))


def test_a_rule_with_a_matmul_is_not_fused():
    product = with_rule(
        jnp.dot, lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
    )
    assert not is_fused(equation_of(product, jnp.ones((4, 4)), jnp.ones((4, 4))))


@pytest.mark.parametrize(
    ("forward", "backward", "operands", "results", "made"),
    [
        (lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),), {0}, set(), ("sin",)),
        (lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (g * c,), {0}, set(), ("sin",)),
        (lambda x: (jnp.sin(x),) * 2, lambda y, g: (g * y,), set(), {0}, ("sin",)),
        (lambda x: (jnp.sin(x), None), lambda _, g: (g,), set(), set(), ("sin",)),
        (lambda x: (jnp.sin(x), (x, x > 0)), lambda xs, g: (g * xs[1],), {0}, set(), ("sin",)),
    ],
)
def test_what_is_read_and_what_is_made_of_it(forward, backward, operands, results, made):
    equation = equation_of(with_rule(jnp.sin, forward, backward), jnp.ones((4, 8)))
    found = reading_of(equation)
    assert (found.operands, found.results) == (operands, results)
    assert calls(equation) == made


def test_nothing_is_kept_of_a_program_that_is_gone():
    count = len(custom_vjp._traced)
    jaxmem.residuals(lambda x: jnp.sum(scaled_by(LINEAR["divided"])(x)), jnp.ones((4, 8)))
    assert is_fused(equation_of(scaled_by(LINEAR["divided"]), jnp.ones((4, 8))))
    jax.clear_caches()
    gc.collect()
    assert len(custom_vjp._traced) <= count


# ---- bytes


def normalized(x, scale):
    moved = x - x.mean(-1, keepdims=True)
    return moved * jax.lax.rsqrt((moved**2).mean(-1, keepdims=True) + 1e-6) * scale[None]


def _normalized_forward(x, scale):
    moved = x - x.mean(-1, keepdims=True)
    by = jax.lax.rsqrt((moved**2).mean(-1, keepdims=True) + 1e-6)
    return moved * by * scale[None], (moved * by, by, scale)


def _normalized_backward(kept, cotangent):
    unit, by, scale = kept
    scaled = cotangent * scale[None]
    mean = scaled.mean(-1, keepdims=True)
    along = (scaled * unit).mean(-1, keepdims=True)
    return by * (scaled - mean - unit * along), (cotangent * unit).sum(0)


def swish(x):
    return x * jax.nn.sigmoid(x)


BY_HAND = {  # as people write them, and what they stand for
    "sine": (
        with_rule(jnp.sin, lambda x: (jnp.sin(x), jnp.cos(x)), lambda kept, g: (kept * g,)),
        jnp.sin,
    ),
    "tanh of its result": (
        with_rule(jnp.tanh, lambda x: (jnp.tanh(x),) * 2, lambda y, g: (g * (1 - y * y),)),
        jnp.tanh,
    ),
    "swish": (
        with_rule(swish, lambda x: (swish(x), x), lambda x, g: jax.vjp(swish, x)[1](g)),
        swish,
    ),
    "layer norm": (with_rule(normalized, _normalized_forward, _normalized_backward), normalized),
}


def network(middle, scaled):
    """Eight layers of 32 MiB of activations."""

    def loss(params, x):
        for weight, out, scale in params:
            y = x @ weight
            x = x + (middle(y, scale) if scaled else middle(y)) @ out
        return jnp.sum(jnp.sin(x) ** 2)

    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    scale = jax.ShapeDtypeStruct((1024,), jnp.float32)
    return loss, ([(square, square, scale)] * 8, jax.ShapeDtypeStruct((8192, 1024), jnp.float32))


def projected(loss, args, target):
    budget = jaxmem.target(target).usable_bytes
    plan = jaxmem.plan(loss, *args, budget=budget, target=target, compilations=0)
    return plan.projected_bytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_written_by_hand_is_projected_as_what_it_stands_for(name, target):
    by_hand, plain = (network(one, name == "layer norm") for one in BY_HAND[name])
    assert projected(*by_hand, target) == pytest.approx(projected(*plain, target), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_written_by_hand_is_projected_as_it_compiles(name, target):
    loss, args = network(BY_HAND[name][0], name == "layer norm")
    compiled = jaxmem.memory(
        jax.jit(jax.value_and_grad(loss)), *args, target=target, timeline=False
    )
    assert projected(loss, args, target) == pytest.approx(compiled.device, rel=0.15)
