"""Products of an activation and something else: what is expensive to compute is in memory earlier,
because the cotangents of both factors are made apart."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.program import apply_compiler_rules
from jaxmem.program.stored import reduces_to_few
from jaxmem.program.uses import Uses
from jaxmem.rematerialization.traced import TracedFunction
from tests.projections import projected_and_compiled

LAYERS, ROWS, WIDTH, INSIDE = 4, 65_536, 512, 1_024
ARRAY = ROWS * INSIDE * 4


def chain(count):
    """As many exponentials: on an H100 each takes as long as it takes to move an array."""

    def activation(x):
        for _ in range(count):
            x = jnp.exp(-x)
        return x

    return activation


def gated(activation, sliced):
    def loss(weights, x):
        for gate, value, down in weights:
            if sliced:
                both = x @ jnp.concatenate([gate, value], 1)
                one, other = both[:, :INSIDE], both[:, INSIDE:]
            else:
                one, other = x @ gate, x @ value
            x = x + (activation(one) * other) @ down
        return jnp.mean(jnp.square(x))

    up, down = (jax.ShapeDtypeStruct(s, "float32") for s in ((WIDTH, INSIDE), (INSIDE, WIDTH)))
    return loss, ([(up, up, down)] * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def stored(loss, args, target):
    """Arrays of the width inside that each layer leaves, by projection and as compiled."""
    projected, compiled = projected_and_compiled(loss, args, target)
    return projected / ARRAY / LAYERS, compiled / ARRAY / LAYERS


@pytest.mark.parametrize(
    ("activation", "sliced", "target"),
    [
        (chain(5), False, "h100"),
        (chain(6), False, "h100"),
        (chain(3), True, "h100"),
        (chain(4), True, "h100"),
        (chain(8), False, "rtx-3090"),
        (chain(10), False, "rtx-3090"),
        (jax.nn.gelu, False, "h100"),  # Gemma, T5
        (jax.nn.gelu, True, "h100"),
        (jax.nn.silu, False, "h100"),  # Llama
        (jax.nn.silu, True, "h100"),
    ],
)
def test_what_a_gate_keeps(activation, sliced, target):
    projected, compiled = stored(*gated(activation, sliced), target)
    assert abs(projected - compiled) < 0.4


def test_gates_of_two_activations():
    """WaveNet's and highway networks': a `tanh` and a sigmoid."""

    def loss(weights, x):
        for w, u, down in weights:
            x = x + (jnp.tanh(x @ w) * jax.nn.sigmoid(x @ u)) @ down
        return jnp.mean(jnp.square(x))

    _, args = gated(jnp.tanh, False)
    projected, compiled = stored(loss, args, "h100")
    assert abs(projected - compiled) < 0.4


def test_a_product_with_what_it_is_made_of_is_no_gate():
    """A SiLU by hand, and a shifted copy: one kernel makes the cotangent."""
    assert not _gates(lambda y: y * jax.nn.sigmoid(y))
    assert not _gates(lambda y: jnp.pad(y[:, :-1], ((0, 0), (1, 0))) * jnp.sin(jnp.tanh(y)))
    assert _gates(lambda y: y[:, :128] * jnp.tanh(y[:, 128:]))


def _gates(layer):
    shape = jax.ShapeDtypeStruct((256, 256), "float32")
    traced = TracedFunction(lambda w, x: jnp.mean(layer(x @ w)), (shape, shape), {}, (0, 1))
    program = apply_compiler_rules(traced.program, jaxmem.target("h100").rules)
    sizes = program.sizes
    return Uses(
        program, lambda one: reduces_to_few(one, sizes), [*range(len(sizes))], [False] * len(sizes)
    ).gates
