"""The training steps of published figures, in JAX: ResNet50, BERT, ViT, a U-Net and GPT-2.

Attention writes its scores out and nothing is dropped out: a kernel of its own for attention, as
newer libraries have it, is another program.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks._gpt import GPT
from benchmarks._models import example

HALF = {"fp16": jnp.float16, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Encoder layers as BERT (norms after) and ViT (norms before) have them."""

    layers: int
    width: int
    heads: int
    before: bool = False

    def init(self, key):
        def layer(key):
            keys = jax.random.split(key, 4)
            wide = 4 * self.width
            shapes = [(self.width, 3 * self.width), (self.width, self.width)]
            shapes += [(self.width, wide), (wide, self.width)]
            made = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
            return [(w, jnp.zeros(w.shape[1])) for w in made], [jnp.ones(self.width)] * 4

        return [layer(key) for key in jax.random.split(key, self.layers)]

    def __call__(self, params, x):
        batch, length, width = x.shape
        for (qkv, out, up, down), norms in params:

            def attend(y, qkv=qkv, out=out):
                parts = (y @ qkv[0] + qkv[1]).reshape(batch, length, 3, self.heads, -1)
                mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0))
                return mixed.reshape(batch, length, width) @ out[0] + out[1]

            def dense(y, up=up, down=down):
                return jax.nn.gelu(y @ up[0] + up[1]) @ down[0] + down[1]

            for part, norm in ((attend, norms[:2]), (dense, norms[2:])):
                x = x + part(_norm(x, *norm)) if self.before else _norm(x + part(x), *norm)
        return x


def _norm(x, scale, shift):
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True)
    wide *= jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale + shift


def _half(loss, dtype):
    """A loss whose parameters and images are in another dtype inside."""

    def cast(tree):
        floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda leaf: leaf.astype(dtype) if floating(leaf) else leaf, tree)

    return (lambda params, batch: loss(cast(params), cast(batch))) if dtype else loss


def bert(row, batch: int):
    """Pre-training where the vocabulary is said to be written for masked tokens alone, else
    fine-tuning on questions, with no output but two numbers a token."""
    length, width = int(row["sequence_or_image"]), int(row["width"])
    net = Transformer(int(row["layers"]), width, width // 64)
    masked = {128: 20, 512: 80}.get(length, 0)
    words = int(row["vocab"])

    def init(key):
        embedding = jnp.zeros((words, width)), jnp.zeros((512, width))
        return embedding, net.init(key), jnp.zeros((width, 2))

    def loss(params, batch):
        (tokens, places), layers, out = params
        x = net(layers, tokens[batch["tokens"]] + places[:length])
        if masked:
            x = jnp.take_along_axis(x, batch["masked"][..., None], 1)
            out = tokens.T
        return _cross_entropy(x @ out, batch["labels"])

    params = jax.eval_shape(init, jax.random.key(0))
    shape = (batch, masked or length)
    given = {"tokens": (batch, length), "labels": shape} | ({"masked": shape} if masked else {})
    given = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in given.items()}
    return _half(loss, HALF.get(row["precision"])), params, given


def vit(row, batch: int):
    side = int(row["sequence_or_image"].partition("x")[0])
    patch = int(row["model"].partition("patch")[2][:2])
    width = int(row["width"])
    net = Transformer(int(row["layers"]), width, width // 64, before=True)
    count = (side // patch) ** 2 + 1

    def init(key):
        patches = jnp.zeros((3 * patch**2, width)), jnp.zeros((count, width))
        return patches, net.init(key), jnp.ones((2, width)), jnp.zeros((width, 1000))

    def loss(params, batch):
        (patches, places), layers, norm, out = params
        x = batch["image"].reshape(-1, side // patch, patch, side // patch, patch, 3)
        x = x.swapaxes(2, 3).reshape(-1, count - 1, 3 * patch**2) @ patches
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0))) + places
        return _cross_entropy(_norm(net(layers, x)[:, 0], *norm) @ out, batch["label"])

    params = jax.eval_shape(init, jax.random.key(0))
    return _half(loss, HALF.get(row["precision"])), params, _images(batch, side)


def resnet50(row, batch: int):
    model = example("resnet50")
    net = model.ResNet(dtype=HALF.get(row["precision"]))
    loss_fn = model.make_loss(net)
    given = _images(batch, 224)
    init = lambda x: net.init(jax.random.key(0), x, False)  # noqa: E731
    variables = jax.eval_shape(init, given["image"])
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables["batch_stats"])

    def loss(params, batch):
        return loss_fn(params, batch, model_state=state)[0]

    return loss, variables["params"], given


class _Unpadded(nn.Module):
    """Ronneberger et al. 2015: 3x3 convolutions without padding and norms, 572^2 to 388^2."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        def double(x, features):
            for _ in range(2):
                x = nn.relu(nn.Conv(features, (3, 3), padding="VALID", dtype=self.dtype)(x))
            return x

        skips = []
        for level in range(4):
            skips.append(double(x, 64 << level))
            x = nn.max_pool(skips[-1], (2, 2), (2, 2))
        x = double(x, 1024)
        for level in reversed(range(4)):
            x = nn.ConvTranspose(64 << level, (2, 2), (2, 2), dtype=self.dtype)(x)
            cut = (skips[level].shape[1] - x.shape[1]) // 2
            skip = skips[level][:, cut : cut + x.shape[1], cut : cut + x.shape[2]]
            x = double(jnp.concatenate([skip, x], -1), 64 << level)
        return nn.Conv(2, (1, 1), dtype=self.dtype)(x)


def unet(row, batch: int):
    net = _Unpadded(HALF.get(row["precision"]))
    image = jax.ShapeDtypeStruct((batch, 572, 572, 1), jnp.float32)
    params = jax.eval_shape(lambda x: net.init(jax.random.key(0), x), image)["params"]
    label = jax.ShapeDtypeStruct((batch, 388, 388), jnp.int32)

    def loss(params, batch):
        return _cross_entropy(net.apply({"params": params}, batch["image"]), batch["label"])

    return loss, params, {"image": image, "label": label}


def gpt2(row, batch: int):
    length = int(row["sequence_or_image"])
    width, words = int(row["width"]), int(row["vocab"])
    net = GPT(width, int(row["layers"]), width // 64, length, words)

    def init(key):
        return net.embedding(key), [net.layer(key) for _ in range(net.depth)], net.head(key)

    def loss(params, batch):
        embedding, layers, head = params
        x = net.embed(embedding, batch["tokens"])
        for layer in layers:
            x = net.block(layer, x)
        return net.loss(head, (x, batch["labels"]))

    shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(init, jax.random.key(0))
    return _half(loss, HALF.get(row["precision"])), params, {"tokens": shape, "labels": shape}


def _cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _images(batch: int, side: int):
    image = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    return {"image": image, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}


MODELS = {"bert": bert, "gpt2": gpt2, "resnet50": resnet50, "unet": unet, "vit": vit}
OPTIMIZERS = {
    "bert": optax.lamb(1e-3),
    "gpt2": optax.adamw(1e-3),
    "resnet50": optax.sgd(0.1, momentum=0.9),
    "unet": optax.adam(1e-3),
    "vit": optax.sgd(0.1, momentum=0.9),
}
