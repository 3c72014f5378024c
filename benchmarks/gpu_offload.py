"""On an attached GPU: steps with the optimizer's state on the device and in host memory.

    python benchmarks/gpu_offload.py      # without a GPU it says so and ends

The steps of offload.py (16 matrices of 64 MiB in fp32, batch 1024), each in a process of its own.
"ms" is the median of ten steps, "peak" the allocator's, "compiled" XLA's bytes for the same GPU.
"GB/s" is what crosses the link in a step (the state, there and back) over the whole time of it; the
link's own is measured by copies of 1 GiB from pinned host memory and back, one at a time.
"""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for who runs this file
import jaxmem
from benchmarks._gpu import attached, seconds
from benchmarks._record import record
from benchmarks.levers.offload import BATCH, LAYERS, OPTIMIZERS, WIDTH, loss_fn

GIB = 2**30
LINK = "copies of 1 GiB"


def measured(name: str, width: int = WIDTH) -> dict:
    """One step on this machine's device."""
    step = jaxmem.train_step(loss_fn, OPTIMIZERS[name])
    batch = jnp.ones((BATCH, width), jnp.float32)
    state = step.init([jnp.eye(width, dtype=jnp.float32)] * LAYERS)
    report = step.memory(state, batch, target="local")

    def run():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    taken = seconds(run)
    statistics = jax.local_devices()[0].memory_stats() or {}
    return {
        "step": name,
        "compiled": report.device,
        "peak": statistics.get("peak_bytes_in_use", 0),
        "seconds": taken,
        "crossed": 2 * report.host,
    }


def link(size: int = GIB) -> dict:
    """A copy to the device and one back."""
    device = jax.local_devices()[0]
    places = [
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for kind in ("pinned_host", "device")
    ]
    on_host = jax.device_put(jnp.ones(size // 4, jnp.float32), places[0])

    def run():
        on_device = jax.block_until_ready(jax.device_put(on_host, places[1]))
        return jax.device_put(on_device, places[0])

    return {"step": LINK, "compiled": 0, "peak": 0, "seconds": seconds(run), "crossed": 2 * size}


def apart(name: str) -> dict:
    """The result for one step in a process of its own."""
    command = [sys.executable, str(pathlib.Path(__file__)), "--one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(found: dict) -> dict:
    speed = found["crossed"] / found["seconds"] / 1e9
    return {
        "step": found["step"],
        "ms": f"{found['seconds'] * 1e3:.1f}",
        "GB/s": f"{speed:.1f}" if speed else "",
        "compiled": f"{found['compiled'] / GIB:.3f} GiB" if found["compiled"] else "",
        "peak": f"{found['peak'] / GIB:.3f} GiB" if found["peak"] else "",
    }


def main():
    if not attached():
        print("No GPU is attached: steps with state in host memory were not measured.")
    elif sys.argv[1:2] == ["--one"]:
        name = sys.argv[2]
        print(json.dumps(link() if name == LINK else measured(name)))
    else:
        rows = [row(apart(name)) for name in (*OPTIMIZERS, LINK)]
        title = "State in host memory on an attached GPU"
        record(title, rows, __doc__.split("\n\n")[2])


if __name__ == "__main__":
    main()
