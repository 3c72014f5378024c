"""Trains a small character transformer on real text, in any precision, on any machine.

    python examples/characters/train.py                          # float32
    python examples/characters/train.py --precision bf16
    python examples/characters/train.py --precision fp16         # with a dynamic loss scale
    python examples/characters/train.py --precision fp16 --microbatches 4 --accumulate 2

The text (text.txt, 140 KB of the Python documentation; its licence is in LICENSE-text.txt) is cut
into windows; the last tenth of it is held out. The model is plain Flax nnx in float32: precision,
microbatches, accumulation and loss scaling are all in the one `jaxmem.train_step`.
"""

import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformer import Transformer, loss_fn

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, count, digest, parser, run

TEXT = pathlib.Path(__file__).with_name("text.txt")


class Text:
    """A text as numbers of its characters, most of it for training and the end held out."""

    def __init__(self, path: pathlib.Path = TEXT):
        text = path.read_text(encoding="ascii")
        self.alphabet = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(self.alphabet)}
        self.numbers = np.array([numbers[letter] for letter in text], np.int32)
        self.end = len(text) * 9 // 10

    def batch(self, size: int, length: int, seed: int, step: int) -> dict[str, np.ndarray]:
        """Windows of the training part at random places: the same for one seed and step."""
        starts = np.random.default_rng([seed, step]).integers(0, self.end - length - 1, size)
        return {"text": self.numbers[starts[:, None] + np.arange(length + 1)]}

    def held_out(self, length: int) -> dict[str, np.ndarray]:
        """The held-out part, as windows one after the other."""
        rest = self.numbers[self.end :]
        return {"text": rest[: len(rest) // (length + 1) * (length + 1)].reshape(-1, length + 1)}


def make_step(options, optimizer):
    """The training step, with a loss scale where float16 needs one."""
    fp16 = jaxmem.precision(options.precision).compute == jnp.float16
    return jaxmem.train_step(
        loss_fn,
        jaxmem.accumulate(optimizer, options.accumulate) if options.accumulate > 1 else optimizer,
        precision=options.precision,
        remat=options.remat,
        microbatches=options.microbatches,
        loss_scale=jaxmem.LossScale(growth_interval=200) if fp16 else None,
    )


def train(options) -> None:
    text = Text()
    model = Transformer(len(text.alphabet), options.length, nnx.Rngs(options.seed))
    updates = max(options.steps // options.accumulate, 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, options.rate, updates // 10 + 1, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    step = make_step(options, optimizer)
    graphdef, _ = nnx.split(model)
    state = step.init(model)
    print(
        f"{len(text.numbers):,} characters, {count(state.params):,} parameters, {step.precision}",
        flush=True,
    )
    if options.target:
        batch = text.batch(options.batch, options.length, options.seed, 0)
        print(step.memory(state, batch, target=options.target))

    settings = "precision remat microbatches accumulate steps batch length rate seed".split()
    checkpoints = Checkpoints(options, settings)
    start, state = checkpoints.resume(state)
    began = time.perf_counter()
    for index in range(start + 1, options.steps + 1):
        batch = text.batch(options.batch, options.length, options.seed, index)
        state, metrics = step(state, batch)
        if index % options.print_every == 0 or index == options.steps:
            speed = (index - start) * options.batch * options.length / (time.perf_counter() - began)
            line = f"step {index:5}  loss {float(metrics['loss']):.4f}  {speed:8,.0f} characters/s"
            if state.loss_scale is not None:
                scale, skipped = float(metrics["loss_scale"]), int(metrics["skipped"])
                line += f"  loss scale {scale:g}, {skipped} skipped"
            print(line, flush=True)
        checkpoints.save_at(index, state, last=index == options.steps)

    trained = nnx.merge(graphdef, state.params)
    loss = float(nnx.jit(loss_fn)(trained, text.held_out(options.length)))
    print(f"held-out loss {loss:.4f} nats a character")
    print(f"parameters {digest(state.params)}")


def main() -> None:
    arguments = parser(
        __doc__,
        precision="fp32",
        microbatches=1,
        accumulate=1,
        steps=500,
        batch=16,
        length=64,
        rate=3e-3,
        seed=0,
        print_every=100,
        save_every=100,
    )
    arguments.add_argument("--remat", help="a planner of jaxmem.remat, such as sqrt")
    arguments.add_argument("--target", help="print the step's bytes on that GPU")
    run(train, arguments)


if __name__ == "__main__":
    main()
