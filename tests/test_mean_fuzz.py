"""Losses of known kind, put together at random: what is proved of each, against its own gradient.

A loss that is proved to be a mean (or a sum) over examples is cut into slices here, and the mean
(the sum) of their gradients must be the gradient of the whole batch. Of the plain means nearly all
must be proved.
"""

import collections
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.levers.batch.independence import reduction_of

LENGTH, WIDTH, CLASSES = 4, 6, 5


@pytest.fixture(autouse=True)
def ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def batch_of(size):
    rng = np.random.default_rng(size)
    return {
        "x": jnp.asarray(rng.normal(size=(size, LENGTH, WIDTH))),
        "labels": jnp.asarray(rng.integers(0, CLASSES, size)),
        "tokens": jnp.asarray(rng.integers(0, CLASSES, (size, LENGTH))),
        "mask": jnp.asarray(rng.integers(0, 2, (size, LENGTH)) > 0),
        "scale": jnp.asarray(rng.uniform(0.5, 2, size)),
    }


def params_of():
    rng = np.random.default_rng(0)
    shapes = {
        "w": (3, WIDTH, WIDTH),
        "b": (WIDTH,),
        "conv": (3, WIDTH, WIDTH),
        "table": (CLASSES, WIDTH),
        "head": (WIDTH, CLASSES),
        "long": (64,),
    }
    return {name: jnp.asarray(rng.normal(size=shape)) / 2 for name, shape in shapes.items()}


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda p, t: (soft(*p), jax.nn.sigmoid(p[0]) * t[0]))


@jax.custom_jvp
def soft_mixed(x):
    return jnp.tanh(x)


soft_mixed.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] - t[0].mean(0, keepdims=True)))


@jax.custom_vjp
def straight(x):
    return jnp.round(x * 4) / 4


straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@jax.custom_vjp
def normalised_gradient(x):
    return x * 1.0


normalised_gradient.defvjp(
    lambda x: (x * 1.0, None), lambda _, g: (g / (1e-6 + jnp.linalg.norm(g)),)
)


@jax.custom_vjp
def dense(x, w):
    return x @ w


dense.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, jnp.einsum("btd,bte->de", kept[0], g)),
)


def recurrent(h, p, b):
    def body(carry, x):
        carry = jnp.tanh(x + carry @ p["w"][0])
        return carry, carry

    return jnp.moveaxis(jax.lax.scan(body, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1], 0, 1)


def stacked(h, p, b):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), h, p["w"])[0]


def attended(h, p, b):
    q, k, v = (h @ w for w in p["w"])
    scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None], scores, -1e9)
    return h + jax.nn.softmax(scores, -1) @ v


