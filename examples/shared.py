"""What the examples share beside their checkpoints: options, errors told in a line, and digits."""

import argparse
from collections.abc import Callable

import checkpoints
import jax
import numpy as np

import jaxmem

ABOUT = {
    "accumulate": "steps in an update of the parameters",
    "batch": "examples in a step",
    "length": "characters in an example",
    "microbatches": "slices of a batch, one after the other",
    "plan_batch": "examples in the step that --plan compiles",
    "precision": "fp32, bf16, fp16 or the long form",
    "print_every": "steps between two lines",
    "rate": "peak learning rate",
    "side": "pixels of an image's side",
    "stage": "of ZeRO",
    "steps": "steps to train",
}


def parser(
    about: str, *, save_every: int, folder: str | None = None, **defaults: int | float | str
) -> argparse.ArgumentParser:
    """The options of an example: ``rate=0.1`` is ``--rate``, a float that is 0.1 by default.

    ``about`` is the script's docstring; ``folder`` is where checkpoints go by default.
    """
    found = argparse.ArgumentParser(description=about.partition("\n")[0])
    for name, default in defaults.items():
        found.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{ABOUT.get(name, '')} (default: %(default)s)".strip(),
        )
    checkpoints.add_options(found, every=save_every, default=folder)
    return found


def run(main: Callable[[argparse.Namespace], None], arguments: argparse.ArgumentParser) -> None:
    """Calls ``main`` with the options of the command line; errors of jaxmem end it with a line."""
    try:
        main(arguments.parse_args())
    except jaxmem.JaxmemError as error:
        raise SystemExit(f"error: {error}") from error


def count(params) -> int:
    """How many numbers the parameters are."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def digits(train: bool) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's handwritten digits, ``uint8 [n, 8, 8]`` from 0 to 16, and their labels: 1,437
    to train on, or the 360 that are held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[360:] if train else order[:360]
    return images[chosen].reshape(-1, 8, 8).astype(np.uint8), labels[chosen].astype(np.int32)
