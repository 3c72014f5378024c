"""Losses by blocks in a rule of their own: what a derivative adds up over the turns of a loop, and
what is behind regions, casts and primitives that XLA does not see."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem import jaxprs
from jaxmem.ops.wide_einsum import wide_einsum
from tests.projections import planned_and_compiled

ROWS, WIDTH, WORDS, BLOCK = 16384, 2048, 32768, 1024


def by_blocks(dtype, has_region):
    """A loss of logits that are made, a block of columns at a time, in a rule of its own."""

    def of_all(rows, head):
        def turn(total, at):
            def of_block(rows, head):
                block = jax.lax.dynamic_slice_in_dim(head, at * BLOCK, BLOCK, 1)
                logits = jnp.dot(rows, block, preferred_element_type=jnp.float32)
                return jnp.sum(jnp.tanh(logits) * logits)

            run = jax.checkpoint(of_block) if has_region else of_block
            return total + run(rows, head), None

        return jax.lax.scan(turn, 0.0, jnp.arange(head.shape[1] // BLOCK))[0]

    @jax.custom_vjp
    def rule(rows, head):
        return of_all(rows.astype(dtype), head)

    def backward(kept, cotangent):
        rows, head = kept
        both = jax.grad(of_all, (0, 1))(rows.astype(dtype), head)
        return tuple((cotangent * x).astype(rows.dtype) for x in both)

    rule.defvjp(lambda rows, head: (rule(rows, head), (rows, head)), backward)

    def loss(params, x):
        weights, head = params
        return rule(x @ weights, head)

    shapes = (WIDTH, WIDTH), (WIDTH, WORDS), (ROWS, WIDTH)
    *params, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return loss, (tuple(params), x)


@pytest.mark.parametrize("target", ["h100", pytest.param("t4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_region", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_product_is_added_to_what_is_there(dtype, has_region, target):
    """A library multiplies and adds in one, over what was there; a block of a gradient among zeros
    is added so too. Each was counted beside that: up to 29 % too high. (Without units for bfloat16
    the product is made in float32 first.)"""
    loss, args = by_blocks(dtype, has_region)
    plan, compiled = planned_and_compiled(loss, args, 1.0, target)
    near = 0.04 if target == "h100" else 0.12
    assert plan.projected_bytes == pytest.approx(compiled, rel=near)


def primitives(fun, *args, **options):
    flat = jaxprs.flatten_jaxpr(jax.make_jaxpr(fun)(*args), **options)
    return [step.primitive for step in flat.steps]


def test_what_is_not_differentiated_is_as_xla_has_it():
    x, w = jnp.ones((4, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16)

    def product(x, w):
        wide = (array.astype(jnp.float32) for array in (x, w))
        return wide_einsum("ij,jk->ik", *wide, jnp.bfloat16)

    assert primitives(product, x, w) == [*["convert_element_type"] * 2, "custom_jvp_call"]
    assert primitives(product, x, w, differentiated=False) == ["dot_general"]
    # Its derivative's products are primitives of our own.
    derived = primitives(jax.grad(lambda x: product(x, w).sum()), x)
    assert "wide_einsum" in derived
    derived = primitives(jax.grad(lambda x: product(x, w).sum()), x, differentiated=False)
    assert "wide_einsum" not in derived
    # A function that is elementwise stays one operation, as in a derivative.
    assert primitives(jax.nn.relu, x, differentiated=False) == ["custom_jvp_call"]


@pytest.mark.parametrize(
    ("before", "between", "goes"),
    [
        (jnp.bfloat16, jnp.float32, True),
        (jnp.float16, jnp.float32, True),
        (jnp.int8, jnp.int32, True),
        (jnp.float32, jnp.bfloat16, False),
        (jnp.bfloat16, jnp.float16, False),
        (jnp.float32, jnp.int32, False),
        (jnp.int32, jnp.float32, False),
    ],
)
def test_a_cast_to_more_and_back_is_none(before, between, goes):
    def there_and_back(x):
        return jnp.sin(x.astype(between).astype(before).astype(jnp.float32))

    found = primitives(there_and_back, jnp.ones(4, before), differentiated=False)
    assert (found.count("convert_element_type") < 2) == goes


def test_a_cast_that_is_read_elsewhere_stays():
    def both(x):
        wide = x.astype(jnp.float32)
        return jnp.cos(wide), jnp.sin(wide.astype(jnp.bfloat16))

    found = primitives(both, jnp.ones(4, jnp.bfloat16), differentiated=False)
    assert sorted(found) == ["convert_element_type", "cos", "sin"]


def test_a_region_in_a_backward_pass_is_merged_with_nothing():
    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x))

    found = primitives(jax.value_and_grad(loss), jnp.ones(4), differentiated=False, merge=True)
    assert "checkpoint" not in found and "remat2" not in found
    assert found.count("sin") == 3  # two forward, and one again
    assert "optimization_barrier" in found


def test_values_are_the_same():
    def loss(x, w):
        wide = (array.astype(jnp.float32) for array in (x, w))
        region = jax.checkpoint(lambda x, w: wide_einsum("ij,jk->ik", x, w, jnp.bfloat16))
        return jnp.sum(jnp.sin(region(*wide)))

    keys = jax.random.split(jax.random.key(0))
    args = [jax.random.normal(key, (4, 4), jnp.bfloat16) for key in keys]
    derived = jax.grad(loss, (0, 1))
    flat = jaxprs.flatten_jaxpr(jax.make_jaxpr(derived)(*args), differentiated=False, merge=True)
    values = dict(enumerate([*flat.consts, *args]))
    flat.run(flat.steps, values)
    for output, wanted in zip(flat.outputs, derived(*args), strict=True):
        assert jnp.array_equal(values[output], wanted)