def heads(h, p, b):
    q = (h @ p["w"][0]).reshape(len(h), LENGTH, 2, WIDTH // 2).transpose(0, 2, 1, 3)
    q = q.reshape(-1, LENGTH, WIDTH // 2)
    out = jax.nn.softmax(q @ q.swapaxes(1, 2), -1) @ q
    return out.reshape(len(h), 2, LENGTH, WIDTH // 2).transpose(0, 2, 1, 3).reshape(h.shape)


def convolved(h, p, b):
    return jax.lax.conv_general_dilated(
        h, p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def convolved_alone(h, p, b):
    def of_one(x):
        return jax.lax.conv_general_dilated(
            x[None], p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )[0]

    return jax.vmap(of_one)(h)


def pooled(h, p, b):
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME")


def layer_norm(h, p, b):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3)


def two_views(h, p, b):
    both = jnp.concatenate([h, jnp.sin(h)])
    one, two = jnp.split(jnp.tanh(both @ p["w"][1]), 2)
    return one * two


def factored(h, p, b):
    matrix = jnp.einsum("btd,bsd->bts", h, h) + 2 * jnp.eye(LENGTH)[None]
    return jnp.linalg.cholesky(matrix) @ h


def iterated(h, p, b):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h + p["b"] * i), h)


def chosen(h, p, b):
    return jax.lax.cond(p["b"][0] > 0, lambda h: h * 2, lambda h: jnp.sin(h), h)


def picked(h, p, b):
    place = jnp.argmax(h, 1, keepdims=True)
    return h + jnp.take_along_axis(h, place, 1)


def by_index(h, p, b):
    return h * h[jnp.arange(len(h)), b["labels"] % LENGTH][:, None]


def mapped(h, p, b):
    return jax.lax.map(lambda x: jnp.tanh(x @ p["w"][2]) - x.mean(0)[None], h)


def accumulated(h, p, b):
    def body(carry, w):
        return carry + jnp.tanh(h @ w), jnp.sum(carry)

    return jax.lax.scan(body, jnp.zeros_like(h), p["w"])[0]


APART = {
    "dense": lambda h, p, b: h @ p["w"][0] + p["b"],
    "tanh": lambda h, p, b: jnp.tanh(h),
    "relu": lambda h, p, b: jax.nn.relu(h) + 0.1 * h,
    "gelu": lambda h, p, b: jax.nn.gelu(h),
    "layer_norm": layer_norm,
    "softmax": lambda h, p, b: jax.nn.softmax(h, 1) * h,
    "attended": attended,
    "heads": heads,
    "flat": lambda h, p, b: jnp.tanh(h.reshape(-1, WIDTH) @ p["w"][1]).reshape(h.shape),
    "length_first": lambda h, p, b: jnp.sin(h.swapaxes(0, 1) @ p["w"][2]).swapaxes(0, 1),
    "length_first_flat": lambda h, p, b: (
        (h.swapaxes(0, 1).reshape(-1, WIDTH) @ p["w"][2]).reshape(LENGTH, -1, WIDTH).swapaxes(0, 1)
    ),
    "recurrent": recurrent,
    "stacked": stacked,
    "accumulated": accumulated,
    "cumsum": lambda h, p, b: jnp.cumsum(h, 1),
    "cumprod": lambda h, p, b: jnp.cumprod(h, 2) + h,
    "sort": lambda h, p, b: jnp.sort(h, 1),
    "argsort": lambda h, p, b: jnp.take_along_axis(h, jnp.argsort(h, 2), 2),
    "top_k": lambda h, p, b: h + jax.lax.top_k(h, 2)[0].sum(-1, keepdims=True),
    "convolved": convolved,
    "convolved_alone": convolved_alone,
    "pooled": pooled,
    "embedded": lambda h, p, b: h + p["table"][b["tokens"]],
    "one_hot": lambda h, p, b: h + (jax.nn.one_hot(b["labels"], CLASSES) @ p["table"])[:, None],
    "taken": lambda h, p, b: h + jnp.take(p["b"], b["labels"])[:, None, None],
    "picked": picked,
    "by_index": by_index,
    "masked": lambda h, p, b: jnp.where(b["mask"][..., None], h, p["b"]),
    "scaled": lambda h, p, b: h * b["scale"][:, None, None],
    "vmapped": lambda h, p, b: jax.vmap(lambda x, s: jnp.tanh(x @ p["w"][0]) * s)(h, b["scale"]),
    "vmapped_index": lambda h, p, b: (
        h * jax.vmap(lambda x, i: x[i])(h, b["labels"] % LENGTH)[:, None]
    ),
    "vmapped_write": lambda h, p, b: jax.vmap(lambda x, i: x.at[i].add(1.0))(
        h, b["labels"] % LENGTH
    ),
    "mapped": mapped,
    "soft": lambda h, p, b: soft(h),
    "straight": lambda h, p, b: straight(h) + h,
    "custom_dense": lambda h, p, b: dense(h, p["w"][0]),
    "checkpoint": lambda h, p, b: jax.checkpoint(lambda h: jnp.tanh(h @ p["w"][0]))(h),
    "jitted": lambda h, p, b: jax.jit(lambda h: jnp.exp(-(h**2)))(h),
    "fft": lambda h, p, b: jnp.fft.fft(h, axis=2).real,
    "padded": lambda h, p, b: jnp.pad(h, ((0, 0), (1, 1), (0, 0)))[:, 2:],
    "padded_back": lambda h, p, b: jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1] + h,
    "rolled": lambda h, p, b: jnp.roll(h, 1, 1),
    "flipped": lambda h, p, b: h[:, ::-1],
    "strided": lambda h, p, b: h + jnp.repeat(h[:, ::2], 2, 1),
    "permuted": lambda h, p, b: h[:, jnp.array([2, 0, 3, 1])],
    "class_token": lambda h, p, b: jnp.concatenate(
        [jnp.broadcast_to(p["b"], (len(h), 1, WIDTH)), h], 1
    )[:, :-1],
    "einsum": lambda h, p, b: jnp.einsum("btd,de,bsd->bte", h, p["w"][0], h) / 4,
    "grouped": lambda h, p, b: layer_norm(h.reshape(-1, LENGTH, 2, WIDTH // 2), p, b).reshape(
        h.shape
    ),
    "written": lambda h, p, b: h.at[:, 1].set(0.5).at[:, 2:].add(h[:, :2]),
    "scattered": lambda h, p, b: h.at[:, jnp.array([0, 2])].mul(2.0),
    "dynamic": lambda h, p, b: h + jax.lax.dynamic_slice_in_dim(h, 1, 2, 1).sum(1, keepdims=True),
    "updated": lambda h, p, b: jax.lax.dynamic_update_slice_in_dim(h, h[:, :2] * 2, 1, 1),
    "two_views": two_views,
    "factored": factored,
    "iterated": iterated,
    "chosen": chosen,
    "unit": lambda h, p, b: h / (1 + jnp.linalg.norm(h, axis=(1, 2), keepdims=True)),
    "logsumexp": lambda h, p, b: h - jax.nn.logsumexp(h, -1, keepdims=True),
    "stopped": lambda h, p, b: h - jax.lax.stop_gradient(h.max(1, keepdims=True)),
    "squeezed": lambda h, p, b: jnp.squeeze(h[:, :, None] * p["b"], 2),
    "positions": lambda h, p, b: h + jnp.sin(jnp.arange(LENGTH)[:, None] * jnp.ones(WIDTH)[None]),
    "ones": lambda h, p, b: h * jnp.ones((len(h), 1, 1)) + jnp.zeros_like(h),
    "gated": lambda h, p, b: jnp.split(jnp.tile(h, 2), 2, -1)[0] * jax.nn.sigmoid(h),
}


def batch_norm(h, p, b):
    return (h - h.mean((0, 1), keepdims=True)) / jnp.sqrt(h.var((0, 1), keepdims=True) + 1e-3)


def carried(h, p, b):
    def body(carry, x):
        carry = jnp.tanh(x + 0.5 * carry)
        return carry, carry

    return jax.lax.scan(body, jnp.zeros_like(h[0]), h)[1]


def over_batch(h, p, b):
    return jax.lax.conv_general_dilated(
        h.swapaxes(0, 1), p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ).swapaxes(0, 1)


def segments(h, p, b):
    return h + jax.ops.segment_sum(h, b["labels"], CLASSES)[b["labels"]]


def mixup(h, p, b):
    return 0.3 * h[::-1] + 0.7 * h


def noise(h, p, b):
    return h + jax.random.normal(jax.random.key(1), h.shape)


def until_small(h, p, b):
    return jax.lax.while_loop(lambda h: jnp.sum(h**2) > 4, lambda h: h / 2, h)


TOGETHER = {
    "mixup": mixup,
    "negatives": lambda h, p, b: h * h[::-1],
    "rolled": lambda h, p, b: h * jnp.roll(h, 1, 0),
    "permuted": lambda h, p, b: h * h[jax.random.permutation(jax.random.key(0), len(h))],
    "pairs": lambda h, p, b: (
        h.reshape(-1, 2, LENGTH, WIDTH) - h.reshape(-1, 2, LENGTH, WIDTH).mean(1, keepdims=True)
    ).reshape(h.shape),
    "halves": lambda h, p, b: (
        h.reshape(2, -1, LENGTH, WIDTH) * h.reshape(2, -1, LENGTH, WIDTH)[::-1]
    ).reshape(h.shape),
    "scrambled": lambda h, p, b: h * h.swapaxes(0, 1).reshape(h.shape),
    "scrambled_width": lambda h, p, b: h * h.transpose(2, 0, 1).reshape(h.shape),
    "batch_norm": batch_norm,
    "ghost_norm": lambda h, p, b: jax.vmap(lambda h: batch_norm(h, p, b))(
        h.reshape(2, -1, LENGTH, WIDTH)
    ).reshape(h.shape),
    "sort": lambda h, p, b: jnp.sort(h, 0) * h,
    "argsort": lambda h, p, b: h[jnp.argsort(b["scale"])] * h,
    "cumsum": lambda h, p, b: jnp.cumsum(h, 0),
    "cummax": lambda h, p, b: jax.lax.cummax(h, 0) * h,
    "convolved": over_batch,
    "fft": lambda h, p, b: jnp.fft.fft(h, axis=0).real,
    "carried": carried,
    "segments": segments,
    "first": lambda h, p, b: h * h[:1],
    "shifted": lambda h, p, b: h.at[1:].multiply(h[:-1]),
    "contrast": lambda h, p, b: (
        jnp.einsum("atd,btd->ab", h, h)
        @ h.reshape(len(h), -1)[:, :1]
        * jnp.ones((1, LENGTH * WIDTH))
    ),
    "largest": lambda h, p, b: h / (1 + jnp.abs(h).max()),
    "softmax": lambda h, p, b: jax.nn.softmax(h, 0),
    "norm": lambda h, p, b: h / (1 + jnp.linalg.norm(h)),
    "noise": noise,
    "positions": lambda h, p, b: h * jnp.arange(1.0, len(h) + 1)[:, None, None],
    "weights": lambda h, p, b: h * p["long"][: len(h), None, None],
    "triangle": lambda h, p, b: jnp.einsum("ab,btd->atd", jnp.tril(jnp.ones((len(h),) * 2)), h),
    "sized": lambda h, p, b: jnp.tanh(h * len(h) / 4),
    "mean_taken": lambda h, p, b: h * jnp.mean(h),
    "clipped_gradient": lambda h, p, b: clipped(h),
    "normalised_gradient": lambda h, p, b: normalised_gradient(h) + h,
    "clipped_params": lambda h, p, b: h @ clipped(p["w"][0]),
    "mixed_tangents": lambda h, p, b: soft_mixed(h),
    "next": lambda h, p, b: h * h[(jnp.arange(len(h)) + 1) % len(h)],
    "others_labels": lambda h, p, b: h * h[b["labels"] % 2],
    "until_small": until_small,
    "cond": lambda h, p, b: jax.lax.cond(jnp.sum(h) > 0, jnp.sin, jnp.cos, h),
    "expert": lambda h, p, b: h * jnp.mean(h @ p["w"][0], (0, 1)),
    "half_of_width": lambda h, p, b: (
        h * jnp.concatenate([h.reshape(-1, WIDTH)[1:], h.reshape(-1, WIDTH)[:1]]).reshape(h.shape)
    ),
    "scatter": lambda h, p, b: h.at[b["labels"] % 2].add(h),
    "cov": lambda h, p, b: h @ jnp.cov(h.reshape(-1, WIDTH).T),
}


def labelled(h, p, b):
    return optax.softmax_cross_entropy_with_integer_labels(h.mean(1) @ p["head"], b["labels"])


def of_tokens(h, p, b):
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], b["tokens"])


