"""Matmuls whose sums XLA cuts into parts, as its estimate of their cost says."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from projections import projected_and_compiled

import jaxmem
from jaxmem.program import apply_compiler_rules
from jaxmem.program.splitting import has_padded_parts, parts_of
from jaxmem.rematerialization.traced import TracedFunction
from jaxmem.targets import Matmul, known_targets

# Batch, rows, columns, depth; none is padded. On a T4 cuBLAS has a workspace beside.
SHAPES = [
    (1, 64, 64, 128),
    (1, 128, 256, 2048),
    (1, 256, 1024, 8192),
    (1, 512, 512, 4096),
    (1, 768, 3072, 16384),
    (1, 1024, 1024, 8192),
    (1, 2048, 256, 512),
    (1, 8192, 64, 2048),
    (4, 128, 128, 1024),
    (8, 64, 256, 2048),
]
CASES = [
    ("h100", "float32"),
    ("a100-40gb", "bfloat16"),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("h100", "bfloat16"),
            ("a100-40gb", "float32"),
            ("b200", "float32"),
            ("rtx-4090", "float32"),
        )
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("target", "dtype"), CASES)
def test_parts_are_those_that_xla_makes(target, dtype, shape):
    batch, rows, columns, depth = shape
    left, right = ((batch, rows, depth), (batch, depth, columns))
    args = [jax.ShapeDtypeStruct(one, dtype) for one in (left, right)]
    compiled = jaxmem.memory(lambda x, w: jnp.tanh(x @ w), *args, target=target, timeline=False)
    found = compiled.temp // (4 * batch * rows * columns)  # summed in float32
    one = Matmul(*shape, itemsize=jnp.dtype(dtype).itemsize, summed=4)
    assert parts_of(one, jaxmem.target(target).rules) == max(found, 1)


def test_the_gradients_are_matmuls_of_the_same_three_lengths():
    one = Matmul(2, 3, 5, 7, 4, 4)
    assert dataclasses.astuple(one.of_left)[:4] == (2, 3, 7, 5)
    assert dataclasses.astuple(one.of_right)[:4] == (2, 7, 5, 3)


def test_parts_that_are_not_equally_long_are_padded():
    rules = jaxmem.target("h100").rules
    assert has_padded_parts(Matmul(1, 128, 128, 100_000, 4, 4), rules)
    assert not has_padded_parts(Matmul(1, 128, 128, 2**17, 4, 4), rules)
    assert not has_padded_parts(Matmul(1, 4096, 4096, 100_001, 4, 4), rules)  # in one part


def layers(activation):
    def loss(weights, x):
        for w in weights:
            x = x + activation(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.silu, jax.nn.softplus])
def test_small_layers_are_projected(activation, dtype):
    """Without the parts of the gradients they were a tenth to a fifth too low."""
    args = [jax.ShapeDtypeStruct((512, 512), dtype)] * 5, jax.ShapeDtypeStruct((4096, 512), dtype)
    loss = layers(activation)
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    assert plain == pytest.approx(compiled.device, rel=0.09)


def perceptrons(activation, residual):
    def loss(weights, x):
        for first, second in weights:
            y = activation(x @ first) @ second
            x = x + y if residual else activation(y)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu])
def test_parts_are_gone_before_the_gradient_of_an_activation_is_there(activation, residual, dtype):
    """An activation that is part of the matmul behind it counted beside them: an array too much.
    (Where the parts take more than an activation, XLA makes them last: docs/limits.md.)"""
    weights = [(jax.ShapeDtypeStruct((512, 512), dtype),) * 2] * 4
    args = weights, jax.ShapeDtypeStruct((16_384, 512), dtype)
    plain, compiled = projected_and_compiled(perceptrons(activation, residual), args)
    assert plain == pytest.approx(compiled, rel=0.01)


def stack(weights, x):
    for w in weights:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


OF_FEW_ROWS = [
    ("h100", "float32", 6, 1000, 32),
    ("h100", "bfloat16", 6, 1000, 64),
    ("h100", "float32", 3, 4104, 2),
    ("rtx-3090", "float32", 6, 1000, 128),
    ("h100", "float32", 4, 1024, 32),  # in equal parts: none is padded
    ("t4", "float32", 4, 1000, 32),  # a library's matmuls are in one
]


def few_rows(dtype, layers, width, rows):
    weights = [jax.ShapeDtypeStruct((width, width), dtype)] * layers
    return weights, jax.ShapeDtypeStruct((rows, width), dtype)


@pytest.mark.parametrize(("target", "dtype", "layers", "width", "rows"), OF_FEW_ROWS)
def test_padded_copies_of_weights_wait_for_the_backward_pass(target, dtype, layers, width, rows):
    """One kernel pads a weight for the matmul and for its gradient. Without the second copy all of
    them were a third too low."""
    args = few_rows(dtype, layers, width, rows)
    compiled = jaxmem.memory(jax.value_and_grad(stack), *args, target=target, timeline=False)
    plain = jaxmem.plan(stack, *args, target=target, compilations=0).plain_bytes
    assert plain == pytest.approx(compiled.device, rel=0.09)


def test_regions_part_the_two_copies_of_a_weight():
    """So a region round each layer spares them, and recomputes nothing but them."""
    args = few_rows("float32", 6, 1000, 32)
    plain = jaxmem.plan(stack, *args, target="h100", compilations=0).plain_bytes
    plan = jaxmem.plan(stack, *args, target="h100", compilations=1, budget=int(0.8 * plain))
    assert plan.compiled_bytes == pytest.approx(plan.projected_bytes, rel=0.05)
    assert plan.regions and not plan.predicted.recompute_flops


def test_what_is_padded_for_its_gradient_alone_is_so_when_that_is_made():
    """A head of 50,257 words: the gradient of what it reads is a sum over them."""

    def loss(head, x):
        logits = (x @ head).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

    args = [jax.ShapeDtypeStruct(one, "float32") for one in ((768, 50257), (256, 768))]
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    assert plain == pytest.approx(compiled.device, rel=0.09)


def test_what_is_padded_for_the_matmul_alone_does_not_wait():
    """What it multiplies, positions, has no gradient."""

    def loss(w):
        rows = jax.lax.broadcasted_iota("float32", (32, 1000), 0)
        return jnp.mean((rows @ w) ** 2)

    w = jax.ShapeDtypeStruct((1000, 1000), "float32")
    compiled = jaxmem.memory(jax.value_and_grad(loss), w, target="h100", timeline=False)
    plain = jaxmem.plan(loss, w, target="h100", compilations=0).plain_bytes
    assert plain == pytest.approx(compiled.device, rel=0.15)


def test_what_is_not_known_of_a_matmul_is_in_one_part():
    args = [jax.ShapeDtypeStruct((0, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")]
    traced = TracedFunction(lambda x, w: jnp.sum(x @ w), args, {}, 0, False)
    program = apply_compiler_rules(traced.program, jaxmem.target("h100").rules)
    assert all(not kernel.workspace for kernel in program.kernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "width", "classes", "tolerance"), [(2048, 256, 10001, 0.12), (1024, 256, 50257, 0.05)]
)
def test_a_cotangent_of_odd_length_is_there_padded_too(rows, width, classes, tolerance, dtype):
    """One gradient reads it along its padded axis, in parts, the other one along the other axis."""

    def loss(weights, x):
        inner, head = weights
        logits = (x + jnp.tanh(x @ inner)) @ head
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), -1))

    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    args = [shaped((width, width)), shaped((width, classes))], shaped((rows, width))
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    assert plain == pytest.approx(compiled.device, rel=tolerance)


def of_activation(activation):
    return lambda x, w, b: activation(x @ w)


def residual(x, w, b):
    return x + jax.nn.relu(x @ w)


def normalised(x, w, b):
    apart = x - x.mean(-1, keepdims=True)
    return jax.nn.relu(apart * jax.lax.rsqrt((apart**2).mean(-1, keepdims=True)) @ w)


ODD_ROWS = {  # layers, and how far they are off at most
    "alone": (of_activation(lambda x: x), 0.02),
    "bias": (lambda x, w, b: x @ w + b[None], 0.02),
    "relu": (of_activation(jax.nn.relu), 0.02),
    "relu and bias": (lambda x, w, b: jax.nn.relu(x @ w + b[None]), 0.02),
    "tanh": (of_activation(jnp.tanh), 0.02),
    "leaky_relu": (of_activation(jax.nn.leaky_relu), 0.02),
    "silu": (of_activation(jax.nn.silu), 0.02),
    "elu": (of_activation(jax.nn.elu), 0.02),
    "residual": (residual, 0.02),
    "normalised": (normalised, 0.09),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", ODD_ROWS)
def test_rows_that_are_padded_for_the_gradient_of_the_weights(layer, dtype):
    """A number of rows that its parts do not divide. What a matmul computes itself (a `relu`) was
    counted as written, and its operand too: four of them were 29 % too high, and a plan recomputed
    where the function fits as it is. The cotangent's copy was missing: matmuls alone were 14 % too
    low."""
    one, tolerance = ODD_ROWS[layer]

    def loss(weights, x):
        for w, b in weights:
            x = one(x, w, b)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    args = [(shaped((256, 256)), shaped((256,)))] * 4, shaped((200_000, 256))
    projected, compiled = projected_and_compiled(loss, args)
    assert projected == pytest.approx(compiled, rel=tolerance)


@pytest.mark.parametrize("target", sorted(known_targets()))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_is_emitted_by_the_kernels_that_it_was_planned_by(target, dtype):
    """Widths that some GPUs cut the sums of matmuls at, and others pad or multiply in a library."""
    loss = layers(jnp.tanh)
    shapes = [
        [jax.ShapeDtypeStruct((1000, 1000), dtype)] * 6,
        jax.ShapeDtypeStruct((4096, 1000), dtype),
    ]
    lowest = jaxmem.plan(loss, *shapes, target=target, compilations=0).projected_bytes
    plan = jaxmem.plan(loss, *shapes, target=target, compilations=0, budget=f"{lowest * 11 // 10}B")
    assert plan.recomputes
    assert plan.rules == known_targets()[target].rules
    assert jaxmem.Plan.from_json(plan.to_json()) == plan
    gradients = jax.eval_shape(jax.grad(plan.apply(loss)), *shapes)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, shapes[0])
