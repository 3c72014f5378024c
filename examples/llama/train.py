"""A decoder like Llama 3 on as many devices as there are, from one to a thousand.

What would it take? Nothing of it need be there:

    python examples/llama/train.py --size 70b --length 8192 --batch 64 --plan h100 --devices 64
    python examples/llama/train.py --size 8b --length 8192 --batch 64 --plan h100   # how many?

Train, on all devices of this machine, within a budget for each:

    python examples/llama/train.py --size 1b --budget 40GiB --checkpoints runs/llama
    python examples/llama/train.py --cpu-devices 8 --budget 6MiB   # on a laptop, simulated

On several machines, the same on each, with ``--process`` 0, 1, ... :

    python examples/llama/train.py --coordinator host0:9876 --processes 8 --process 0 --size 8b ...

Started again, on as many devices as you like, it goes on from the last checkpoint.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import SIZES

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, digest, parser, run


def options():
    found = parser(__doc__, batch=8, length=64, rate=3e-3, save_every=10, steps=20)
    found.add_argument("--size", choices=SIZES, default="tiny")
    found.add_argument("--plan", metavar="TARGET", help="choose a step for it, and do not train")
    found.add_argument("--devices", type=int, help="of --plan; without it, the fewest that do")
    found.add_argument("--target", default="h100", help="whose compiler and figures decide")
    found.add_argument("--budget", help="bytes of each device, as 40GiB or 90%%")
    found.add_argument(
        "--exact", action="store_true", help="no jaxmem.ops in the place of attention and loss"
    )
    found.add_argument("--cpu-devices", type=int, help="simulate this many devices")
    found.add_argument("--coordinator", help="host:port of process 0")
    found.add_argument("--processes", type=int, default=1)
    found.add_argument("--process", type=int, default=0, help="number of this one")
    return found


def batch_of(step: int, shape: tuple[int, int], words: int) -> np.ndarray:
    """Sequences that count up by a number of their own, the same on every process."""
    random = np.random.default_rng(step)
    first, by = random.integers(0, words, (2, shape[0], 1))
    return ((first + by % 7 * np.arange(shape[1])) % words).astype(np.int32)


def main(chosen) -> None:
    if chosen.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", chosen.cpu_devices)
    if chosen.processes > 1:  # before the first use of a device
        jax.distributed.initialize(chosen.coordinator, chosen.processes, chosen.process)
    model, shape = SIZES[chosen.size], (chosen.batch, chosen.length)
    workload = model.loss, optax.adamw(chosen.rate), model.params()
    workload = (*workload, jax.ShapeDtypeStruct(shape, jnp.int32))
    allowed = {"budget": chosen.budget, "allow": () if chosen.exact else "operations"}

    if chosen.plan and chosen.devices is None:
        print(jaxmem.devices_needed(*workload, target=chosen.plan, **allowed))
        return
    if chosen.plan:
        print(jaxmem.fit(*workload, target=chosen.plan, devices=chosen.devices, **allowed).fitting)
        return

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    step = jaxmem.fit(*workload, target=chosen.target, mesh=mesh, **allowed)
    state = step.init(step.sharding.init(model.init, jax.random.key(0)))
    checkpoints = Checkpoints(chosen, ["size"])  # on any number of devices, at any stage
    done, state = checkpoints.resume(state)
    first = jax.process_index() == 0
    for number in range(done, chosen.steps):
        tokens = batch_of(number, shape, model.words)
        state, metrics = step(state, step.sharding.place_batch(tokens))
        loss = float(metrics["loss"])
        if first:
            print(f"step {number} loss {loss:.6f}", flush=True)
        checkpoints.save_at(number + 1, state, last=number + 1 == chosen.steps)
    if jax.process_count() == 1:  # else no process has all of them
        print(f"parameters {digest(state.params)}")


if __name__ == "__main__":
    run(main, options())
