"""What the derivatives of `jax.custom_jvp` read, by their rules, and the bytes of losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.jaxprs.flattening import flatten
from jaxmem.program.custom_rules import reading_of
from tests.projections import projected_and_compiled

ROWS, CLASSES, WIDTH = 4096, 4096, 512


@jax.custom_jvp
def cubed(x):
    return x**3


@cubed.defjvp
def _cubed(primals, tangents):
    (x,), (moved,) = primals, tangents
    return cubed(x), 3 * x**2 * moved


@jax.custom_jvp
def raised(x):
    return jnp.exp(x)


@raised.defjvp
def _raised(primals, tangents):
    (x,), (moved,) = primals, tangents
    result = raised(x)
    return result, result * moved


@jax.custom_jvp
def shared(x):
    return jnp.log1p(jnp.exp(x))


@shared.defjvp
def _shared(primals, tangents):
    (x,), (moved,) = primals, tangents
    power = jnp.exp(x)
    return jnp.log1p(power), power * jnp.sin(x) * moved


def reading(fun, *operands):
    flat = flatten(fun, operands)
    (step,) = (one for one in flat.steps if one.primitive == "custom_jvp_call")
    return reading_of(step.equation)


@pytest.mark.parametrize(
    ("fun", "operands", "results"),
    [
        (cubed, {0}, set()),
        (raised, set(), {0}),
        (jax.nn.relu, {0}, set()),
        (jax.nn.softplus, {0}, {0}),
    ],
)
def test_what_is_read(fun, operands, results):
    found = reading(fun, jnp.ones((4, 4)))
    assert (found.operands, found.results) == (operands, results)


def test_of_two_operands_each_counts_that_has_a_derivative():
    found = reading(jnp.logaddexp, jnp.ones(4), jnp.zeros(4))
    assert (found.operands, found.results) == ({0, 1}, {0})
    assert found.computed.count("exp") == 2
    of_one = reading(lambda x: jnp.logaddexp(x, 0.0), jnp.ones(4))
    assert (of_one.operands, of_one.results) == ({0}, {0})
    assert of_one.computed.count("exp") == 1


def test_what_the_result_is_made_of_is_not_computed_for_the_derivative():
    found = reading(shared, jnp.ones(4))
    assert (found.operands, found.results) == ({0}, set())
    assert "exp" not in found.computed and "sin" in found.computed


def of_logits(of):
    def loss(weight, x, labels):
        return jnp.mean(of(jnp.tanh(x) @ weight, labels))

    array = jax.ShapeDtypeStruct
    weight, x = array((WIDTH, CLASSES), jnp.float32), array((ROWS, WIDTH), jnp.float32)
    return loss, (weight, x, array((ROWS,), jnp.int32))


LOSSES = {
    "binary": lambda logits, labels: optax.sigmoid_binary_cross_entropy(
        logits, jax.nn.one_hot(labels, CLASSES)
    ),
    "softplus": lambda logits, labels: jax.nn.softplus(logits),
    "log_sigmoid": lambda logits, labels: -jax.nn.log_sigmoid(logits),
    "product": lambda logits, labels: logits * jax.nn.softplus(logits),
    # What the tanh's derivative is given goes on in the kernel that makes it: no array of its own.
    "gated": lambda logits, labels: logits * jnp.tanh(logits),
    "square": lambda logits, labels: jnp.tanh(logits) ** 2,
}


@pytest.mark.parametrize("target", ["h100", "a100-80gb", "rtx-3090"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_projected(name, target):
    """As the step is, within 2 %: what is expensive is in memory once."""
    loss, args = of_logits(LOSSES[name])
    projected, compiled = projected_and_compiled(loss, args, target)
    assert abs(compiled / projected - 1) < 0.02


def test_other_arrays_hide_what_is_computed():
    """An autoencoder's loss reads its batch too, and has time to compute the softplus twice."""

    def loss(weights, x):
        inward, outward = weights
        logits = jnp.tanh(x @ inward) @ outward
        return jnp.mean(jax.nn.softplus(logits) - logits * x)

    array = jax.ShapeDtypeStruct
    weights = array((CLASSES, WIDTH), jnp.float32), array((WIDTH, CLASSES), jnp.float32)
    args = weights, array((ROWS, CLASSES), jnp.float32)
    projected, compiled = projected_and_compiled(loss, args)
    assert abs(compiled / projected - 1) < 0.05


def scaled_rule(c):
    """A `tanh` with a rule that reads ``c``, which it is not given."""
    fun = jax.custom_vjp(jnp.tanh)
    fun.defvjp(lambda w: (fun(w), w), lambda w, g: (g * (1 - jnp.tanh(w) ** 2) * c,))
    return fun


def scaled_value(c):
    """The same of a function that reads it itself."""
    fun = jax.custom_vjp(lambda w: jnp.tanh(w) * c)
    fun.defvjp(lambda w: (fun(w), w), lambda w, g: (g * (1 - jnp.tanh(w) ** 2),))
    return fun


