"""Trains an Equinox model on scikit-learn's digits, within a budget.

    pip install equinox
    python examples/equinox/train.py
    python examples/equinox/train.py --target rtx-3090 --budget 12MiB

An Equinox module is a pytree of arrays and of other things. `eqx.partition` takes them apart: the
arrays are the parameters, and the rest is closed over. Nothing else is to be done for jaxmem.
"""

import pathlib
import sys

import equinox as eqx
import jax
import numpy as np
import optax
from model import Classifier

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, digest, digits, parser, run


def make_loss(static):
    """The loss of a batch of ``image [n, 64]`` and ``label [n]``."""

    def loss_fn(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["image"])
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": (logits.argmax(-1) == labels).mean(dtype=logits.dtype)}

    return loss_fn


def data(train: bool) -> dict[str, np.ndarray]:
    """Digits as rows of 64 numbers from 0 to 1."""
    images, labels = digits(train)
    return {"image": images.reshape(-1, 64).astype(np.float32) / 16, "label": labels}


def train(options) -> None:
    images = data(train=True)

    def batch(seed: int) -> dict[str, np.ndarray]:
        chosen = np.random.default_rng(seed).integers(0, len(images["label"]), options.batch)
        return {name: array[chosen] for name, array in images.items()}

    key = jax.random.key(options.seed)
    model = Classifier(64, 10, options.width, options.depth, key)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss_fn, optimizer = make_loss(static), optax.adamw(1e-3)
    if options.target:
        fits = {"budget": options.budget, "target": options.target}
        step = jaxmem.fit(loss_fn, optimizer, params, batch(0), **fits)
    else:
        step = jaxmem.train_step(loss_fn, optimizer, remat="sqrt")
    state = step.init(params)
    checkpoints = Checkpoints(options, "target budget width depth batch seed".split())
    start, state = checkpoints.resume(state)
    for index in range(start + 1, options.steps + 1):
        state, metrics = step(state, batch(index))
        if index % options.print_every == 0 or index == options.steps:
            print(f"step {index:4}  loss {float(metrics['loss']):.4f}", flush=True)
        checkpoints.save_at(index, state, last=index == options.steps)
    _, metrics = jax.jit(loss_fn)(state.params, data(train=False))
    print(f"held-out accuracy {float(metrics['accuracy']):.1%}")
    print(f"parameters {digest(state.params)}")


def main() -> None:
    arguments = parser(
        __doc__, width=64, depth=4, batch=128, steps=200, seed=0, print_every=50, save_every=50
    )
    arguments.add_argument("--target", help="let jaxmem.fit choose the levers for that GPU")
    arguments.add_argument("--budget", help="bytes of it, such as 12MiB")
    run(train, arguments)


if __name__ == "__main__":
    main()
