"""Training curves with small optimizer state, against float32's.

Two tasks, each with a network of two widths, AdamW with a warm-up and a cosine decay to zero,
three seeds. A curve is the loss on a fixed set of 8,192 examples that is not trained on, at ten
places of the training; it is averaged over the seeds. Batches and labels have noise, so that the
losses have a floor that is not zero. The standard error is that of the difference from float32
with the same seed, over the seeds; "fp32, one ulp away" (parameters times 1 + 2^-23 at the start)
is how far float32 gets from itself.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks._record import record
from jaxmem.optim import half_params, small_moments

STEPS, BATCH, HELD_OUT, PLACES, SEEDS = 600, 128, 8192, 10, 3
KINDS = {
    "fp32, one ulp away": lambda tx: tx,
    "8-bit moments": small_moments,
    "bfloat16 moments": lambda tx: small_moments(tx, "bfloat16"),
    "bfloat16 parameters, stochastic": half_params,
    "bfloat16 parameters, stochastic; 8-bit moments": lambda tx: half_params(small_moments(tx)),
    "bfloat16 parameters, compensated; 8-bit moments": lambda tx: half_params(
        small_moments(tx), "compensated"
    ),
}


def digits(key, count):
    """Handwritten digits, a fifth of the labels drawn at random."""
    data = load_digits()
    images, labels = jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)
    rows, noisy, drawn = jax.random.split(key, 3)
    at = jax.random.randint(rows, (count,), 0, len(images))
    wrong = jax.random.bernoulli(noisy, 0.2, (count,))
    return images[at], jnp.where(wrong, jax.random.randint(drawn, (count,), 0, 10), labels[at])


def function(key, count):
    """A smooth function of two numbers in eight, with noise."""
    first, second = jax.random.split(key)
    x = jax.random.uniform(first, (count, 8), jnp.float32, -1, 1)
    return x, jnp.sin(2 * x[:, :2].sum(-1)) + 0.5 * jax.random.normal(second, (count,), jnp.float32)


def loss_fn(params, batch):
    x, wanted = batch
    for w in params[:-1]:
        x = jnp.tanh(x @ w.astype(jnp.float32))
    y = x @ params[-1].astype(jnp.float32)
    if jnp.issubdtype(wanted.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(y, wanted).mean()
    return jnp.mean((y[:, 0] - wanted) ** 2)


def curves(task, sizes, wrap, dtype, scale) -> np.ndarray:
    """The held-out loss by seed and place."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, STEPS // 20, STEPS)
    optimizer = wrap(optax.adamw(rate))

    def step(carry, key):
        params, state = carry
        gradient = jax.grad(loss_fn)(params, task(key, BATCH))
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train(seed):
        first, second = jax.random.split(jax.random.key(seed))
        shapes = list(itertools.pairwise(sizes))
        keys = jax.random.split(first, len(shapes))
        params = [
            (scale * jax.random.normal(k, s, jnp.float32) / s[0] ** 0.5).astype(dtype)
            for k, s in zip(keys, shapes, strict=True)
        ]
        held_out = task(jax.random.key(10_000), HELD_OUT)

        def part(carry, keys):
            carry, _ = jax.lax.scan(step, carry, keys)
            return carry, loss_fn(carry[0], held_out)

        keys = jax.random.split(second, (PLACES, STEPS // PLACES))
        return jax.lax.scan(part, (params, optimizer.init(params)), keys)[1]

    return np.array([train(seed) for seed in range(SEEDS)], np.float64)


def compare(task, width: int) -> list[dict]:
    sizes = (64, width, width, 10) if task is digits else (8, width, width, 1)
    plain = curves(task, sizes, lambda tx: tx, jnp.float32, np.float32(1))
    rows = []
    for name, wrap in KINDS.items():
        dtype = jnp.bfloat16 if "parameters" in name else jnp.float32
        scale = np.float32(1 + 2**-23 if "ulp" in name else 1)
        mine = curves(task, sizes, wrap, dtype, scale)
        curve = mine.mean(0) / plain.mean(0) - 1
        error = (mine - plain)[:, -1].std(ddof=1) / SEEDS**0.5 / plain[:, -1].mean()
        rows.append(
            {
                "task": f"{task.__name__}, width {width}",
                "state": name,
                "fp32, first": f"{plain[:, 0].mean():.4f}",
                "fp32, last": f"{plain[:, -1].mean():.4f}",
                "last, against fp32": f"{curve[-1]:+.2%}",
                "its standard error": f"{error:.2%}",
                "largest difference of the curve": f"{curve[np.abs(curve).argmax()]:+.2%}",
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    jax.config.update("jax_platforms", "cpu")
    cases = itertools.product((digits, function), (128, 256))
    rows = list(itertools.chain.from_iterable(compare(task, width) for task, width in cases))
    record(f"Training with small optimizer state: held-out losses of {SEEDS} seeds", rows)


if __name__ == "__main__":
    main()
