"""What the derivatives of `jax.custom_jvp` read, by their rules, and the bytes of losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.jaxprs.flat import flatten
from jaxmem.program.custom_rules import reading_of

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
    projected = jaxmem.plan(loss, *args, target=target, compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False).device
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
    projected = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False).device
    assert abs(compiled / projected - 1) < 0.05


def closing(w, x):
    """A loss with a rule that reads ``x``, which it is not given."""

    @jax.custom_vjp
    def solve(w):
        return jnp.tanh(w)

    solve.defvjp(lambda w: (solve(w), w), lambda w, g: (g * (1 - jnp.tanh(w) ** 2) * x,))
    return jnp.sum(solve(w) ** 2)


CLOSED = (jnp.arange(6.0) / 6, jnp.arange(6.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: jaxmem.plan(closing, *CLOSED),
        lambda: jaxmem.plan(closing, *CLOSED, target="h100"),
        lambda: jaxmem.pareto(closing, *CLOSED),
        lambda: jax.grad(jaxmem.remat(closing))(*CLOSED),
        lambda: jax.jit(jax.grad(jaxmem.remat(closing)))(*CLOSED),
        lambda: jax.grad(jaxmem.remat(lambda w, x: closing(jnp.sin(w), jnp.sin(x))))(*CLOSED),
    ],
)
def test_a_rule_that_reads_what_it_is_not_given_is_told(call):
    with pytest.raises(
        jaxmem.PlanError, match=r"rule of solve at .*test_custom_rules\.py:\d+ reads an array of"
    ):
        call()


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
