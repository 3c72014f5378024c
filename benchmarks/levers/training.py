"""Losses of two models trained in float32, bfloat16 and float16, on the same batches.

The digits ResNet of examples/resnet50 and the character transformer of examples/characters, both
unmodified float32 models cast by `jaxmem.train_step`. The loss is the mean training loss of the
last tenth of the steps, averaged over the seeds. "1% overflows" makes the gradients of every
hundredth step infinite.

Training amplifies rounding, and a difference below that of float32 from itself says nothing: "fp32,
one ulp away" starts from parameters times 1 + 2^-23. At a learning rate of 0.1 the ResNet's loss at
the end (0.08) moves by 6% from that alone, so it trains here at 0.01, where it moves by less than
1% for each seed. Low precision moves each of its seeds by about 1% up or down all the same, so that
three of them may be 1% off by chance: it has twelve. "standard error" is that of the mean over
seeds of the difference from float32, "range over seeds" that difference's.

``python -m benchmarks.levers.training digits`` runs one of them, and keeps the other's rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmem
from benchmarks._models import example
from benchmarks._record import record_parts

SEEDS = {"characters": 3, "digits": 12}
VARIANTS = {
    "fp32": "fp32",
    "fp32, one ulp away": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp16, 1% overflows": "fp16",
}


def overflowing(loss_fn):
    """The loss, infinite in the batches that say so."""

    def wrapped(params, batch, **given):
        results = loss_fn(params, batch, **given)
        factor = jnp.where(batch["overflow"][0], jnp.inf, 1.0).astype(jnp.float32)
        if isinstance(results, tuple):
            return (results[0] * factor, *results[1:])
        return results * factor

    return wrapped


def characters(seed: int, steps: int):
    """Loss function, optimizer, what init takes, and batches by step."""
    transformer, text = example("characters", "transformer"), example("characters", "train").Text()
    model = transformer.Transformer(len(text.alphabet), 32, nnx.Rngs(seed), width=32)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return transformer.loss_fn, optimizer, ((model,), {}), lambda i: text.batch(16, 32, seed, i)


def digits(seed: int, steps: int):
    """The same for the ResNet, a narrow one on 16x16 images."""
    model_file, data = example("resnet50", "model"), example("resnet50", "train").Digits(True, 16)
    model = model_file.ResNet(sizes=(1, 1), width=8, classes=10)
    image = jnp.zeros((1, 16, 16, 3), jnp.float32)
    variables = jax.jit(model.init, static_argnums=2)(jax.random.key(seed), image, True)
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.01, steps // 10, steps)
    images = [data[index] for index in range(len(data))]

    def batch(step):
        chosen = np.random.default_rng([seed, step]).integers(0, len(images), 64)
        return {name: np.stack([images[i][name] for i in chosen]) for name in images[0]}

    given = (variables["params"],), {"model_state": variables["batch_stats"]}
    return model_file.make_loss(model), optax.sgd(rate, momentum=0.9), given, batch


def train(task, variant: str, steps: int, seeds: int) -> tuple[np.ndarray, int]:
    """The loss at the end for each seed, and how many updates were skipped in all."""
    precision, step, losses, skipped = VARIANTS[variant], None, [], 0
    scaling = jaxmem.LossScale(growth_interval=100) if precision == "fp16" else None
    for seed in range(seeds):
        loss_fn, optimizer, (args, kwargs), batch_of = task(seed, steps)
        if step is None:  # compiled once for all seeds
            step = jaxmem.train_step(
                overflowing(loss_fn), optimizer, precision=precision, loss_scale=scaling
            )
        state, seen = step.init(*args, **kwargs), []
        if "ulp" in variant:
            nudged = jax.tree.map(lambda leaf: leaf * np.float32(1 + 2**-23), state.params)
            state = state._replace(params=nudged)
        for index in range(steps):
            bad = "overflows" in variant and index % 100 == 50
            state, metrics = step(state, {**batch_of(index), "overflow": np.array([bad])})
            seen.append(metrics["loss"])
        last = np.array(seen[-(steps // 10) :], np.float64)
        losses.append(last[np.isfinite(last)].mean())
        skipped += 0 if scaling is None else int(state.loss_scale.skipped)
    return np.array(losses), skipped


def compare(task, steps: int) -> list[dict]:
    rows, plain, seeds = [], None, SEEDS[task.__name__]
    for variant in VARIANTS:
        losses, skipped = train(task, variant, steps, seeds)
        plain = losses if plain is None else plain
        each = losses / plain - 1
        rows.append(
            {
                "model": task.__name__,
                "precision": variant,
                "steps": steps,
                "seeds": seeds,
                "loss": f"{losses.mean():.4f}",
                "against fp32": f"{losses.mean() / plain.mean() - 1:+.2%}",
                "standard error": f"{each.std(ddof=1) / seeds**0.5:.2%}",
                "range over seeds": f"{each.min():+.2%} to {each.max():+.2%}",
                "skipped": skipped,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    jax.config.update("jax_platforms", "cpu")
    record_parts(
        "Training in low precision: mean training loss of the last tenth of the steps",
        "model",
        list(TASKS),
        lambda name: compare(*TASKS[name]),
        "Computed on a CPU, where XLA emulates bfloat16 and float16 with the same rounding.",
    )


TASKS = {"characters": (characters, 400), "digits": (digits, 300)}

if __name__ == "__main__":
    main()
