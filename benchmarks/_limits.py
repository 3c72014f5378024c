"""Small programs whose bytes are projected wrongly: those of docs/limits.md.

A program is taken out, with its row there, once its projections are within 10 %.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks._held_out import shape

ROWS, WIDTH, LAYERS = 16_384, 1_024, 4

PROGRAMS: dict[str, Callable[[], tuple[Callable, tuple]]] = {}


def program(name: str):
    """Registers a maker of (loss, arguments) under the name that docs/limits.md gives it."""

    def register(make: Callable[[], tuple[Callable, tuple]]) -> Callable:
        PROGRAMS[name] = make
        return make

    return register


def layers(of_layer: Callable, parameters: Any, inputs: Any) -> tuple[Callable, tuple]:
    """The mean square of the last of LAYERS layers, one after the other."""

    def loss(params, x):
        for of_one in params:
            x = of_layer(x, of_one)
        return jnp.mean(jnp.square(jnp.abs(x).astype(jnp.float32)))

    return loss, ([parameters] * LAYERS, inputs)


def normalised(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


@program("associative_scan")
def _states():
    def layer(x, params):
        enter, decay, leave = params
        rate = jax.nn.sigmoid(x @ decay)[..., None]
        state = (x @ enter)[..., None] * jnp.ones(16)

        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, states = lax.associative_scan(join, (jnp.broadcast_to(rate, state.shape), state), axis=1)
        return x + jnp.sum(states, -1) @ leave

    return layers(layer, (shape(128, 128),) * 3, shape(8, 1_024, 128))


@program("logsumexp of a middle axis, in a scan")
def _hidden_markov():
    def loss(transitions, emissions):
        def step(alpha, seen):
            alpha = jax.nn.logsumexp(alpha[:, :, None] + transitions, axis=1) + seen
            return alpha, None

        last, _ = lax.scan(step, jnp.zeros_like(emissions[0]), emissions)
        return -jnp.mean(jax.nn.logsumexp(last, -1))

    return loss, (shape(256, 256), shape(128, 64, 256))


def _attention(queries: int, keys: int):
    """One attention in bfloat16, as it is written by hand."""
    heads, width = 4, 64

    def loss(params, x, others):
        x, others = x @ params["in"], others @ params["in"]
        query, key = (one.reshape(*one.shape[:2], heads, width) for one in (x, others))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, key).reshape(x.shape)
        return jnp.mean((mixed @ params["out"]).astype(jnp.float32) ** 2)

    size = heads * width
    params = {name: shape(size, size, dtype=jnp.bfloat16) for name in ("in", "out")}
    rows = (shape(4, length, size, dtype=jnp.bfloat16) for length in (queries, keys))
    return loss, (params, *rows)


@program("losses of separate networks")
def _separate_networks():
    def network(weights, x):
        for weight in weights[:-1]:
            x = jax.nn.swish(x @ weight)
        return x @ weights[-1]

    def loss(params, x, actions, returns):
        policy = jnp.mean((network(params["policy"], x) - actions) ** 2)
        return policy + jnp.mean((network(params["value"], x)[:, 0] - returns) ** 2)

    def weights(last):
        return [shape(128, 256), *[shape(256, 256)] * 4, shape(256, last)]

    params = {"policy": weights(16), "value": weights(1)}
    return loss, (params, shape(40_960, 128), shape(40_960, 16), shape(40_960))


@program("transposed convolutions, in bfloat16")
def _transposed_in_bfloat16():
    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(lax.conv_transpose(x, kernel, (2, 2), "SAME"))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    kernels = [shape(4, 4, 32, 32, dtype=jnp.bfloat16)] * 3
    return loss, (kernels, shape(16, 32, 32, 32, dtype=jnp.bfloat16))


@program("transposed convolutions of a gelu")
def _transposed():
    def loss(params, x):
        h = x
        for kernel in params["down"]:
            numbers = ("NHWC", "HWIO", "NHWC")
            h = lax.conv_general_dilated(h, kernel, (2, 2), "SAME", dimension_numbers=numbers)
            h = jax.nn.gelu(h)
        for kernel in params["up"]:
            h = jax.nn.gelu(lax.conv_transpose(h, kernel, (2, 2), "SAME"))
        return jnp.mean((h[..., :3] - x) ** 2)

    down = [shape(3, 3, 3, 64), shape(3, 3, 64, 64), shape(3, 3, 64, 128)]
    up = [shape(3, 3, 128, 64), shape(3, 3, 64, 64), shape(3, 3, 64, 16)]
    return loss, ({"down": down, "up": up}, shape(64, 128, 128, 3))


@program("convolutions of a gelu")
def _activated():
    def layer(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        same = {"padding": "SAME", "dimension_numbers": numbers}
        return x + lax.conv_general_dilated(jax.nn.gelu(x), kernel, (1, 1), **same)

    return layers(layer, shape(3, 3, 64, 64), shape(32, 64, 64, 64))


@program("a running sum over layers")
def _skips():
    def loss(params, x):
        total = 0.0
        for weight, head in params:
            x = jnp.tanh(x @ weight)
            total = total + x @ head
        return jnp.mean(jax.nn.relu(total) ** 2)

    return loss, ([(shape(128, 128), shape(128, 256))] * 12, shape(32_768, 128))


@program("attention of many queries over few keys, in bfloat16")
def _cross_attention():
    return _attention(4096, 77)


@program("masks of blocks, in a scan over layers")
def _blocks_of_ones_own():
    batch, length, heads, width, count = 1, 16_384, 8, 128, 16
    size = length // count

    def attention(x):
        blocks = x.reshape(batch, count, size, heads, width).swapaxes(0, 1)

        def block(carry, given):
            most, total, out = carry
            rows, number = given
            scores = jnp.einsum("bqhd,bkhd->bhqk", x, rows).astype(jnp.float32)
            seen = jnp.arange(length)[:, None] >= number * size + jnp.arange(size)
            scores = jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -1e9)
            more = jnp.maximum(most, scores.max(-1))
            weights, scale = jnp.exp(scores - more[..., None]), jnp.exp(most - more)
            added = jnp.einsum("bhqk,bkhd->bhqd", weights.astype(x.dtype), rows)
            return (more, total * scale + weights.sum(-1), out * scale[..., None] + added), None

        zeros = jnp.zeros((batch, heads, length))
        start = (zeros - 1e30, zeros, jnp.zeros((batch, heads, length, width)))
        (_, total, out), _ = lax.scan(jax.checkpoint(block), start, (blocks, jnp.arange(count)))
        return (out / total[..., None]).astype(x.dtype).swapaxes(1, 2)

    def loss(weights, x):
        def layer(x, weight):
            return x + attention((x.reshape(*x.shape[:2], -1) @ weight).reshape(x.shape)), None

        return jnp.mean(lax.scan(layer, x, weights)[0].astype(jnp.float32))

    side = heads * width
    x = shape(batch, length, heads, width, dtype="bfloat16")
    return loss, (shape(LAYERS, side, side, dtype="bfloat16"), x)


@program("rows of neighbours, concatenated")
def _edges():
    def loss(params, x, neighbours):
        for first, second in params:
            near = x[neighbours]
            own = jnp.broadcast_to(x[:, None], near.shape)
            edges = jax.nn.relu(jnp.concatenate([near - own, own], -1) @ first)
            x = x + jnp.max(jax.nn.relu(edges @ second), 1)
        return jnp.mean(jnp.square(x))

    params = [(shape(128, 64), shape(64, 64))] * 8
    return loss, (params, shape(ROWS, 64), shape(ROWS, 16, dtype="int32"))


@program("convolutions by Fourier transforms")
def _fourier():
    def layer(x, params):
        kernel, mix = params
        wave = jnp.fft.rfft(x, n=2 * x.shape[1], axis=1) * jnp.fft.rfft(
            kernel, n=2 * x.shape[1], axis=0
        )
        return x + jax.nn.gelu(jnp.fft.irfft(wave, axis=1)[:, : x.shape[1]]) @ mix

    return layers(layer, (shape(2_048, 128), shape(128, 128)), shape(8, 2_048, 128))


@program("a loss of short-time Fourier transforms")
def _spectra():
    def loss(made, heard):
        def spectrum(wave, size):
            return jnp.abs(jax.scipy.signal.stft(wave, nperseg=size)[2]) + 1e-6

        return sum(
            jnp.mean(jnp.abs(jnp.log(spectrum(made, size)) - jnp.log(spectrum(heard, size))))
            for size in (512, 1_024, 2_048)
        )

    return loss, (shape(16, 131_072), shape(16, 131_072))


@program("an activation of a sum of two matmuls")
def _low_rank():
    def loss(trained, frozen, x):
        for (down, up), weight in zip(trained, frozen, strict=True):
            rows = normalised(x)
            x = x + jax.nn.silu(rows @ weight + (rows @ down) @ up)
        return jnp.mean(jnp.square(x))

    trained = [(shape(WIDTH, 8), shape(8, WIDTH))] * LAYERS
    return loss, (trained, [shape(WIDTH, WIDTH)] * LAYERS, shape(ROWS, WIDTH))


@program("matmuls of few rows and columns")
def _few():
    return layers(lambda x, w: x + jax.nn.gelu(normalised(x) @ w), shape(512, 512), shape(512, 512))


@program("gradients of weights in large parts")
def _large_parts():
    def layer(x, weights):
        return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])

    weights = (shape(512, 512, dtype="bfloat16"),) * 2
    return layers(layer, weights, shape(4_096, 512, dtype="bfloat16"))


@program("an activation added to what is normalised")
def _activated():
    return layers(
        lambda x, w: x + jax.nn.gelu(normalised(x) @ w), shape(512, 512), shape(ROWS, 512)
    )


@program("several batches through one network")
def _siamese():
    def embedded(params, x):
        for kernel in params:
            x = jax.nn.relu(lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.mean(x, (2, 3))

    def loss(params, anchor, near, far):
        own, one, other = (embedded(params, x) for x in (anchor, near, far))
        apart = jnp.sum(jnp.square(own - one), -1) - jnp.sum(jnp.square(own - other), -1)
        return jnp.mean(jax.nn.relu(apart + 1))

    # Of an odd number of layers: one more array is there while two batches are recomputed.
    return loss, ([shape(64, 64, 3, 3)] * (LAYERS + 1), *[shape(32, 64, 64, 64)] * 3)


def _loss_of_logits(of_logits: Callable, classes: int, dtype: str = "float32"):
    def loss(weight, x, labels):
        return jnp.mean(of_logits(jnp.tanh(x) @ weight, labels))

    x, labels = shape(8_192, WIDTH, dtype=dtype), shape(8_192, dtype="int32")
    return loss, (shape(WIDTH, classes, dtype=dtype), x, labels)


@program("forces of atoms by their edges")
def _forces():
    atoms, edges, features, molecules = 64, 1_024, 64, 64

    def energy(params, places, kinds, one, other):
        embedding, radial, weights, out = params
        known = (one < atoms) & (other < atoms) & (one != other)
        places = jnp.concatenate([places, jnp.zeros((1, 3))])
        square = jnp.sum(jnp.square(places[one] - places[other]), -1)
        length = jnp.sqrt(jnp.where(known, square, 1.0))
        rings = jnp.exp(-jnp.square(length[:, None] - jnp.linspace(0, 4, 16)[None]))
        x = embedding[kinds]
        for weight in weights:
            padded = jnp.concatenate([x, jnp.zeros((1, features))])
            sent = padded[one] * jnp.tanh(rings @ radial) * known[:, None]
            summed = jax.ops.segment_sum(sent, other, atoms + 1)[:atoms]
            x = x + jax.nn.silu(summed @ weight)
        return jnp.sum(x @ out)

    def loss(params, places, kinds, one, other, energies, forces):
        of_all = jax.vmap(jax.value_and_grad(energy, 1), (None, 0, 0, 0, 0))
        found, slopes = of_all(params, places, kinds, one, other)
        error = jnp.mean(jnp.square(found - energies)) / atoms
        return error + 10 * jnp.mean(jnp.square(slopes + forces))

    weights = [shape(features, features)] * LAYERS
    params = shape(4, features), shape(16, features), weights, shape(features)
    numbers = [shape(molecules, count, dtype="int32") for count in (atoms, edges, edges)]
    places = shape(molecules, atoms, 3)
    return loss, (params, places, *numbers, shape(molecules), places)


@program("logits times the exponential of a parameter")
def _temperature():
    def loss(params, x, labels):
        weight, temperature = params
        logits = (jnp.tanh(x) @ weight) * jnp.exp(temperature)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    x, labels = shape(8_192, WIDTH), shape(8_192, dtype="int32")
    return loss, ((shape(WIDTH, 32_768), shape()), x, labels)


def _similarities(of_logits, dtype):
    """A loss of the similarities of two batches, with a learned temperature."""

    def loss(params, left, right):
        first, second, temperature = params
        left, right = (
            normalised(x.astype(dtype) @ weight.astype(dtype))
            for x, weight in ((left, first), (right, second))
        )
        return of_logits(left @ right.T * jnp.exp(temperature).astype(dtype))

    return loss, ((shape(512, 256), shape(512, 256), shape()), shape(8_192, 512), shape(8_192, 512))


@program("bfloat16 similarities by rows and columns")
def _contrastive():
    def of_logits(logits):
        pairs = jnp.arange(len(logits))
        one, other = (
            optax.softmax_cross_entropy_with_integer_labels(each.astype(jnp.float32), pairs)
            for each in (logits, logits.T)
        )
        return jnp.mean(one + other)

    return _similarities(of_logits, jnp.bfloat16)


@program("a sigmoid of similarities")
def _sigmoid():
    def of_logits(logits):
        return -jnp.mean(jax.nn.log_sigmoid((2 * jnp.eye(len(logits)) - 1) * logits))

    return _similarities(of_logits, jnp.float32)


@program("fixed points by a custom rule")
def _fixed_points():
    """Deep equilibrium layers: a loop that keeps nothing, and a loop in the backward pass."""

    def step(params, z, x):
        return jnp.tanh(z @ params[0] + x @ params[1])

    @jax.custom_vjp
    def solved(params, x):
        return lax.fori_loop(0, 30, lambda _, z: step(params, z, x), jnp.zeros_like(x))

    def forward(params, x):
        z = solved(params, x)
        return z, (params, x, z)

    def backward(kept, cotangent):
        params, x, z = kept
        _, pullback = jax.vjp(lambda z: step(params, z, x), z)
        found = lax.fori_loop(0, 30, lambda _, u: cotangent + pullback(u)[0], cotangent)
        return jax.vjp(lambda params, x: step(params, z, x), params, x)[1](found)

    solved.defvjp(forward, backward)

    def layer(x, params):
        return solved(params[:2], jax.nn.relu(x @ params[2]))

    return layers(layer, (shape(512, 512),) * 3, shape(32_768, 512))


@program("samples at computed places")
def _deformable():
    """Bilinear samples of an image, as in deformable attention."""
    side, width, points = 64, 128, 4

    def sampled(image, rows, columns):
        found = 0.0
        for down in (0, 1):
            for right in (0, 1):
                row = jnp.clip(jnp.floor(rows) + down, 0, side - 1).astype(int)
                column = jnp.clip(jnp.floor(columns) + right, 0, side - 1).astype(int)
                near = (1 - jnp.abs(rows - row)) * (1 - jnp.abs(columns - column))
                found += image[row, column] * near[..., None]
        return found

    def layer(x, params):
        offsets, weights, values, out = params
        places = side * jax.nn.sigmoid(x @ offsets).reshape(len(x), -1, points, 2)
        shares = jax.nn.softmax((x @ weights).reshape(len(x), -1, points), -1)
        images = (x @ values).reshape(len(x), side, side, width)
        found = jax.vmap(sampled)(images, places[..., 0], places[..., 1])
        return x + jnp.einsum("bqkc,bqk->bqc", found, shares) @ out

    params = shape(width, 2 * points), shape(width, points), *[shape(width, width)] * 2
    return layers(layer, params, shape(4, side * side, width))


@program("one-hot labels and bfloat16 logits")
def _one_hot_bfloat16():
    def of_logits(logits, labels):
        labels = jax.nn.one_hot(labels, logits.shape[-1])
        return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels)

    return _loss_of_logits(of_logits, 8_192, "bfloat16")


@program("a softmax written by hand, of bfloat16 logits")
def _by_hand():
    def of_logits(logits, labels):
        logits = logits.astype(jnp.float32)
        weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        weights = weights / jnp.sum(weights, -1, keepdims=True)
        return -jnp.log(jnp.take_along_axis(weights, labels[:, None], -1))

    return _loss_of_logits(of_logits, 8_192, "bfloat16")


@program("an entropy of bfloat16 logits")
def _entropy():
    def of_logits(logits, labels):
        weights = jax.nn.softmax(logits.astype(jnp.float32))
        return -jnp.sum(weights * jnp.log(weights + 1e-9), -1)

    return _loss_of_logits(of_logits, 8_192, "bfloat16")


@program("one-hot labels of the next token")
def _one_hot():
    def loss(weight, x, tokens):
        logits = (jnp.tanh(x) @ weight)[:, :-1]
        return jnp.mean(
            optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], logits.shape[-1]))
        )

    return loss, (shape(WIDTH, 8_192), shape(8, 1_024, WIDTH), shape(8, 1_024, dtype="int32"))


@program("a gradient penalty")
def _penalty():
    def score(params, x):
        for weight in params:
            x = jax.nn.silu(x @ weight)
        return jnp.sum(x)

    def loss(params, x):
        return jnp.mean(jnp.square(jax.grad(score, 1)(params, x)))

    return loss, ([shape(512, 512)] * LAYERS, shape(ROWS, 512))


@program("matmuls of many small vectors")
def _vectors():
    def layer(x, w):
        mixed = jax.nn.silu(jnp.einsum("ehk,hk->eh", x, w))
        return x + jnp.tanh(mixed)[..., None] * w

    return layers(layer, shape(8, 16), shape(131_072, 8, 16))


@program("a Gaussian process")
def _process():
    def loss(params, x, y):
        scale, noise = params
        apart = jnp.sum(jnp.square((x[:, None] - x[None]) / scale), -1)
        root = jnp.linalg.cholesky(jnp.exp(-apart) + (noise**2 + 1e-3) * jnp.eye(len(x)))
        solved = jax.scipy.linalg.cho_solve((root, True), y)
        return y @ solved / 2 + jnp.sum(jnp.log(jnp.diag(root)))

    return loss, ((shape(4), shape()), shape(4_096, 4), shape(4_096))


@program("one query over many keys")
def _query():
    def loss(params, query, keys):
        for into_key, into_value in params:
            weights = jax.nn.softmax(jnp.einsum("bd,bkd->bk", query, keys @ into_key) / 16, axis=-1)
            query = query + jnp.einsum("bk,bkd->bd", weights, keys @ into_value)
        return jnp.mean(jnp.square(query))

    return loss, ([(shape(256, 256),) * 2] * LAYERS, shape(16, 256), shape(16, 4_096, 256))


@program("sums into few rows")
def _segments():
    def loss(params, x, rows):
        for weight in params:
            x = jax.nn.relu(x @ weight)
            sums = jax.ops.segment_sum(x, rows, num_segments=64)
            x = x + sums[rows]
        return jnp.mean(jnp.square(x))

    return loss, ([shape(256, 256)] * LAYERS, shape(65_536, 256), shape(65_536, dtype="int32"))


@program("linear attention in chunks")
def _linear():
    def layer(x, params):
        batch, length, side = x.shape
        heads = [(x @ w).reshape(batch, length // 64, 64, 4, side // 4) for w in params[:3]]
        query, key, value = jax.nn.softplus(heads[0]), jax.nn.softplus(heads[1]), heads[2]

        def chunk(state, given):
            query, key, value = given
            scores = jnp.tril(jnp.einsum("bthd,bshd->bhts", query, key))
            out = jnp.einsum("bthd,bhde->bthe", query, state)
            out = out + jnp.einsum("bhts,bshe->bthe", scores, value)
            return state + jnp.einsum("bshd,bshe->bhde", key, value), out

        start = jnp.zeros((batch, 4, side // 4, side // 4))
        given = [one.swapaxes(0, 1) for one in (query, key, value)]
        _, out = lax.scan(chunk, start, tuple(given))
        return x + normalised(out.swapaxes(0, 1).reshape(x.shape)) @ params[3]

    return layers(layer, (shape(256, 256),) * 4, shape(8, 2_048, 256))


@program("a DenseNet without bottlenecks")
def _dense():
    """Each layer normalises and convolves all that those before it made (Huang et al. 2017)."""
    growth, images = 16, shape(32, 64, 64, 32)

    def loss(params, x):
        for kernel, scale, offset in params:
            y = x - jnp.mean(x, (0, 1, 2))
            y = y * lax.rsqrt(jnp.mean(jnp.square(y), (0, 1, 2)) + 1e-5)
            y = jax.nn.relu(y * scale + offset)
            numbers = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            x = jnp.concatenate([x, y], -1)
        return jnp.mean(jnp.square(x))

    widths = [32 + growth * at for at in range(8)]
    return loss, ([(shape(3, 3, w, growth), shape(w), shape(w)) for w in widths], images)


@program("a norm of bfloat16 images by hand")
def _instance_norm():
    """In float32, over the image, after a convolution in bfloat16."""

    def layer(x, params):
        kernel, scale, offset = params
        y = lax.conv_general_dilated(
            x, kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).astype(jnp.float32)
        y = y - jnp.mean(y, (1, 2), keepdims=True)
        y = y * lax.rsqrt(jnp.mean(jnp.square(y), (1, 2), keepdims=True) + 1e-5)
        return jax.nn.relu(y * scale + offset).astype(x.dtype)

    images = shape(16, 64, 64, 128, dtype=jnp.bfloat16)
    return layers(layer, (shape(3, 3, 128, 128), shape(128), shape(128)), images)


@program("strided convolutions of a tanh")
def _strided_tanh():
    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(
                lax.conv_general_dilated(
                    x, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
                )
            )
        return jnp.mean(x**2)

    return loss, ([shape(5, 128, 128)] * 5, shape(64, 8_192, 128))


def _pooled(pool: Callable):
    """Convolutions, each with a relu and then a pooling."""

    def loss(kernels, x):
        for kernel in kernels:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            x = pool(jax.nn.relu(x))
        return jnp.mean(x**2)

    sizes = (3, 32, 48, 64, 64)
    kernels = [shape(5, 5, *pair) for pair in itertools.pairwise(sizes)]
    return loss, (kernels, shape(512, 64, 64, 3))


@program("convolutions with a relu and a pooling")
def _max_pool():
    window = (1, 2, 2, 1)
    return _pooled(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"))


@program("convolutions with a relu and a maximum of folded axes")
def _folded():
    def pool(x):
        rows, height, width, channels = x.shape
        folded = x.reshape(rows, height // 2, 2, width // 2, 2, channels)
        return jnp.max(folded, (2, 4))

    return _pooled(pool)


@program("a recurrent network with dense heads")
def _heads():
    rows, steps, inner, width = 2_048, 128, 64, 256

    def loss(params, batch):
        def cell(h, given):
            x, begins = given
            h = jnp.where(begins[:, None], 0.0, h)
            reset, update = (jax.nn.sigmoid(x @ one + h @ other) for one, other in params["gates"])
            one, other = params["new"]
            h = (1 - update) * jnp.tanh(x @ one + reset * (h @ other)) + update * h
            return h, h

        x = jax.nn.relu(batch["x"] @ params["in"])
        _, states = lax.scan(cell, batch["h"], (x, batch["begins"]))

        def head(first, second, last):
            out = jnp.tanh(jnp.tanh(states @ first) @ second) @ last
            return jnp.mean((out[..., 0] - batch["y"]) ** 2)

        return sum(head(*one) for one in params["heads"])

    square = shape(width, width)
    params = {
        "in": shape(inner, width),
        "gates": [(square, square)] * 2,
        "new": (square, square),
        "heads": [(square, square, shape(width, 1))] * 2,
    }
    batch = {
        "x": shape(steps, rows, inner),
        "begins": shape(steps, rows, dtype="bool"),
        "h": shape(rows, width),
        "y": shape(steps, rows),
    }
    return loss, (params, batch)


@program("a scan with unroll")
def _unrolled():
    def loss(weights, x):
        def layer(x, weight):
            return jnp.tanh(jnp.sin(x @ weight) @ weight), None

        return jnp.mean(lax.scan(layer, jnp.sin(x), weights, unroll=5)[0] ** 2)

    return loss, (shape(12, 256, 256), shape(4_096, 256))


@program("layers of recurrences")
def _recurrences():
    def layer(x, weights):
        def step(state, one):
            state = jnp.tanh(state @ weights[0] + one @ weights[1])
            return state, state

        return lax.scan(step, jnp.zeros_like(x[0]), x)[1]

    return layers(layer, (shape(WIDTH, WIDTH),) * 2, shape(256, 64, WIDTH))


@program("convolutions of a tanh and a global mean")
def _global_mean():
    def loss(kernels, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        for kernel in kernels:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            x = jnp.tanh(x)
        return jnp.mean(x.mean((1, 2)).astype(jnp.float32) ** 2)

    kernel = shape(3, 3, 64, 64, dtype=jnp.bfloat16)
    return loss, ([kernel] * 4, shape(32, 64, 64, 64, dtype=jnp.bfloat16))
