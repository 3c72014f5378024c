"""The example and the figures of the README, from the outside."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import flax.linen as nn
import numpy as np
import pytest
from PIL import Image
from programs import tanh_apart

import jaxmem

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "resnet50"
sys.path.insert(0, str(EXAMPLE))

import train  # noqa: E402
from model import Block  # noqa: E402


def start(folder, *options):
    """The training script with quick settings; compiled programs are shared between runs."""
    environment = dict(
        os.environ,
        JAX_COMPILATION_CACHE_DIR=str(folder / "compiled"),
        JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS="0",
        PYTHONUNBUFFERED="1",
    )
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE / "train.py"), *map(str, options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_trains_on_digits_and_a_killed_run_ends_with_the_same_parameters(tmp_path):
    settings = ("--save-every", 30, "--print-every", 0, "--checkpoints")
    whole = finish(start(tmp_path, *settings, tmp_path / "whole", "--target", "rtx-2080-ti"))
    losses = [float(loss) for loss in re.findall(r"loss +([\d.]+)", whole)]
    assert losses[0] > 2 > 0.1 > np.mean(losses[-10:])
    assert float(re.search(r"held-out accuracy ([\d.]+)%", whole)[1]) > 95
    assert re.search(r"[1-9][\d.]* images/s", whole)
    assert re.search(r"takes [\d.]+ MiB of device memory and [\d.]+ MiB of host memory", whole)

    interrupted = tmp_path / "interrupted"
    for saved in (60, 210):  # killed as soon as that checkpoint is there
        process = start(tmp_path, *settings, interrupted)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if any(name == str(saved) for name in listed(interrupted)):
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output
    resumed = finish(start(tmp_path, *settings, interrupted))
    assert "resumed from step " in resumed
    assert digest(resumed) == digest(whole)

    again = finish(start(tmp_path, *settings, interrupted))
    assert "resumed from step 538 in " in again
    assert digest(again) == digest(whole)


def listed(folder):
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def digest(output):
    return re.search(r"^parameters (\w{16})$", output, re.MULTILINE)[1]


@pytest.mark.slow
def test_trains_on_a_folder_of_images(tmp_path):
    random = np.random.default_rng(0)
    for name, shade in (("dark", 40), ("light", 200)):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for index in range(20):
            pixels = random.integers(shade - 30, shade + 30, (40, 52, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.{'png' if index % 2 else 'jpg'}")
    options = ("--data", tmp_path / "images", "--size", 32, "--batch", 6, "--epochs", 6)
    output = finish(start(tmp_path, *options, "--checkpoints", tmp_path / "saved"))
    assert "36 training images of 32x32" in output
    assert "held-out accuracy 100.00%" in output


def test_a_folder_without_images_is_refused(tmp_path):
    process = start(tmp_path, "--data", tmp_path, "--checkpoints", tmp_path / "saved")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "holds no class folders with training images in them." in output


@pytest.mark.slow
def test_sqrt_makes_batch_200_fit_the_11_gb_gpu():
    step, args = train.plan_step(200, remat="sqrt")
    report = jaxmem.memory(step, *args, target="rtx-2080-ti")
    assert report.device <= 7.5 * 2**30
    assert report.fits()


@pytest.mark.slow
def test_the_policy_saves_memory_without_a_convolution_recomputed():
    policed = nn.remat(Block, static_argnums=(2,), policy=jaxmem.remat_policy(target="h200"))
    reports = []
    for block in (Block, policed):
        step, args = train.plan_step(200, block=block)
        reports.append(jaxmem.memory(step, *args, target="h200"))
    plain, policed = reports
    assert policed.device <= 14.5 * 2**30 < plain.device
    assert policed.work == plain.work


@pytest.mark.slow
def test_the_plan_prints_megengines_demonstration(tmp_path):
    output = finish(start(tmp_path, "--plan", "rtx-2080-ti"))
    rows = re.findall(
        r"^(.*batch \d+) +([\d.]+) GiB +([\d.]+)x +(fits|does not fit)$", output, re.M
    )
    assert [(name.strip(), verdict) for name, _, _, verdict in rows] == [
        ("no remat, batch 100", "fits"),
        ("no remat, batch 200", "does not fit"),
        ("nn.remat on every block, batch 200", "fits"),
        ("jaxmem.remat, batch 200", "fits"),
    ]
    assert float(rows[3][1]) < float(rows[2][1]) < float(rows[1][1])
    assert float(rows[3][2]) < float(rows[2][2])
    assert "MegEngine's published demonstration" in output


@pytest.mark.slow
def test_adam_of_a_gibibyte_of_parameters_is_offloaded():
    import jax
    import jax.numpy as jnp
    import optax

    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 16
    batch = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
    step = jaxmem.train_step(tanh_apart, jaxmem.offload(optax.adam(1e-3)))
    report = step.memory(jaxmem.eval_shape(step.init, params), batch, target="h200")
    assert report.device <= 1.7 * 2**30
    assert report.host == report.on_host.alias == 2 * 2**30