def scaled_tangent(c):
    fun = jax.custom_jvp(lambda w: jnp.tanh(w))
    fun.defjvp(lambda primals, tangents: (fun(*primals), tangents[0] * c))
    return fun


def scaled_gradient(c):
    return jax.custom_gradient(lambda w: (jnp.tanh(w), lambda g: (g * c,)))


def closing(w, x):
    return jnp.sum(scaled_rule(x)(w) ** 2)


CLOSED = (jnp.linspace(0.1, 1, 6), jnp.linspace(1, 2, 6))


@pytest.mark.parametrize(
    "call",
    [
        lambda fun: jaxmem.plan(fun, *CLOSED),
        lambda fun: jaxmem.plan(fun, *CLOSED, target="h100"),
        lambda fun: jaxmem.pareto(fun, *CLOSED),
        lambda fun: jax.grad(jaxmem.remat(fun))(*CLOSED),
        lambda fun: jax.jit(jax.grad(jaxmem.remat(fun)))(*CLOSED),
    ],
)
@pytest.mark.parametrize(
    "fun",
    [
        closing,
        lambda w, x: closing(jnp.sin(w), jnp.sin(x)),
        lambda w, x: jnp.sum(scaled_value(x)(w)),
        lambda w, x: jnp.mean(scaled_tangent(x)(w * x)),
        lambda w, x: jnp.sum(scaled_gradient(x)(w)),
        lambda w, x: jnp.sum(jax.jit(lambda w: scaled_value(x)(w))(w)),
        lambda w, x: jnp.sum(jax.checkpoint(lambda w: scaled_value(x)(w))(w)),
        lambda w, x: jnp.sum(jax.vmap(lambda w: scaled_value(x)(w))(jnp.stack([w, w]))),
        lambda w, x: jnp.sum(
            jax.lax.scan(lambda c, _: (scaled_value(x)(c), None), w, None, length=3)[0]
        ),
        lambda w, x: jnp.sum(
            jax.lax.cond(x[0] > 0, lambda w: scaled_rule(x)(w), lambda w: w, w * x)
        ),
    ],
)
def test_a_rule_that_reads_what_it_is_not_given_is_told(fun, call):
    with pytest.raises(jaxmem.PlanError, match=r"rule at .*test_custom_rules\.py:\d+ \(.*reads an"):
        call(fun)


CONSTANT = jnp.arange(1.0, 7.0)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.sum(w * x) + jax.lax.stop_gradient(jnp.sum(scaled_rule(x)(w))),
        lambda w, x: jnp.sum(w * (scaled_rule(x)(w) > 0.3)),
        lambda w, x: w[jnp.argmax(scaled_rule(x)(w))] ** 2,
        lambda w, x: (scaled_rule(x)(w), jnp.sum(jnp.sin(w) * x))[1],
        lambda w, x: jnp.sum(jax.grad(lambda a: jnp.sum(scaled_rule(x)(a)))(w * x) ** 2),
        lambda w, x: jnp.sum(w * scaled_rule(x)(x)),
        lambda w, x: jnp.sum(scaled_rule(CONSTANT)(w * x)),
        lambda w, x: jnp.sum(
            jax.lax.cond(x[0] > 0, lambda w: scaled_rule(CONSTANT)(w), lambda w: w, w * x)
        ),
        lambda w, x: jnp.sum(
            jax.lax.cond(x[0] > 0, lambda w: scaled_tangent(CONSTANT)(w), lambda w: w, w * x)
        ),
    ],
)
def test_a_rule_that_no_derivative_needs_or_of_constants_is_right(fun):
    """What `jax.checkpoint` differentiates."""
    expected = jax.grad(jax.checkpoint(fun))(*CLOSED)
    planned = jaxmem.plan(fun, *CLOSED).apply(fun)
    for found in (planned, jaxmem.remat(fun)):
        np.testing.assert_allclose(jax.grad(found)(*CLOSED), expected, rtol=1e-5)
    assert jaxmem.plan(fun, *CLOSED, target="h100").compiled_bytes
    assert jaxmem.pareto(fun, *CLOSED).plans


@pytest.mark.parametrize("outer", ["no", "jit", "grad"])
def test_a_rule_may_read_what_an_outer_function_traces(outer):
    """It is the same array wherever the planned function runs."""

    def gradient(w, x, planned):
        def inner(w):
            return closing(w, x)

        return jax.grad(jaxmem.remat(inner) if planned else inner)(w)

    def differentiated(w, x, planned):
        return jax.grad(lambda x: jnp.sum(gradient(w, x, planned)))(x)

    function = differentiated if outer == "grad" else gradient
    if outer == "jit":
        function = jax.jit(function, static_argnums=2)
    expected = function(*CLOSED, False)
    np.testing.assert_allclose(function(*CLOSED, True), expected, rtol=1e-6)
    assert np.abs(expected).sum() > 0
