"""Random networks of realistic widths, each with a plan: none is refused, none leaves its budget.

Nothing is compiled or run. Rules for widths that kernels are written for (multiples of 64, rows of
tables, groups of features) are beyond the reach of the small arrays of tests/test_fuzz.py.
``JAXMEM_FUZZ`` is twice the number of networks; ``make fuzz`` plans fifty times as many.
"""

import os
import random

import jax
import jax.numpy as jnp
import pytest

import jaxmem

NETWORKS = int(os.environ.get("JAXMEM_FUZZ", "400")) // 2
WIDTHS = [1, 3, 8, 16, 64, 128, 192, 256]
TARGETS = ["h100", "a100-80gb", "rtx-4090", "t4", "v5e"]
DTYPES = ["float32", "bfloat16", "float16"]
MOST = 512  # features, of which the first are kept


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


ACTIVATIONS = [
    *[jnp.tanh, jax.nn.relu, jax.nn.gelu, jnp.sin, jax.nn.silu, jnp.square, jax.nn.softmax],
    *[normalized, lambda x: x * 2 + 1],
]


class Layers:
    """What layers are made of: ``weight`` makes or gives the next parameter, ``pick`` chooses."""

    def __init__(self, weight, rows, indices, pick):
        self.weight, self.rows, self.indices, self.pick = weight, rows, indices, pick

    def flat(self, x):
        return x.reshape(self.rows, -1)

    def dense(self, x, _):
        return x @ self.weight(x.shape[-1], self.pick(WIDTHS))

    def activated(self, x, _):
        return self.pick(ACTIVATIONS)(x)

    def flattened(self, x, _):
        return self.flat(x)

    def beside(self, x, y):
        return jnp.concatenate([self.flat(x), self.flat(y)], -1)

    def half(self, x, _):
        x = self.flat(x)
        return self.pick(jnp.split(x, [x.shape[1] // 2], -1)) if x.shape[1] % 2 == 0 else x

    def grouped(self, x, _):
        x = self.flat(x)
        groups = [count for count in (1, 2, 4, 8) if x.shape[1] % count == 0]
        return x.reshape(self.rows, self.pick(groups), -1)

    def turned(self, x, _):
        return self.flat(jnp.swapaxes(x, -1, -2)) if x.ndim == 3 else x

    def rows_of_a_table(self, x, _):
        return self.flat(self.weight(100, self.pick(WIDTHS))[self.indices])

    def summed(self, x, _):
        return self.pick([x.sum(-1, keepdims=True) * x, x + jnp.mean(x, 0, keepdims=True)])

    def pairs(self, x, _):
        if x.ndim == 2:
            return x @ x[:32].T
        weights = self.weight(*x.shape[1:], 16)
        between, within = jnp.einsum("bij,bkj->bik", x, x), jnp.einsum("bhi,hio->bho", x, weights)
        return self.pick([between, within])

    def scanned(self, x, _):
        x = self.flat(x)
        weights = self.weight(3, x.shape[1], x.shape[1])
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), x, weights)[0]

    def gated(self, x, y):
        x, y = self.flat(x), self.flat(y)
        width = min(x.shape[1], y.shape[1])
        return self.pick(ACTIVATIONS)(x[:, :width]) * y[:, :width]


KINDS = [name for name in vars(Layers) if not name.startswith("_") and name != "flat"]


def network(seed, dtype):
    """A random loss and its arguments."""
    rows = random.Random(seed).choice([32, 256, 4096])
    shapes: list[tuple[int, ...]] = []

    def run(weight, arrays, indices):
        dice = random.Random(seed)
        layers = Layers(weight, rows, indices, dice.choice)
        pool = list(arrays)
        for _ in range(dice.randint(4, 14)):
            kind = dice.choice([*KINDS, "dense", "dense", "activated"])
            x, y = dice.choice(pool[-3:]), dice.choice(pool)
            made = getattr(layers, kind)(x, y)
            pool.append(made if made.size <= rows * MOST else layers.flat(made)[:, :MOST])
        return sum(jnp.mean(jnp.square(one.astype(jnp.float32))) for one in pool[-2:])

    def noted(*shape):
        shapes.append(shape)
        return jnp.zeros(shape, dtype)

    widths = random.Random(seed + 1)
    arrays = [(rows, widths.choice(WIDTHS)) for _ in range(2)]
    arrays.append((rows, widths.choice([2, 8]), widths.choice([8, 16, 64])))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in arrays]
    indices = jax.ShapeDtypeStruct((rows, 3), "int32")
    jax.eval_shape(lambda *args: run(noted, *args), arrays, indices)

    def loss(weights, arrays, indices):
        given = iter(weights)
        return run(lambda *_: next(given), arrays, indices)

    weights = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return loss, (weights, arrays, indices)


@pytest.mark.parametrize("part", range(8))
def test_random_networks_have_plans(part):
    for seed in range(part, NETWORKS, 8):
        dtype, target = DTYPES[seed % 3], TARGETS[seed % 5]
        loss, args = network(seed, dtype)
        if not args[0]:
            continue
        plan = jaxmem.plan(loss, *args, target=target, compilations=0)
        # Its own derivatives of what is computed in a wider dtype, from copies, take more.
        most = 1.5 if plan.widens_bfloat16 else 1.05
        assert plan.projected_bytes <= most * plan.plain_bytes, seed
        assert jax.eval_shape(jax.value_and_grad(plan.apply(loss)), *args)[1], seed
        try:
            within = jaxmem.plan(
                loss, *args, target=target, compilations=0, budget=int(0.7 * plan.plain_bytes)
            )
        except jaxmem.BudgetError:
            continue
        assert within.projected_bytes <= 0.7 * plan.plain_bytes, seed
