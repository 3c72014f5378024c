"""A small causal transformer in plain JAX: parameters in dicts, its layers stacked for a scan."""

import jax
import jax.numpy as jnp
import optax

WIDTH, DEPTH, HEADS, VOCABULARY, CONTEXT = 128, 4, 4, 256, 64


def make_layer(key):
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "qkv": jax.random.normal(qkv, (WIDTH, 3 * WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(out, (WIDTH, WIDTH)) / WIDTH**0.5,
        "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
    }


def make_params(key):
    embed, blocks, head = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (VOCABULARY, WIDTH)),
        "blocks": jax.vmap(make_layer)(jax.random.split(blocks, DEPTH)),
        "head": jax.random.normal(head, (WIDTH, VOCABULARY)) / WIDTH**0.5,
    }


def normalise(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(params, x):
    rows, length, _ = x.shape
    q, k, v = jnp.split((normalise(x) @ params["qkv"]).reshape(rows, length, HEADS, -1), 3, -1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normalise(x) @ params["up"]) @ params["down"]


def loss_fn(block, params, tokens):
    """The mean loss of sequences ``[batch, CONTEXT + 1]``, with the layer as it is to be run."""
    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["blocks"])
    logits = normalise(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
