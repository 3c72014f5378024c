"""Values that move along an axis: paddings, shifts, and scans that are trees of slices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem
from tests.cases import slow_but
from tests.projections import projected_and_compiled


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def interleaved(x):
    even, odd = jnp.tanh(x[:, ::2]), jnp.sin(x[:, 1::2])
    nothing = jnp.zeros((), x.dtype)
    even = lax.pad(even, nothing, [(0, 0, 0), (0, 1, 1)])
    return even + lax.pad(odd, nothing, [(0, 0, 0), (1, 0, 1)])


def convolved(x):
    padded = jnp.pad(x, ((0, 0), (3, 0)))
    return sum(padded[:, at : at + x.shape[1]] * (at + 1.0) for at in range(4))


MOVES = {
    "shift": lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1],
    "shift of rows": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "differences": lambda x: jnp.pad((x[:, 2:] - x[:, :-2]) / 2, ((0, 0), (1, 1))),
    "causal convolution": convolved,
    "interleaved": interleaved,
    "padded for a matmul": lambda x: (
        jnp.pad(x, ((0, 0), (0, 128))) @ jnp.ones((1152, 1024), x.dtype)
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_paddings_are_fused(name):
    def loss(w, x):
        x = x @ w
        for _ in range(6):
            x = jnp.tanh(MOVES[name](jnp.tanh(x))) * jnp.sin(x)
        return jnp.mean((x @ w) ** 2)

    projected, compiled = projected_and_compiled(loss, (shaped(1024, 1024), shaped(4096, 1024)))
    assert projected == pytest.approx(compiled, rel=0.1)


def shifted_tokens(params, x):
    """The layers of RWKV (Peng et al. 2023), each of a token and the one before."""
    for w, mix in params:
        mix = mix[None, None]
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        key, gate = ((x * m + before * (1 - m)) @ w for m in (mix, 1 - mix))
        x = x + jax.nn.sigmoid(gate) * jnp.square(jax.nn.relu(key))
    return jnp.mean(x**2)


def selective(params, x):
    """A state 16 times as large as what it is made of, as Mamba's (Gu and Dao 2023)."""
    for w, small, rates in params:
        y = jnp.tanh(x @ w)
        step, b = jax.nn.softplus(y), y @ small
        decay = jnp.exp(-jnp.exp(rates)[None, None] * step[..., None])
        added = (step * y)[..., None] * b[:, :, None]

        def combine(one, two):
            return one[0] * two[0], two[0] * one[1] + two[1]

        _, state = lax.associative_scan(combine, (decay, added), axis=1)
        x = x + jnp.einsum("blds,bls->bld", state, b)
    return jnp.mean(x**2)


TREES = {
    "add, the last axis": (lambda x: lax.associative_scan(jnp.add, x, axis=1), 0.2),
    "multiply, the last axis": (lambda x: lax.associative_scan(jnp.multiply, x, axis=1), 0.15),
    "multiply, the first axis": (lambda x: lax.associative_scan(jnp.multiply, x, axis=0), 0.1),
    "logaddexp": (lambda x: lax.associative_scan(jnp.logaddexp, x, axis=1), 0.1),
}


@pytest.mark.parametrize("name", TREES)
def test_what_reads_slices_makes_no_more_than_slices_of_the_cotangent(name):
    scan, error = TREES[name]

    def loss(w, x):
        return jnp.sum(jnp.tanh(scan(x @ w)) ** 2)

    projected, compiled = projected_and_compiled(loss, (shaped(128, 1024), shaped(16384, 128)))
    assert projected == pytest.approx(compiled, rel=error)


def test_a_token_and_the_one_before():
    layers = [(shaped(512, 512), shaped(512))] * 6
    projected, compiled = projected_and_compiled(shifted_tokens, (layers, shaped(8, 1024, 512)))
    assert projected == pytest.approx(compiled, rel=0.1)


@pytest.mark.slow
def test_a_state_that_is_broadcast_is_computed_where_it_is_read():
    layers = [(shaped(256, 256), shaped(256, 16), shaped(256, 16))] * 4
    args = layers, shaped(2, 512, 256)
    projected, compiled = projected_and_compiled(selective, args)
    assert projected == pytest.approx(compiled, rel=0.15)
    plan = jaxmem.plan(selective, *args, budget=int(0.7 * compiled), target="h100")
    assert plan.compiled_bytes <= 0.7 * compiled


@pytest.mark.parametrize("name", slow_but([*MOVES][:5], [*MOVES, *TREES]))
def test_gradients_are_those_of_the_plain_function(name):
    move = MOVES[name] if name in MOVES else TREES[name][0]

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(move(jnp.sin(x @ w)))
        return jnp.mean(x**2)

    size = 1024 if name == "padded for a matmul" else 16
    w, x = (jax.random.normal(jax.random.key(k), (size, size)) for k in range(2))
    plan = jaxmem.plan(loss, w, x)
    assert plan.regions
    for one, other in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(plan.apply(loss)))(w, x)),
        jax.tree.leaves(jax.value_and_grad(loss)(w, x)),
        strict=True,
    ):
        assert jnp.allclose(one, other, rtol=1e-12, atol=1e-12)
