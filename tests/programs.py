"""Training steps of five kinds and two transformers, small, as ``(step, args, number of GPUs)``."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem


def array(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def budget_at(plan_for, share):
    """A budget for `jaxmem.plan`: the lowest that it names, and such a share of the way from there
    to the bytes of the function as it is."""
    with pytest.raises(jaxmem.BudgetError) as told:
        plan_for(budget="1B")
    lowest, plain = told.value.lowest, plan_for().plain_bytes
    return f"{int(lowest + share * max(plain - lowest, 0))}B"


def tanh_layers(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def tanh_apart(weights, x):
    """The mean square of what some matrices make of rows, one after the other."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def mlp():
    step = jaxmem.train_step(tanh_layers, optax.adam(1e-3))
    params = {"layers": [array(256, 256)] * 4}
    batch = {name: array(2048, 256) for name in "xy"}
    return step, (jaxmem.eval_shape(step.init, params), batch), 1


def host_offload():
    step = jaxmem.train_step(tanh_layers, jaxmem.offload(optax.adam(1e-3)))
    params = {"layers": [array(512, 512)] * 4}
    batch = {name: array(256, 512) for name in "xy"}
    return step, (jaxmem.eval_shape(step.init, params), batch), 1


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Conv(32, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def cnn():
    model = CNN()

    def loss_fn(params, batch, *, model_state):
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, new["batch_stats"]

    step = jaxmem.train_step(loss_fn, optax.sgd(0.1, momentum=0.9))
    image = array(16, 32, 32, 3)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)

    def init(variables):
        return step.init(variables["params"], model_state=variables["batch_stats"])

    batch = {"image": image, "label": array(16, dtype=jnp.int32)}
    return step, (jaxmem.eval_shape(init, variables), batch), 1


def _trained(loss_fn, optimizer):
    """A plain jitted step, as one writes it without jaxmem."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def scan_transformer(width=128, layers=4, batch=4, length=128, vocabulary=512):
    heads = 4

    def split(x):
        return x.reshape(batch, length, heads, width // heads)

    @jax.checkpoint
    def block(x, p):
        h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = map(split, jnp.split(h @ p["qkv"], 3, -1))
        attention = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bhts,bshd->bthd", attention, v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss_fn(params, tokens):
        x = params["embed"][tokens]
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        logits = x[:, :-1] @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {
        "embed": array(vocabulary, width),
        "layers": {name: array(layers, *shape) for name, shape in shapes.items()},
    }
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    return _trained(loss_fn, optimizer), (params, state, array(batch, length, dtype=jnp.int32)), 1


def fsdp():
    sharding = NamedSharding(AbstractMesh((8,), ("data",)), PartitionSpec("data"))

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def sharded(tree):
        return jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype, sharding=sharding), tree)

    optimizer = optax.sgd(0.1, momentum=0.9)
    params = [array(512, 512)] * 4
    state = jax.eval_shape(optimizer.init, params)
    args = (sharded(params), sharded(state), sharded(array(1024, 512)))
    return _trained(loss_fn, optimizer), args, 8


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, vocabulary, width, layers, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(layers)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def nnx_transformer():
    abstract = nnx.eval_shape(lambda: Transformer(512, 128, 2, nnx.Rngs(0)))
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params, rest)(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.adam(1e-3)
    args = (params, jax.eval_shape(optimizer.init, params), array(4, 128, dtype=jnp.int32))
    return _trained(loss_fn, optimizer), args, 1


FIVE = (mlp, cnn, scan_transformer, fsdp, host_offload)


def report(program) -> jaxmem.MemoryReport:
    step, args, count = program()
    return jaxmem.memory(step, *args, target=jaxmem.target("h200", count=count))
