"""The example on several processes, on loopback."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.slow
SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "fsdp" / "train.py"


def start(*arguments, processes=1, devices=4):
    """The processes of one run, with what they print on pipes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, str(SCRIPT), "--cpu-devices", str(devices), *map(str, arguments)]
    path = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            [
                *command,
                *(
                    "--coordinator",
                    address,
                    "--processes",
                    str(processes),
                    "--process",
                    str(number),
                ),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            text=True,
        )
        for number in range(processes)
    ]


def finish(run, timeout=150):
    """What the first process printed, when all have ended well."""
    texts = [process.communicate(timeout=timeout) for process in run]
    for process, (_, errors) in zip(run, texts, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return texts[0][0]


def losses(text):
    found = re.findall(r"step (\d+) loss ([\d.]+)", text)
    return {int(number): float(loss) for number, loss in found}


@pytest.fixture(scope="module")
def alone():
    return losses(finish(start("--steps", 12)))


def test_two_processes_get_the_losses_of_one(alone):
    text = finish(start("--steps", 6, processes=2, devices=2))
    together = losses(text)
    assert "2 processes, from step 0" in text
    assert together.keys() == set(range(6))
    for number, loss in together.items():
        np.testing.assert_allclose(loss, alone[number], rtol=1e-6)


def test_a_lost_process_ends_the_other_and_the_run_goes_on(alone, tmp_path):
    run = start(
        *("--steps", 500, "--pause", 0.2, "--checkpoints", tmp_path / "saved", "--save-every", 3),
        processes=2,
        devices=2,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "saved" / "6").exists():
            assert time.monotonic() < deadline and run[1].poll() is None
            time.sleep(0.05)
        run[1].kill()
        _, errors = run[0].communicate(timeout=60)
        assert run[0].returncode != 0
        assert "A process was lost" in errors or "heartbeat" in errors.lower()
    finally:
        for process in run:
            process.kill()
            process.communicate()
    saved = max(int(path.name) for path in (tmp_path / "saved").iterdir() if path.name.isdigit())
    assert saved < 12
    text = finish(start("--steps", 12, "--checkpoints", tmp_path / "saved", processes=1, devices=2))
    assert f"1 processes, from step {saved}" in text
    after = losses(text)
    assert after.keys() == set(range(saved, 12))
    for number, loss in after.items():
        np.testing.assert_allclose(loss, alone[number], rtol=1e-5)
