"""What the emitted regions keep, and derivatives that are taken once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import _jax
from jaxmem.planning import Loop, Plan, Region
from jaxmem.program import read_program

PLANNERS = ["dp", "dots", "sqrt"]


def plan_of(fun, args, *regions, loops=()):
    program = read_program(_jax.flatten(fun, [_jax.abstract(x) for x in args]))
    return Plan("by hand", program.fingerprint, regions, tuple(loops), 0, 0, program.flops, 0)


def kept(fun, *args):
    """Shapes of the values that the backward pass needs, arguments apart."""
    found = _jax.saved_residuals(fun, args)
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
    own_transpose, linear_call,
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
    program = read_program(_jax.flatten(layers, [w, x]))
    values = [value for kernel in program.kernels for value in kernel.results]
    inner = plan_of(layers, (w, x), Region(0, len(program.kernels), tuple(values)))

    def outer(w, x):
        return jnp.sum(inner.apply(layers)(w, x))

    # Every number that names a value inside is saved outside too.
    whole = plan_of(outer, (w, x))
    count = len(read_program(_jax.flatten(outer, [w, x])).kernels)
    whole = dataclasses.replace(whole, regions=(Region(0, count, tuple(range(200))),))
    kept_outside = kept(whole.apply(outer), w, x)
    assert kept_outside.count((16, 8)) <= 1, kept_outside


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
    program = read_program(_jax.flatten(loss, [w, x]))
    (scan,) = program.scans
    values = {value for kernel in program.kernels for value in kernel.results}
    region = Region(0, len(program.kernels), tuple(values - {program.kernels[scan].residuals}))
    plan = plan_of(loss, (w, x), region, loops=[Loop(scan)])
    assert (5, 16, 8) not in kept(plan.apply(loss), w, x)
