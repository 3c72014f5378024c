"""Trains an Equinox model on scikit-learn's digits, within a budget.

    pip install equinox
    python examples/equinox/train.py
    python examples/equinox/train.py --target rtx-3090 --budget 12MiB

An Equinox module is a pytree of arrays and of other things. `eqx.partition` takes them apart: the
arrays are the parameters, and the rest is closed over. Nothing else is to be done for jaxmem.
"""

import argparse
import pathlib
import sys

import equinox as eqx
import jax
import numpy as np
import optax
from model import Classifier
from sklearn.datasets import load_digits

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from checkpoints import Checkpoints, add_options, digest


def make_loss(static):
    """The loss of a batch of ``image [n, 64]`` and ``label [n]``."""

    def loss_fn(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["image"])
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": (logits.argmax(-1) == labels).mean(dtype=logits.dtype)}

    return loss_fn


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="let jaxmem.fit choose the levers for that GPU")
    parser.add_argument("--budget", help="bytes of it, such as 12MiB")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser, every=50)
    options = parser.parse_args(arguments)

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    held_out = {"image": images[-200:], "label": labels[-200:]}

    def batch(seed: int) -> dict[str, np.ndarray]:
        chosen = np.random.default_rng(seed).integers(0, len(images) - 200, options.batch)
        return {"image": images[chosen], "label": labels[chosen]}

    key = jax.random.key(options.seed)
    model = Classifier(64, 10, options.width, options.depth, key)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss_fn, optimizer = make_loss(static), optax.adamw(1e-3)
    try:
        if options.target:
            fits = {"budget": options.budget, "target": options.target}
            step = jaxmem.fit(loss_fn, optimizer, params, batch(0), **fits)
        else:
            step = jaxmem.train_step(loss_fn, optimizer, remat="sqrt")
    except jaxmem.JaxmemError as error:
        raise SystemExit(f"error: {error}") from error
    state = step.init(params)
    checkpoints = Checkpoints(options, "target budget width depth batch seed".split())
    start, state = checkpoints.resume(state)
    for index in range(start + 1, options.steps + 1):
        state, metrics = step(state, batch(index))
        if index % 50 == 0 or index == options.steps:
            print(f"step {index:4}  loss {float(metrics['loss']):.4f}", flush=True)
        checkpoints.save_at(index, state, last=index == options.steps)
    _, metrics = jax.jit(loss_fn)(state.params, held_out)
    print(f"held-out accuracy {float(metrics['accuracy']):.1%}")
    print(f"parameters {digest(state.params)}")


if __name__ == "__main__":
    main()
