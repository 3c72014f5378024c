"""Networks that no constant of the planner was chosen by: those of packages, as their authors wrote
them. Each is a function of a policy: None for the network as it is, or one of
`jax.checkpoint_policies` for each of its repeated blocks under it."""

import functools
import importlib
import os
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp


def package(name: str):
    """A package that only these networks need."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"This network is made of {name.partition('.')[0]}, which is not here ({error}): "
            'pip install -e ".[held-out]"'
        ) from error


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def lstm(policy=None, batch=64, length=256, width=1024, layers=4, words=10_000):
    """Flax's LSTM as a language model."""
    layer = nn.remat(nn.RNN, policy=policy) if policy else nn.RNN

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(words, width)(tokens)
            for _ in range(layers):
                x = layer(nn.OptimizedLSTMCell(width))(x)
            return nn.Dense(words)(x)

    net, tokens = Model(), shape(batch, length, dtype=jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    return lambda params, tokens: cross_entropy(net.apply(params, tokens), tokens), (params, tokens)


def t5(policy=None, batch=16, length=512):
    """T5-small, with dropout. Its package calls `jnp.clip` with a name that jax no longer has, and
    traces a flag of its blocks under `nn.remat`: both are mended here."""
    module = package("transformers.models.t5.modeling_flax_t5")
    config = package("transformers").T5Config(
        d_model=512, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.1
    )
    tokens, mask = shape(batch, length, dtype=jnp.int32), shape(batch, length, dtype=jnp.int32)
    clip = jnp.clip

    def remat(block, static_argnums):
        return nn.remat(block, policy=policy, static_argnums=(*static_argnums, 9))

    named = mock.patch.object(jnp, "clip", lambda x, a_min=None, a_max=None: clip(x, a_min, a_max))

    def loss(params, tokens, mask, key):
        with mock.patch.object(module, "remat", remat), named:
            net = module.FlaxT5ForConditionalGenerationModule(
                config, gradient_checkpointing=policy is not None
            )
            logits = net.apply(
                params, tokens, mask, tokens, mask, deterministic=False, rngs={"dropout": key}
            )[0]
        return cross_entropy(logits, tokens)

    net = module.FlaxT5ForConditionalGenerationModule(config)
    with named:
        params = jax.eval_shape(net.init, jax.random.key(0), tokens, mask, tokens, mask)
    return loss, (params, tokens, mask, jax.eval_shape(lambda: jax.random.key(0)))


def clip(policy=None, batch=256):
    """CLIP's two towers: ViT-B/32 of half the depth, and the text model of the same depth."""
    module = package("transformers.models.clip.modeling_flax_clip")
    transformers = package("transformers")
    text = transformers.CLIPTextConfig(num_hidden_layers=6)
    vision = transformers.CLIPVisionConfig(num_hidden_layers=6)
    config = transformers.CLIPConfig.from_text_vision_configs(text, vision)
    config.text_config, config.vision_config = text, vision
    plain = module.FlaxCLIPEncoderLayer

    class Layer(plain):
        def __call__(self, x, mask, deterministic=True, output_attentions=False):
            def call(layer, x, mask):
                return plain.__call__(layer, x, mask, deterministic, output_attentions)

            return nn.remat(call, policy=policy)(self, x, mask)

    tokens = shape(batch, 77, dtype=jnp.int32)
    args = (tokens, shape(batch, 224, 224, 3), tokens, tokens)

    def loss(params, *args):
        with mock.patch.object(module, "FlaxCLIPEncoderLayer", Layer if policy else plain):
            logits = module.FlaxCLIPModule(config).apply(params, *args, return_dict=True)
        scores, pairs = logits.logits_per_text, jnp.arange(batch)
        return (cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs)) / 2

    params = jax.eval_shape(module.FlaxCLIPModule(config).init, jax.random.key(0), *args)
    return loss, (params, *args)


def haiku_resnet(policy=None, batch=64):
    """Haiku's ResNet50."""
    hk = package("haiku")
    plain = hk.nets.ResNet.BlockV1.__call__

    def call(self, x, is_training, test_local_stats):
        run = functools.partial(
            plain, self, is_training=is_training, test_local_stats=test_local_stats
        )
        return hk.remat(run, policy=policy)(x)

    def forward(images):
        with mock.patch.object(hk.nets.ResNet.BlockV1, "__call__", call if policy else plain):
            return hk.nets.ResNet50(1000)(images, is_training=True)

    net = hk.transform_with_state(forward)
    images, labels = shape(batch, 224, 224, 3), shape(batch, dtype=jnp.int32)
    params, state = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(params, state, images, labels):
        logits, state = net.apply(params, state, None, images)
        return cross_entropy(logits, labels), state

    return loss, (params, state, images, labels)


