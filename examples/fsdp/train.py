"""A transformer trained with FSDP on several processes, each with its own devices.

One process:

    python examples/fsdp/train.py --steps 20 --checkpoints runs/fsdp

Two, each on its own machine or terminal (the first one's address for both):

    python examples/fsdp/train.py --coordinator localhost:9876 --processes 2 --process 0 ...
    python examples/fsdp/train.py --coordinator localhost:9876 --processes 2 --process 1 ...

Without a GPU, ``--cpu-devices 2`` gives each process two simulated ones. Started again, on as many
processes as you like, it goes on from the last checkpoint.
"""

import pathlib
import sys
import time

import jax
import numpy as np
import optax
from model import CONTEXT, VOCABULARY, block, loss_fn, make_params

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, digest, parser

BATCH = 8


def parse():
    arguments = parser(__doc__, steps=20, stage=3, save_every=5)
    arguments.add_argument("--coordinator", help="host:port of process 0")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--process", type=int, default=0, help="number of this one")
    arguments.add_argument("--cpu-devices", type=int, help="simulate this many devices")
    arguments.add_argument("--timeout", type=int, default=20, help="seconds to a lost process")
    arguments.add_argument("--pause", type=float, default=0, help="seconds after each step")
    return arguments.parse_args()


def start(arguments) -> None:
    """Joins the processes; all before the first use of a device."""
    if arguments.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.cpu_devices)
    if arguments.processes > 1:
        jax.distributed.initialize(
            arguments.coordinator,
            arguments.processes,
            arguments.process,
            heartbeat_timeout_seconds=arguments.timeout,
        )


def batch_of(step: int) -> np.ndarray:
    """Sequences that count up by a number of their own, the same on every process."""
    random = np.random.default_rng(step)
    first, by = random.integers(0, VOCABULARY, (2, BATCH, 1))
    return (first + (by % 7) * np.arange(CONTEXT + 1)) % VOCABULARY


def main() -> int:
    arguments = parse()
    start(arguments)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    fsdp = jaxmem.shard(mesh, stage=arguments.stage, scanned="blocks")
    optimizer = fsdp.optimizer(optax.adamw(1e-3))
    layer = fsdp.gather(block)

    params = fsdp.init(make_params, jax.random.key(0))
    state = {"params": params, "optimizer": fsdp.place_state(optimizer.init(params))}
    places = jax.tree.map(lambda leaf: leaf.sharding, state)

    def step(state, tokens):
        loss, gradients = jax.value_and_grad(lambda p: loss_fn(layer, p, tokens))(state["params"])
        updates, rest = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": rest}, loss

    step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
    checkpoints = Checkpoints(arguments, [])  # on any number of processes, at any stage
    done, state = checkpoints.resume(state)
    if jax.process_index() == 0:
        print(fsdp.report(state["params"], state["optimizer"]))
        print(f"{jax.process_count()} processes, from step {done}", flush=True)
    for number in range(done, arguments.steps):
        state, loss = step(state, fsdp.place_batch(batch_of(number)))
        if jax.process_index() == 0:
            print(f"step {number} loss {float(loss):.9f}", flush=True)
        checkpoints.save_at(number + 1, state, last=number + 1 == arguments.steps)
        time.sleep(arguments.pause)
    if jax.process_count() == 1:  # else no process has all of them
        print(f"parameters {digest(state['params'])}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except jax.errors.JaxRuntimeError as error:
        print(
            f"A process was lost, or a device failed, and nothing can go on without it:\n{error}\n"
            "Start all processes again: they continue from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        # The others cannot be waited for: leave without JAX's farewell to them.
        import os

        os._exit(3)
