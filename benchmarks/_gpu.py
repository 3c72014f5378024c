"""The GPU that is attached, if one is, and how long something takes on it."""

import statistics
import subprocess
import time

import jax


def attached() -> bool:
    """Whether a GPU is attached that JAX can use; asks the driver, so as to touch no backend."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU 0" in done.stdout


def seconds(run, repeats: int = 10) -> float:
    """The median of calls of ``run``, after two that compile and warm up; it returns arrays."""
    taken = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])
