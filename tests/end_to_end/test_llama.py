"""The example for many devices: what it plans, and that it trains alike on any number of them."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow
SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "llama" / "train.py"


def start(*arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def finish(process):
    text, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    return text


def losses(text):
    return {int(n): float(loss) for n, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def alike(one, other):
    """Layers compute in bfloat16: sums in another order differ in its last digit."""
    for number in one.keys() & other.keys():
        np.testing.assert_allclose(one[number], other[number], rtol=3e-3)


def test_the_table_for_devices_that_are_absent():
    text = finish(start("--plan", "h100", "--devices", 8, "--batch", 64))
    assert "on h100: 8 x NVIDIA H100" in text and "chosen: the least predicted time" in text
    needed = finish(start("--plan", "h100", "--batch", 256, "--budget", "12MiB"))
    assert re.match(r"\d+ devices? (is|are) needed, of NVIDIA H100", needed)


def test_eight_devices_learn_as_one_and_a_checkpoint_moves_to_two(tmp_path):
    saved = ["--checkpoints", tmp_path / "saved", "--save-every", 4]
    eight = losses(finish(start("--cpu-devices", 8, "--budget", "3MiB", "--steps", 8, *saved)))
    assert eight.keys() == set(range(8))
    alone = losses(finish(start("--cpu-devices", 1, "--budget", "1GiB", "--steps", 10)))
    assert alone[9] < alone[0] - 0.3
    alike(eight, alone)
    text = finish(start("--cpu-devices", 2, "--budget", "1GiB", "--steps", 10, *saved))
    moved = losses(text)
    assert "resumed from step 8" in text and moved.keys() == {8, 9}
    alike(moved, alone)


def test_two_processes_learn_as_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = ["--cpu-devices", 4, "--budget", "3MiB", "--steps", 4]
    together = [*common, "--coordinator", address, "--processes", 2]
    both = [start(*together, "--process", number) for number in range(2)]
    first, second = map(finish, both)
    assert not losses(second)
    alone = finish(start("--cpu-devices", 8, *common[2:]))
    assert losses(first).keys() == set(range(4))
    alike(losses(first), losses(alone))