def by_map(h, p, b):
    return jax.lax.map(lambda x: jnp.sum(jnp.sin(x)), h)


PARTS = {
    "squares": lambda h, p, b: h**2,
    "labelled": labelled,
    "of_tokens": of_tokens,
    "of_flat_tokens": lambda h, p, b: optax.softmax_cross_entropy_with_integer_labels(
        h.reshape(-1, WIDTH) @ p["head"], b["tokens"].reshape(-1)
    ),
    "masked": lambda h, p, b: jnp.where(b["mask"], jnp.sum(jnp.sin(h), -1), 0),
    "weighted": lambda h, p, b: jnp.sum(h**2, (1, 2)) * b["scale"],
    "hinge": lambda h, p, b: jax.nn.relu(1 - h[:, 0, 0] * (2.0 * b["mask"][:, 0] - 1)),
    "huber": lambda h, p, b: optax.huber_loss(h.mean(-1), 1.0 * b["mask"]),
    "cosine": lambda h, p, b: optax.cosine_distance(h[:, 0], h[:, 1], epsilon=1e-3),
    "own_mean": lambda h, p, b: (
        jnp.sum(h**2 * b["mask"][..., None], (1, 2)) / (1 + jnp.sum(b["mask"], 1))
    ),
    "by_index": lambda h, p, b: (
        -jax.nn.log_softmax(h.mean(1) @ p["head"])[jnp.arange(len(h)), b["labels"]]
    ),
    "one_hot": lambda h, p, b: optax.softmax_cross_entropy(
        h @ p["head"], jax.nn.one_hot(b["tokens"], CLASSES)
    ),
    "binary": lambda h, p, b: optax.sigmoid_binary_cross_entropy(h[..., 0], 1.0 * b["mask"]),
    "by_map": by_map,
    "norms": lambda h, p, b: jnp.linalg.norm(h + 1e-3, axis=-1),
}


