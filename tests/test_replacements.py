"""Operations that `swap` puts in the place of plain ones are written once where they are alike."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.jaxprs import internals
from jaxmem.program import opaque_operations, read_program

LENGTH, HEADS, WIDTH = 16, 2, 8
PLACES = np.arange(LENGTH)
BANDS = [jnp.asarray(abs(PLACES[:, None] - PLACES[None]) < width) for width in (3, 5)]


def attended(x, weights, scale=1.0, mask=None, cap=None, shared=False):
    """Attention by hand."""
    query, key, value = (
        (x @ weights[at]).reshape(LENGTH, HEADS, -1) for at in ((0, 0, 2) if shared else (0, 1, 2))
    )
    scores = jnp.einsum("qhw,khw->hqk", query, key) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if mask == "causal":
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    shares = jnp.exp(scores - scores.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    return x + jnp.einsum("hqk,khw->qhw", shares, value).reshape(x.shape)


# Each of one kind is alike, and no two kinds are.
KINDS = [
    {},
    {"scale": 0.5},
    {"scale": 0.25},
    {"mask": "causal"},
    {"mask": BANDS[0]},
    {"mask": BANDS[1]},
    {"cap": 2.0},
    {"cap": 3.0},
    {"shared": True},
]


def beside(kinds):
    def loss(layers, x):
        pairs = zip(layers, kinds, strict=True)
        return sum(jnp.sum(jnp.sin(attended(x, weights, **kind))) for weights, kind in pairs)

    return loss


def values(count):
    keys = jax.random.split(jax.random.key(1), count + 1)
    width = HEADS * WIDTH
    weights = [jax.random.normal(key, (3, width, width)) / 3 for key in keys[1:]]
    return weights, jax.random.normal(keys[0], (LENGTH, width))


def calls(fun, *args):
    """The programs of the replacements that are called, in order."""
    equations = jax.make_jaxpr(fun)(*args).eqns
    return [
        one.params["jaxpr"] for one in equations if "Replacement" in str(one.params.get("name"))
    ]


@pytest.mark.parametrize("order", ["one after the other", "in turn"])
def test_what_is_put_in_computes_what_was_there(order):
    kinds = [one for one in KINDS for _ in range(2)] if order != "in turn" else KINDS * 2
    loss, args = beside(kinds), values(len(kinds))
    swapped = jaxmem.ops.swap(loss, least="1KiB")
    assert len(calls(swapped, *args)) == len(kinds)
    for run in (lambda fun: fun, jax.jit):
        found = run(jax.value_and_grad(swapped, (0, 1)))(*args)
        wanted = jax.value_and_grad(loss, (0, 1))(*args)
        near = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
        jax.tree.map(near, found, wanted)


def test_alike_ones_are_one_program():
    kinds = [{}, {"mask": "causal"}, {}, {"mask": "causal"}, {"scale": 0.5}, {"cap": 2.0}]
    swapped = jaxmem.ops.swap(beside(kinds), least="1KiB")
    programs = list(map(id, calls(swapped, *values(len(kinds)))))
    assert sorted(collections.Counter(programs).values()) == [1, 1, 2, 2]


def test_masks_that_are_given_are_operands():
    kinds = [{"mask": band} for band in BANDS]
    one, other = calls(jaxmem.ops.swap(beside(kinds), least="1KiB"), *values(2))
    assert one is other


@pytest.mark.parametrize("loop", [False, True])
def test_a_program_is_read_with_one_derivative_of_alike_ones(monkeypatch, loop):
    derived = []

    def traced(step, *given):
        derived.append(step)
        return original(step, *given)

    original = opaque_operations.trace_forward_backward
    monkeypatch.setattr(opaque_operations, "trace_forward_backward", traced)
    layers, x = values(6)

    def unrolled(layers, x):
        return beside([{}] * 3 + [{"cap": 2.0}] * 3)(layers, x)

    def looped(layers, x):
        def body(x, pair):
            return attended(attended(x, pair[0]), pair[1]), None

        return jnp.sum(jax.lax.scan(body, x, jnp.stack(layers).reshape(3, 2, *layers[0].shape))[0])

    loss = jaxmem.ops.swap(looped if loop else unrolled, least="1KiB")
    program = read_program(jaxprs.flatten(lambda *given: loss(given[:-1], given[-1]), [*layers, x]))
    assert len(derived) == 1 if loop else len(derived) == 2
    if loop:
        (program,) = (one.body for one in program.operations if one.name == "scan")
    joints = [one.joint for one in program.operations if one.joint]
    assert len(joints) == 2 if loop else len(joints) == 6
    assert len({id(one.program) for one in joints}) == len(derived)
    reads = [one.reads for one in program.operations if one.joint]
    assert len(set(reads)) == len(reads)  # each its own values


def test_a_line_is_that_of_its_own():
    """Two that stand on lines of their own are told apart in reports."""

    def loss(layers, x):
        x = attended(x, layers[0])
        first = jnp.einsum("qhw,khw->hqk", *(x.reshape(LENGTH, HEADS, WIDTH),) * 2)
        shares = jax.nn.softmax(first)
        x += jnp.einsum("hqk,khw->qhw", shares, x.reshape(LENGTH, HEADS, WIDTH)).reshape(x.shape)
        second = jnp.einsum("qhw,khw->hqk", *(x.reshape(LENGTH, HEADS, WIDTH),) * 2)
        shares = jax.nn.softmax(second)
        return jnp.sum(
            jnp.einsum("hqk,khw->qhw", shares, x.reshape(LENGTH, HEADS, WIDTH)).reshape(x.shape)
        )

    found = calls(jaxmem.ops.swap(loss, least="1KiB"), *values(1))
    assert len(found) == len(set(map(id, found))) == 3


def test_equations_of_other_parameters_are_others():
    def loss(x):
        return [jnp.cumsum(x), jnp.cumsum(x), jnp.cumsum(x, axis=0), jnp.cumsum(x[::-1])]

    equations = [
        one for one in jaxprs.flatten(loss, [jnp.ones(4)]).steps if one.primitive == "cumsum"
    ]
    keys = {jaxprs.parameters_key(one.equation) for one in equations}
    assert len(keys) == 1
    literals = [internals.Literal(value, jax.typeof(value)) for value in (0.0, -0.0, 0.0)]
    assert len({jaxprs.literal_key(one) for one in literals}) == 2
