"""Operations in blocks hold none of what they make of a block, wherever they are differentiated."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import ops
from jaxmem.jaxprs.equations import all_equations

LAYERS, ROWS, LENGTH, WIDTH = 3, 2, 300, 8
BLOCK = (32, 32)


def attend(x, **options):
    heads = x[:, :, None]
    return ops.attention(heads, heads, heads, block=BLOCK, **options)[:, :, 0]


def cross_entropy(x, **options):
    rows = x.reshape(-1, WIDTH)
    labels = jnp.arange(len(rows)) % LENGTH
    weights = jnp.ones((WIDTH, LENGTH))
    losses = ops.softmax_cross_entropy(rows, weights, labels, block=BLOCK, **options)
    return x + losses.reshape(x.shape[0], -1)[..., None]


def swapped(x):
    def plain(x):
        heads = x[:, :, None]
        return jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)[:, :, 0]

    return ops.swap(plain, least="1KiB")(x)


LAYERS_OF = {
    "attention": attend,
    "causal attention": lambda x: attend(x, is_causal=True),
    "masked attention": lambda x: attend(x, mask=jnp.arange(LENGTH) > 7),
    "cross-entropy": cross_entropy,
    "smoothed cross-entropy": lambda x: cross_entropy(x, label_smoothing=0.1),
    "swapped attention": swapped,
}


def sizes(jaxpr):
    """Elements of every array that a program makes, in whatever it calls."""
    for equation in all_equations(jaxpr):
        yield from (variable.aval.size for variable in equation.outvars)


@pytest.mark.parametrize("name", LAYERS_OF)
def test_in_a_loop_too(name, monkeypatch):
    # JAX makes what is the same in each turn of a loop before it, and keeps it: masks were, of all
    # blocks together as large as the scores.
    monkeypatch.setattr("jaxmem.ops.flash.BLOCK", 2**12)
    monkeypatch.setattr("jaxmem.ops.flash._TILE", 16)

    def loss(scales, x):
        def layer(x, scale):
            return LAYERS_OF[name](x * scale), None

        return jax.lax.scan(layer, x, scales)[0].sum()

    given = jnp.ones(LAYERS), jnp.ones((ROWS, LENGTH, WIDTH))
    made = jax.make_jaxpr(jax.value_and_grad(loss))(*given)
    assert max(sizes(made.jaxpr)) < ROWS * LENGTH * LENGTH / 2


def test_a_matrix_of_scores_is_seen():
    def plain(x):
        return jax.nn.dot_product_attention(x, x, x)

    made = jax.make_jaxpr(plain)(jnp.ones((ROWS, LENGTH, 1, WIDTH)))
    assert max(sizes(made.jaxpr)) >= ROWS * LENGTH * LENGTH


def test_compiled():
    def loss(scales, x):
        def layer(x, scale):
            y = x * scale
            return ops.attention(y, y, y, is_causal=True), None

        return jax.lax.scan(layer, x, scales)[0].astype(jnp.float32).sum()

    shape = (1, 8192, 4, 64)
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4,), shape)]
    taken = jaxmem.memory(jax.grad(loss), *given, target="h100", timeline=False).device
    assert taken < 4 * 8192 * 8192  # bytes of a mask of all scores


def test_a_block_that_is_all_of_an_axis_is_no_slice():
    """Of a slice the cotangent is a piece of zeros as large as the whole: with all rows in a block
    they counted once more at each turn over the vocabulary (16 GiB of a step of 70 billion)."""
    rows, weights = jnp.ones((ROWS * LENGTH, WIDTH)), jnp.ones((WIDTH, LENGTH))

    def loss(rows, block):
        labels = jnp.arange(len(rows)) % LENGTH
        return ops.softmax_cross_entropy(rows, weights, labels, block=block).mean()

    def written(block):
        """Arrays of all rows that pieces are written into."""
        made = jax.make_jaxpr(jax.grad(loss), static_argnums=1)(rows, block)
        return sum(
            one.outvars[0].aval.shape == rows.shape
            for one in all_equations(made.jaxpr)
            if one.primitive.name == "dynamic_update_slice"
        )

    assert written((ROWS * LENGTH, 32)) == 0 < written((ROWS * LENGTH // 4, 32))