def over_layers(parts, p, b):
    """The mean, a row of parts at a time."""
    rows = jnp.moveaxis(parts.reshape(len(parts), -1), 1, 0)
    total, _ = jax.lax.scan(lambda total, row: (total + jnp.mean(row), None), 0.0, rows)
    return total / len(rows)


MEANS = {
    "mean": lambda parts, p, b: jnp.mean(parts),
    "divided": lambda parts, p, b: jnp.sum(parts) / len(parts),
    "divided_before": lambda parts, p, b: jnp.sum(parts / len(parts)),
    "times": lambda parts, p, b: jnp.sum(parts) * (1 / parts.size),
    "twice": lambda parts, p, b: jnp.mean(jnp.mean(parts, 0)),
    "regularised": lambda parts, p, b: jnp.mean(parts) + 0.1 * jnp.sum(p["b"] ** 2),
    "in_straight_lines": lambda parts, p, b: (
        2 * jnp.mean(parts) - jnp.mean(parts**2) * p["b"][0] + jnp.float32(3)
    ),
    "average": lambda parts, p, b: jnp.average(parts),
    "over_layers": over_layers,
    "dot": lambda parts, p, b: jnp.vdot(parts, parts) / len(parts),
    "by_ones": lambda parts, p, b: jnp.sum(parts) / jnp.sum(jnp.ones(len(parts))),
    "vmapped": lambda parts, p, b: jax.vmap(jnp.sum)(parts).mean(),
}
SUMS = {
    "sum": lambda parts, p, b: jnp.sum(parts),
    "scaled": lambda parts, p, b: 0.5 * jnp.sum(parts) / 7,
    "mean_times": lambda parts, p, b: jnp.mean(parts) * len(parts),
}
WEIGHTED = {
    "masked": lambda parts, p, b: jnp.sum(parts.T * b["mask"][:, 0]) / (1 + b["mask"][:, 0].sum()),
    "scales": lambda parts, p, b: jnp.sum(parts.T * b["scale"]) / b["scale"].sum(),
    "where": lambda parts, p, b: jnp.mean(
        parts.T, where=jnp.broadcast_to(b["scale"] > 1, parts.T.shape)
    ),
    "root": lambda parts, p, b: jnp.sqrt(jnp.mean(parts**2)),
    "product": lambda parts, p, b: jnp.mean(parts) * jnp.mean(jnp.cos(parts)),
    "squared": lambda parts, p, b: jnp.mean(parts) ** 2,
    "log_mean_exp": lambda parts, p, b: jax.nn.logsumexp(0.1 * parts),
    "largest": lambda parts, p, b: jnp.max(parts),
    "median": lambda parts, p, b: jnp.median(parts),
    "deviation": lambda parts, p, b: jnp.var(parts),
    "sum_and_mean": lambda parts, p, b: jnp.sum(parts) + jnp.mean(parts),
    "sum_and_penalty": lambda parts, p, b: jnp.sum(parts) + jnp.sum(p["b"] ** 2),
    "penalty_by_size": lambda parts, p, b: jnp.mean(parts) + len(parts) * jnp.sum(p["b"] ** 2),
    "root_of_size": lambda parts, p, b: jnp.sum(parts) / len(parts) ** 0.5,
    "one_less": lambda parts, p, b: jnp.sum(parts) / (len(parts) + 1),
    "hard_ones": lambda parts, p, b: jnp.mean(jax.lax.top_k(parts.reshape(-1), 3)[0]),
    "first_half": lambda parts, p, b: jnp.mean(parts[: len(parts) // 2]),
    "all_but_first": lambda parts, p, b: jnp.mean(parts[1:]),
    "positions": lambda parts, p, b: jnp.mean(parts.T * jnp.linspace(0, 1, len(parts))),
    "clamped": lambda parts, p, b: jnp.minimum(jnp.mean(parts), 0.5),
    "branches": lambda parts, p, b: (jnp.mean if len(parts) > 4 else jnp.sum)(parts),
    "through_stop": lambda parts, p, b: (
        jnp.mean(parts) / (1 + jax.lax.stop_gradient(jnp.mean(parts) ** 2))
    ),
    "mean_rounded": lambda parts, p, b: jnp.mean(parts) * jnp.round(jnp.mean(parts)),
    "first": lambda parts, p, b: jnp.mean(parts) + jnp.sum(parts[0]),
    "clipped": lambda parts, p, b: clipped(jnp.mean(parts)) + clipped(p["b"]).sum(),
}


def make(kind, draw):
    """A loss of a kind, and the names of what it is made of."""
    names = [draw.choice(list(APART)) for _ in range(draw.randint(0, 4))]
    body = [APART[name] for name in names]
    if kind == "mixed":
        at, name = draw.randint(0, len(names)), draw.choice(list(TOGETHER))
        body.insert(at, lambda h, p, b: TOGETHER[name](h, p, b).reshape(h.shape))
        names.insert(at, "TOGETHER." + name)
    part = draw.choice(list(PARTS))
    ends = {"sum": SUMS, "weighted": WEIGHTED}.get(kind, MEANS)
    end = draw.choice(list(ends))

    def loss(params, batch):
        h = batch["x"]
        for operation in body:
            h = operation(h, params, batch)
        return ends[end](PARTS[part](h, params, batch), params, batch)

    return loss, [*names, part, end]


def cut(batch, each):
    return jax.tree.map(lambda leaf: leaf.reshape(-1, each, *leaf.shape[1:]), batch)


def wrong(loss, reduction, size, parts):
    """How far the gradient of slices is from that of the batch."""
    derive = jax.value_and_grad(loss)
    join = {"mean": jnp.mean, "sum": jnp.sum}.get(reduction)

    def of_slices(params, batch, each):
        if join is None:  # slices have weights
            return jaxmem.microbatch(loss, size // each)(params, batch)
        slices = jax.lax.map(lambda part: derive(params, part), cut(batch, each))
        return jax.tree.map(lambda leaf: join(leaf, 0), slices)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def errors(params, batch):
        expected, found = derive(params, batch), []
        for each in parts:
            joined = of_slices(params, batch, each)
            for one, two in zip(jax.tree.leaves(joined), jax.tree.leaves(expected), strict=True):
                found.append(jnp.abs(one - two).max() / (1e-9 + jnp.abs(two).max()))
        return jnp.max(jnp.stack(found))

    return float(errors(params_of(), batch_of(size)))


def judge(kind, draw):
    """What is proved of a loss of a kind, and how wrong that is."""
    loss, names = make(kind, draw)
    size, parts = draw.choice([(8, [4]), (8, [2]), (12, [3]), (6, [2]), (8, [1])])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(size))
    proof = reduction_of(
        lambda params, batch, state, key: (loss(params, batch), state),
        *(abstract, parts, params_of()),
    )
    error = wrong(loss, proof.reduction, size, parts) if proof.reduction else 0.0
    return names, size, parts, proof, error


def survey(seed, counts):
    """Counts of (kind, proved reduction), the losses that were proved wrong, and the plain means
    that were not proved."""
    draw, found, bad, missed = random.Random(seed), collections.Counter(), [], []
    for kind, count in counts.items():
        for _ in range(count):
            names, size, parts, proof, error = judge(kind, draw)
            found[kind, proof.reduction] += 1
            if not error <= 1e-6:
                bad.append((names, size, parts, proof, error))
            elif kind in ("mean", "sum") and proof.reduction != kind:
                missed.append((names, size, parts, proof))
    return found, bad, missed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_loss_is_proved_that_is_wrong_and_nearly_every_mean_is(seed):
    found, bad, missed = survey(seed, {"mean": 18, "sum": 4, "mixed": 30, "weighted": 23})
    assert not bad
    plain = sum(count for (kind, _), count in found.items() if kind in ("mean", "sum"))
    assert len(missed) <= 0.05 * plain, missed


@functools.cache
def proof_of(kind, name):
    loss = {
        "apart": lambda p, b: jnp.mean(APART[name](b["x"], p, b) ** 2),
        "together": lambda p, b: jnp.mean(TOGETHER[name](b["x"], p, b) ** 2),
        "part": lambda p, b: jnp.mean(PARTS[name](b["x"], p, b)),
    }[kind]
    slices = [4] if name in ("pairs", "halves", "ghost_norm") else [4, 2, 1]  # 1 has no pairs
    return reduction_of(lambda p, b, s, k: (loss(p, b), s), batch_of(8), slices, params_of())


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("apart", name) for name in APART), *(("part", name) for name in PARTS)],
)
def test_every_operation_that_keeps_examples_apart_is_known(kind, name):
    proof = proof_of(kind, name)
    assert (proof.reduction, proof.why) == ("mean", "")


@pytest.mark.parametrize("name", TOGETHER)
def test_no_operation_that_mixes_examples_is_taken_for_another(name):
    proof = proof_of("together", name)
    assert proof.reduction is None and "test_mean_fuzz.py:" in proof.why, proof.why
