"""Trains a U-Net to find discs in noise, with the levers that `jaxmem.fit` chooses.

    python examples/unet/train.py                                   # small, on any machine
    python examples/unet/train.py --plan rtx-2080-ti --budget 8GiB  # the whole U-Net, compiled

The images are made here, so nothing is downloaded.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import UNet, make_loss

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, count, digest, parser, run


def discs(images: int, side: int, seed: int) -> dict[str, np.ndarray]:
    """Noisy images of three bright discs, and where the discs are."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side, :side]
    mask = np.zeros((images, side, side), bool)
    for _ in range(3):
        y, x = random.uniform(0, side, (2, images, 1, 1))
        radius = random.uniform(side / 16, side / 6, (images, 1, 1))
        mask |= (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    image = mask + random.normal(0, 0.7, mask.shape)
    return {"image": image[..., None].astype(np.float32), "mask": mask.astype(np.float32)}


def plan(options) -> None:
    """The whole U-Net at 512x512, batch 8, for a GPU that need not be there."""
    net, batch = UNet(), options.plan_batch
    image = jax.ShapeDtypeStruct((batch, 512, 512, 1), jnp.float32)
    mask = jax.ShapeDtypeStruct((batch, 512, 512), jnp.float32)
    params = jax.eval_shape(lambda x: net.init(jax.random.key(0), x), image)["params"]
    jaxmem.fit(
        make_loss(net),
        optax.adam(1e-3),
        params,
        {"image": image, "mask": mask},
        budget=options.budget,
        target=options.plan,
        allow=options.allow,
    )


def train(options) -> None:
    net = UNet(features=options.features, depth=3)
    step = jaxmem.train_step(
        make_loss(net), optax.adam(options.rate), remat="dp", microbatches=options.microbatches
    )
    first = discs(options.batch, options.side, 0)
    params = net.init(jax.random.key(options.seed), first["image"])["params"]
    state = step.init(params)
    print(f"{count(state.params):,} parameters, {options.microbatches} microbatches", flush=True)
    settings = "features side batch microbatches rate seed".split()
    checkpoints = Checkpoints(options, settings)
    start, state = checkpoints.resume(state)
    for index in range(start + 1, options.steps + 1):
        state, metrics = step(state, discs(options.batch, options.side, index))
        if index % options.print_every == 0 or index == options.steps:
            loss, overlap = float(metrics["loss"]), float(metrics["overlap"])
            print(f"step {index:5}  loss {loss:.4f}  overlap {overlap:.3f}", flush=True)
        checkpoints.save_at(index, state, last=index == options.steps)
    print(f"parameters {digest(state.params)}")


def main() -> None:
    arguments = parser(
        __doc__,
        plan_batch=8,
        features=8,
        side=64,
        batch=16,
        microbatches=2,
        steps=150,
        rate=3e-3,
        seed=0,
        print_every=25,
        save_every=50,
    )
    arguments.add_argument(
        "--plan", metavar="TARGET", help="let jaxmem.fit choose for a GPU, and end"
    )
    arguments.add_argument("--budget", help="for --plan; default: what is usable on the GPU")
    arguments.add_argument("--allow", action="append", default=[], help="as for jaxmem.fit")
    run(lambda options: plan(options) if options.plan else train(options), arguments)


if __name__ == "__main__":
    main()