def convnext(policy=None, batch=32):
    """ConvNeXt-Tiny of Keras 3. Its layers are one functional model: no block takes a policy."""
    if policy:
        return None
    keras = package("keras")
    net = keras.applications.ConvNeXtTiny(weights=None)
    images, labels = shape(batch, 224, 224, 3), shape(batch, dtype=jnp.int32)
    trained = [shape(*one.shape) for one in net.trainable_variables]
    rest = [shape(*one.shape, dtype=one.dtype) for one in net.non_trainable_variables]

    def loss(trained, rest, images, labels):
        probabilities, rest = net.stateless_call(trained, rest, images, training=False)
        return cross_entropy(jnp.log(probabilities + 1e-7), labels)

    return loss, (trained, rest, images, labels)


def graph_network(policy=None, nodes=20_000, edges=100_000, width=128, steps=8):
    """Interaction networks of jraph, as they simulate particles: messages add up at each node."""
    jraph = package("jraph")

    def mlp(params, x):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        x = x @ w + b
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def step(params, graph):
        network = jraph.InteractionNetwork(
            lambda edges, sent, got: mlp(params["edge"], jnp.concatenate([edges, sent, got], -1)),
            lambda nodes, received: mlp(params["node"], jnp.concatenate([nodes, received], -1)),
        )
        new = network(graph)
        return new._replace(nodes=new.nodes + graph.nodes, edges=new.edges + graph.edges)

    if policy:
        step = jax.checkpoint(step, policy=policy)

    def layers(inputs):
        return [
            (shape(rows, columns), shape(columns))
            for rows, columns in ((inputs * width, width), (width, width), (width, width))
        ]

    def loss(params, features, of_edges, senders, receivers, targets):
        graph = jraph.GraphsTuple(
            mlp(params["nodes"], features), mlp(params["edges"], of_edges), receivers, senders,
            None, jnp.array([nodes]), jnp.array([edges]),
        )  # fmt: skip
        for one in params["steps"]:
            graph = step(one, graph)
        return jnp.mean((graph.nodes @ params["out"] - targets) ** 2)

    params = {
        "nodes": layers(1),
        "edges": layers(1),
        "steps": [{"edge": layers(3), "node": layers(2)} for _ in range(steps)],
        "out": shape(width, 3),
    }
    ends = shape(edges, dtype=jnp.int32)
    features = shape(nodes, width), shape(edges, width), ends, ends, shape(nodes, 3)
    return loss, (params, *features)


def unet3d(policy=None, batch=2, side=64, channels=(16, 32, 64, 128)):
    """A 3-D U-Net of Equinox's layers."""
    eqx = package("equinox")

    class Double(eqx.Module):
        first: eqx.nn.Conv3d
        second: eqx.nn.Conv3d
        norms: list

        def __init__(self, inputs, outputs, key):
            self.first = eqx.nn.Conv3d(inputs, outputs, 3, padding=1, key=key)
            self.second = eqx.nn.Conv3d(outputs, outputs, 3, padding=1, key=key)
            self.norms = [eqx.nn.GroupNorm(8, outputs), eqx.nn.GroupNorm(8, outputs)]

        def __call__(self, x):
            x = jax.nn.relu(self.norms[0](self.first(x)))
            return jax.nn.relu(self.norms[1](self.second(x)))

    class UNet(eqx.Module):
        down: list
        up: list
        grow: list
        pool: eqx.nn.MaxPool3d
        out: eqx.nn.Conv3d

        def __init__(self, key):
            pairs = list(zip((1, *channels), channels, strict=False))
            self.down = [Double(a, b, key) for a, b in pairs]
            back = list(zip(channels[:0:-1], channels[-2::-1], strict=True))
            self.grow = [eqx.nn.ConvTranspose3d(a, b, 2, 2, key=key) for a, b in back]
            self.up = [Double(2 * b, b, key) for _, b in back]
            self.pool = eqx.nn.MaxPool3d(2, 2)
            self.out = eqx.nn.Conv3d(channels[0], 2, 1, key=key)

        def __call__(self, x, run):
            kept = []
            for at, block in enumerate(self.down):
                x = run(block, self.pool(x) if at else x)
                kept.append(x)
            for grow, block, skip in zip(self.grow, self.up, kept[-2::-1], strict=True):
                x = run(block, jnp.concatenate([skip, grow(x)]))
            return self.out(x)

    def run(block, x):
        if policy is None:
            return block(x)
        arrays, rest = eqx.partition(block, eqx.is_array)
        call = jax.checkpoint(lambda arrays, x: eqx.combine(arrays, rest)(x), policy=policy)
        return call(arrays, x)

    net = eqx.filter_eval_shape(UNet, jax.random.key(0))
    arrays, rest = eqx.partition(net, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(arrays, images, masks):
        model = eqx.combine(arrays, rest)
        logits = jax.vmap(lambda x: model(x, run))(images)
        return cross_entropy(jnp.moveaxis(logits, 1, -1), masks)

    sides = (side,) * 3
    return loss, (arrays, shape(batch, 1, *sides), shape(batch, *sides, dtype=jnp.int32))


NETWORKS = {
    "LSTM (Flax)": lstm,
    "T5-small (transformers)": t5,
    "CLIP, two towers (transformers)": clip,
    "ResNet50 (Haiku)": haiku_resnet,
    "ConvNeXt-Tiny (Keras)": convnext,
    "graph network (jraph)": graph_network,
    "3-D U-Net (Equinox)": unet3d,
}
