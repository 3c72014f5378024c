"""Losses of two models trained in float32, bfloat16 and float16, on the same batches.

The digits ResNet of examples/resnet50 and the character transformer of examples/characters, both
unmodified float32 models cast by `jaxmem.train_step`. The loss is the mean training loss of the
last tenth of the steps, averaged over the seeds. "1% overflows" makes the gradients of every
hundredth step infinite.
"""

import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _record import record
from flax import nnx

import jaxmem

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SEEDS = 3
VARIANTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp16, 1% overflows": "fp16"}


@functools.cache
def load(folder: str, name: str):
    """A module of an example (two of them are called train)."""
    path = EXAMPLES / folder / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


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
    transformer, text = load("characters", "transformer"), load("characters", "train").Text()
    model = transformer.Transformer(len(text.alphabet), 32, nnx.Rngs(seed), width=32)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return transformer.loss_fn, optimizer, ((model,), {}), lambda i: text.batch(16, 32, seed, i)


def digits(seed: int, steps: int):
    """The same for the ResNet, a narrow one on 16x16 images."""
    model_file, data = load("resnet50", "model"), load("resnet50", "train").Digits(True, 16)
    model = model_file.ResNet(sizes=(1, 1), width=8, classes=10)
    example = jnp.zeros((1, 16, 16, 3), jnp.float32)
    variables = jax.jit(model.init, static_argnums=2)(jax.random.key(seed), example, True)
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, steps // 10, steps)
    images = [data[index] for index in range(len(data))]

    def batch(step):
        chosen = np.random.default_rng([seed, step]).integers(0, len(images), 32)
        return {name: np.stack([images[i][name] for i in chosen]) for name in images[0]}

    given = (variables["params"],), {"model_state": variables["batch_stats"]}
    return model_file.make_loss(model), optax.sgd(rate, momentum=0.9), given, batch


def train(task, variant: str, steps: int, seeds: int) -> tuple[float, int]:
    """The loss at the end and the number of updates that were skipped, of all seeds together."""
    precision, step, total, skipped = VARIANTS[variant], None, 0.0, 0
    scaling = jaxmem.LossScale(growth_interval=100) if precision == "fp16" else None
    for seed in range(seeds):
        loss_fn, optimizer, (args, kwargs), batch_of = task(seed, steps)
        if step is None:  # compiled once for all seeds
            step = jaxmem.train_step(
                overflowing(loss_fn), optimizer, precision=precision, loss_scale=scaling
            )
        state, losses = step.init(*args, **kwargs), []
        for index in range(steps):
            bad = "overflows" in variant and index % 100 == 50
            state, metrics = step(state, {**batch_of(index), "overflow": np.array([bad])})
            losses.append(metrics["loss"])
        finite = [loss for loss in map(float, losses[-steps // 10 :]) if np.isfinite(loss)]
        total += float(np.mean(finite))
        skipped += 0 if scaling is None else int(state.loss_scale.skipped)
    return total / seeds, skipped


def compare(task, steps: int, seeds: int = SEEDS) -> list[dict]:
    rows, plain = [], None
    for variant in VARIANTS:
        loss, skipped = train(task, variant, steps, seeds)
        plain = loss if plain is None else plain
        rows.append(
            {
                "model": task.__name__,
                "precision": variant,
                "steps": steps,
                "seeds": seeds,
                "loss": f"{loss:.4f}",
                "against fp32": f"{loss / plain - 1:+.2%}",
                "skipped": skipped,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    jax.config.update("jax_platforms", "cpu")
    rows = compare(characters, 400) + compare(digits, 200)
    record(
        "Training in low precision: mean training loss of the last tenth of the steps",
        rows,
        "Computed on a CPU, where XLA emulates bfloat16 and float16 with the same rounding.",
    )


if __name__ == "__main__":
    main()
