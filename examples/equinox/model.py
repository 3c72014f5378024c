"""A residual network of dense layers in Equinox, whose module is a pytree."""

import equinox as eqx
import jax


class Block(eqx.Module):
    """x + W2 gelu(W1 norm(x))."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=first)
        self.down = eqx.nn.Linear(4 * width, width, key=second)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Classifier(eqx.Module):
    """Logits of one example."""

    embed: eqx.nn.Linear
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, inputs: int, classes: int, width: int, depth: int, key):
        keys = jax.random.split(key, depth + 2)
        self.embed = eqx.nn.Linear(inputs, width, key=keys[0])
        self.blocks = [Block(width, key) for key in keys[1:-1]]
        self.head = eqx.nn.Linear(width, classes, key=keys[-1])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
