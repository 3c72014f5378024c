"""Finds what is inside of a body from the waves that come out of it, within a byte budget.

    python examples/wave/train.py                                # small, on any machine
    python examples/wave/train.py --picture found.png            # the medium before and after
    python examples/wave/train.py --plan rtx-4090 --budget 4GiB  # 2,048 x 2,048 points, 7,343 steps

Full waveform inversion: the wave is run forward from each source, and the speed of sound is moved
against the gradient of what is heard otherwise. The derivative goes through all steps of time, and
`jaxmem.scan` keeps the states that there is room for. The data are made here.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import make_loss, medium, seismograms, survey

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, digest, parser, run


def plan(options) -> None:
    """What one source of a large survey takes, compiled for a GPU that need not be there."""
    side, steps = 2048, 7343
    geometry = survey(side, steps)
    params = {"speed": jax.ShapeDtypeStruct((side, side), jnp.float32)}
    batch = {
        "source": jax.ShapeDtypeStruct((1, 2), jnp.int32),
        "heard": jax.ShapeDtypeStruct((1, steps, len(geometry.receivers)), jnp.float32),
    }
    print(f"{steps:,} steps of {side} x {side} points, {options.budget} for the states of the wave")
    step = jax.value_and_grad(make_loss(geometry, options.budget))
    print(jaxmem.memory(step, params, batch, target=options.plan))


def train(options) -> None:
    geometry = survey(options.side, options.length)
    true = medium(options.side)
    listen = jax.jit(lambda source: seismograms(jnp.asarray(true), source, geometry))
    batch = {
        "source": geometry.sources.astype(np.int32),
        "heard": np.stack([listen(source) for source in geometry.sources]),
    }
    rate = optax.cosine_decay_schedule(options.rate, options.steps)
    step = jaxmem.train_step(make_loss(geometry, options.budget), optax.adam(rate))
    state = step.init({"speed": jnp.ones_like(true)})
    print(
        f"{len(geometry.sources)} sources, {len(geometry.receivers)} receivers, "
        f"{options.length} steps "
        f"of {options.side} x {options.side} points, {options.budget} for the states of the wave",
        flush=True,
    )
    checkpoints = Checkpoints(options, "budget length rate side steps".split())
    start, state = checkpoints.resume(state)
    for index in range(start + 1, options.steps + 1):
        state, metrics = step(state, batch)
        if index % options.print_every == 0 or index == options.steps:
            error = float(np.sqrt(np.mean((np.asarray(state.params["speed"]) - true) ** 2)))
            loss = float(metrics["loss"])
            print(f"step {index:4}  loss {loss:.3e}  error of the speed {error:.4f}", flush=True)
        checkpoints.save_at(index, state, last=index == options.steps)
    found = np.asarray(state.params["speed"])
    before = float(np.sqrt(np.mean((1 - true) ** 2)))
    after = float(np.sqrt(np.mean((found - true) ** 2)))
    print(f"error of the speed: {before:.4f} before, {after:.4f} after")
    print(f"parameters {digest(state.params)}")
    if options.picture:
        draw(options.picture, true, found)


def draw(path: str, true: np.ndarray, found: np.ndarray) -> None:
    """The medium to start from, the one that was found, and the true one."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # An ink that is seen on light and on dark paper.
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "ytick.color")
    with rc_context(dict.fromkeys(inks, "#7d8088")):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots(1, 3)
        media = {"before": np.ones_like(true), "after": found, "true": true}
        for axis, (title, speed) in zip(axes, media.items(), strict=True):
            image = axis.imshow(speed, vmin=true.min(), vmax=true.max(), cmap="viridis")
            axis.set_title(title)
            axis.set_axis_off()
        figure.colorbar(image, ax=axes, label="speed of sound")
        figure.savefig(path, dpi=120, transparent=True)


def main() -> None:
    arguments = parser(
        __doc__,
        steps=100,
        side=64,
        length=240,
        rate=0.02,
        print_every=10,
        save_every=20,
    )
    arguments.add_argument("--budget", default="4MiB", help="bytes for states (default: 4MiB)")
    arguments.add_argument("--plan", help="compile the large survey for that GPU")
    arguments.add_argument("--picture", help="where to draw the medium before and after")
    run(lambda options: (plan if options.plan else train)(options), arguments)


if __name__ == "__main__":
    main()
