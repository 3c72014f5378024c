"""Large and stacked arrays: their update in pieces is the update."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.levers.host import streaming
from jaxmem.optim import half_params, small_moments
from jaxmem.program.slicing import pieces

pytestmark = pytest.mark.slow

SHAPES = {"stack": (3, 7, 40), "ragged": (13, 40), "vector": (111,), "small": (4,)}


def values(shift, dtype):
    return {
        name: jnp.cos(shift + jnp.arange(np.prod(shape), dtype=dtype).reshape(shape))
        for name, shape in SHAPES.items()
    }


def swept(monkeypatch, chunk):
    """The sweeps that happen from here on: group, axes cut and length of a piece."""
    seen = []
    sweep = streaming._Stream.update_in_chunks

    def recorded(self, at, slicing, group, length):
        seen.append((slicing.lead, length))
        return sweep(self, at, slicing, group, length)

    monkeypatch.setattr(streaming, "CHUNK", chunk)
    monkeypatch.setattr(streaming._Stream, "update_in_chunks", recorded)
    return seen


def run(optimizer, dtype, jitted=True):
    params = jax.jit(values, static_argnums=1)(0.0, dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    state = jax.jit(optimizer.init)(params)

    def step(params, state, shift):
        updates, state = optimizer.update(values(shift, wide), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1)) if jitted else step
    for number in range(3):
        params, state = step(params, state, 1.0 + number)
    return jax.device_get((params, state))


ELEMENTWISE = {
    "adam": lambda: optax.adam(0.1),
    "lion": lambda: optax.lion(0.1),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


@pytest.mark.parametrize(
    ("name", "jitted"), [*((name, True) for name in ELEMENTWISE), ("lion", False)]
)
def test_state_on_the_host_comes_in_pieces(name, jitted, monkeypatch):
    whole = run(ELEMENTWISE[name](), jnp.float64, jitted)
    seen = swept(monkeypatch, 1000)
    cut = run(jaxmem.offload(ELEMENTWISE[name]()), jnp.float64, jitted)
    chex.assert_trees_all_close(cut, whole, rtol=1e-12)
    assert {lead for lead, _ in seen} >= {(3, 7), (13,)}
    assert all(length < lead[-1] for lead, length in seen)


def exact():
    """Without a rounding that depends on how XLA fuses it."""
    return optax.sgd(0.125, momentum=0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_moments(optax.adamw(0.1), keep=lambda path, leaf: leaf.ndim < 2, block=8),
        lambda: small_moments(optax.lion(0.1), "bfloat16", keep=lambda path, leaf: False),
        lambda: half_params(exact()),
        lambda: half_params(exact(), "compensated"),
        lambda: jaxmem.offload(half_params(small_moments(exact(), block=8))),
    ],
    ids=["8bit", "bfloat16", "half", "compensated", "offload(half(8bit))"],
)
def test_small_state_is_the_same_to_a_rounding_of_float32(make, monkeypatch):
    """Also what is drawn by chance: it depends on the place in the array."""
    whole = run(make(), jnp.bfloat16)
    seen = swept(monkeypatch, 1000)
    cut = run(make(), jnp.bfloat16)
    assert {(3, 7), (13,)} <= {lead for lead, _ in seen} or {(3,), (13,)} <= {
        lead for lead, _ in seen
    }
    equal = functools.partial(np.testing.assert_allclose, rtol=2e-7)
    jax.tree.map(
        lambda a, b: equal(np.asarray(a, np.float64), np.asarray(b, np.float64)), cut, whole
    )


def test_what_mixes_an_array_is_taken_whole(monkeypatch):
    seen = swept(monkeypatch, 1000)
    for make in (lambda: optax.lamb(0.1), lambda: optax.adafactor(0.1, min_dim_size_to_factor=8)):
        cut = run(jaxmem.offload(make()), jnp.float64)
        chex.assert_trees_all_close(cut, run(make(), jnp.float64), rtol=1e-12)
    assert (13,) not in {lead for lead, _ in seen}


def test_pieces_are_even_and_no_larger_than_a_chunk():
    limit = 64 * 2**20
    assert pieces((4096, 4096), 2 * limit, limit) == (1, 2048)
    assert pieces((4096, 4096), 2 * limit + 2**20, limit) == (1, 1366)
    assert pieces((80, 4096, 4096), 80 * 2 * limit, limit) == (2, 2048)
    assert pieces((80, 4096, 4096), 40 * limit, limit) == (1, 2)
    assert pieces((50257, 1024), 2 * 4 * 50257 * 1024, limit) == (1, 7180)


# ---- compiled for a GPU that is not there

WIDTH, DEPTH = 1024, 12


def compiled(optimizer, dtype=jnp.float32):
    """One stacked array of 48 MiB (in float32) under a scan."""

    def step(params, state, x):
        def loss(params):
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
            return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), dtype)
    state = jaxmem.eval_shape(optimizer.init, params)
    x = jax.ShapeDtypeStruct((64, WIDTH), dtype)
    return jaxmem.memory(jax.jit(step, donate_argnums=(0, 1)), params, state, x, target="h200")


STACK = DEPTH * WIDTH**2 * 4


@pytest.mark.parametrize("chunk", [8, 16])
def test_a_stack_on_the_host_takes_two_chunks(chunk, monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", chunk * 2**20)
    report = compiled(jaxmem.offload(optax.adam(1e-3)))
    assert report.host == report.on_host.alias == 2 * STACK
    gradient, inputs = STACK, DEPTH * 64 * WIDTH * 4
    assert report.temp < gradient + inputs + 2 * chunk * 2**20 + 2**20
    assert report.transfers.count >= 4


def test_a_stack_of_small_moments_is_expanded_in_chunks(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", 8 * 2**20)
    report = compiled(small_moments(optax.adam(1e-3)))
    gradient, inputs = STACK, DEPTH * 64 * WIDTH * 4
    assert report.temp < gradient + inputs + 3 * 8 * 2**20


@pytest.mark.parametrize("where", ["device", "host"])
def test_many_matrices_take_the_room_of_few(where, monkeypatch):
    """What one update leaves to be written is written before the next begins."""
    monkeypatch.setattr(streaming, "CHUNK", 3 * 2**20)  # a last piece that is not as the others
    optimizer = half_params(small_moments(optax.adam(1e-3)))
    optimizer = jaxmem.offload(optimizer) if where == "host" else optimizer

    def step(params, state, x):
        def loss(params):
            y = functools.reduce(lambda y, w: jnp.tanh(y @ w), params, x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * 16  # 4 MiB each in float32
    state = jaxmem.eval_shape(optimizer.init, params)
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16)
    report = jaxmem.memory(jax.jit(step, donate_argnums=(0, 1)), params, state, x, target="h200")
    gradients, chunk = 16 * 2 * WIDTH**2, 3 * 2**20
    copies = gradients // 2  # of parameters, which XLA of jax 0.12 makes
    assert report.temp < gradients + 4 * chunk + copies * (jax.__version_info__ >= (0, 12))


def test_gradients_are_ordered_as_the_backward_pass_makes_them():
    """Not by their names: the embedding's comes last, and is cast at the end like all others."""
    found = []

    def step(params, x):
        def loss(params):
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            layers = (params["embed"], *params["blocks"], params["head"])
            y = functools.reduce(lambda y, w: jnp.tanh(y @ w), layers, x)
            return jnp.sum(y.astype(jnp.float32))

        gradient = jax.grad(loss)(params)
        found.append(jaxprs.making_order(jax.tree.leaves(gradient)))
        return gradient

    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    params = {"blocks": [leaf] * 2, "embed": leaf, "head": leaf}
    jax.eval_shape(jax.jit(step), params, jax.ShapeDtypeStruct((2, 8), jnp.bfloat16))
    first, second, embed, head = found[0]
    assert 0 < head < second < first < embed
    assert jaxprs.making_order([jnp.ones(2)]) == [0]
