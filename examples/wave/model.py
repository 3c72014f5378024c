"""The acoustic wave equation in two dimensions, by finite differences, and what is heard of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem

COURANT = 0.45  # of a cell in one step, at a speed of 1: below 1 / sqrt(2) the scheme is stable
FREQUENCY = 0.045  # of the source, in periods a step


class Survey(NamedTuple):
    """Rows and columns of sources and receivers, and how many steps are heard."""

    sources: np.ndarray
    receivers: np.ndarray
    steps: int


def survey(side: int, steps: int) -> Survey:
    """Eight sources on a square, and receivers on the same one."""
    edge = side // 8
    line = np.linspace(edge, side - 1 - edge, 3).astype(int)
    sources = [(row, column) for row in line for column in line if (row, column) != (line[1],) * 2]
    along = np.arange(edge, side - edge, 2)
    ends = np.full(len(along), edge), np.full(len(along), side - 1 - edge)
    receivers = [np.stack(pair, 1) for end in ends for pair in ((end, along), (along, end))]
    return Survey(np.array(sources), np.concatenate(receivers), steps)


def medium(side: int) -> np.ndarray:
    """The speed of sound: 1, faster in a disc and slower in a bar."""
    rows, columns = np.mgrid[:side, :side] / side
    disc = (rows - 0.42) ** 2 + (columns - 0.4) ** 2 < 0.12**2
    bar = (abs(rows - 0.66) < 0.05) & (abs(columns - 0.55) < 0.2)
    return (1 + 0.15 * disc - 0.12 * bar).astype(np.float32)


def ricker(steps: int) -> jnp.ndarray:
    """The source's pressure at each step: the second derivative of a bell."""
    time = np.pi * FREQUENCY * (jnp.arange(steps, dtype=jnp.float32) - 1 / FREQUENCY)
    return (1 - 2 * time**2) * jnp.exp(-(time**2))


def sponge(side: int) -> np.ndarray:
    """What is left of the wave in each step: near the border it fades."""
    width = side // 10
    depth = np.maximum(width - np.minimum(np.arange(side), np.arange(side)[::-1]), 0) / width
    return np.exp(-((0.3 * np.maximum(depth[:, None], depth[None, :])) ** 2)).astype(np.float32)


def seismograms(speed, source, geometry: Survey, budget: int | str | None = None):
    """``[steps, receivers]``: the pressure after a source has fired. The derivative takes no more
    than ``budget`` bytes for the states of the wave."""
    side = speed.shape[0]
    fades = sponge(side)
    scale = (COURANT * speed) ** 2

    def step(carry, value):
        wave, before = carry
        laplacian = sum(jnp.roll(wave, by, axis) for by in (1, -1) for axis in (0, 1)) - 4 * wave
        after = fades * (2 * wave - before + scale * laplacian)
        after = after.at[source[0], source[1]].add(value)
        return (after, fades * wave), after[geometry.receivers[:, 0], geometry.receivers[:, 1]]

    still = jnp.zeros((side, side), jnp.float32)
    _, trace = jaxmem.scan(step, (still, still), ricker(geometry.steps), budget=budget)
    return trace


def make_loss(geometry: Survey, budget: int | str | None = None):
    """The mean square of what is heard otherwise than it was, over the sources of a batch."""

    def loss_fn(params, batch):
        def misfit(source, observed):
            return jnp.mean(
                (seismograms(params["speed"], source, geometry, budget) - observed) ** 2
            )

        # One source after the other: their waves need not be in memory together.
        return jnp.mean(jax.lax.map(lambda one: misfit(*one), (batch["source"], batch["heard"])))

    return loss_fn
