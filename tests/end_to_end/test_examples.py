"""The examples that have no test module of their own run and learn."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_unet_finds_discs():
    text = run("unet/train.py", "--steps", 25, "--print-every", 1, "--side", 32, "--batch", 8)
    overlaps = [float(found) for found in re.findall(r"overlap (\S+)", text)]
    assert len(overlaps) == 25
    assert sum(overlaps[:5]) / 5 + 0.2 < sum(overlaps[-5:]) / 5 > 0.6


def test_unet_for_a_gpu_that_is_absent():
    text = run("unet/train.py", "--plan", "rtx-2080-ti", "--plan-batch", 1, "--budget", "2GiB")
    assert re.match(r"jaxmem.fit: fits: \S+ GiB of 2.00 GiB, .*\non rtx-2080-ti: ", text)
    assert re.search(r"\n.*  chosen: the least predicted time", text)  # the rest may wrap


def test_a_wave_finds_a_medium(tmp_path):
    picture = tmp_path / "found.png"
    text = run("wave/train.py", "--steps", 40, "--picture", picture)
    before, after = map(float, re.search(r"speed: (\S+) before, (\S+) after", text).groups())
    assert after < 0.5 * before and picture.stat().st_size > 10_000


def test_a_wave_for_a_gpu_that_is_absent():
    """The budget is for the states of the wave; seismograms and the medium are beside it."""
    text = run("wave/train.py", "--plan", "rtx-4090", "--budget", "2GiB")
    assert 1.9 < float(re.search(r"temp +(\S+) GiB", text)[1]) < 2.3


def test_characters_in_half_precision_with_every_option():
    """The GPT, which is the model in Flax nnx as well."""
    small = ["--batch", 4, "--length", 16, "--steps", 6, "--print-every", 1]
    options = ["--precision", "fp16", "--microbatches", 2, "--accumulate", 2, "--remat", "sqrt"]
    text = run("characters/train.py", *small, *options)
    lines = re.findall(r"step +(\d+)  loss (\S+) .* loss scale \d+, (\d) skipped\n", text)
    assert [int(number) for number, _, _ in lines] == [1, 2, 3, 4, 5, 6]
    assert 4 < float(lines[0][1]) < 6  # about log of 95 characters, as nothing is learnt yet
    held_out = float(re.search(r"held-out loss (\S+) nats a character\n", text)[1])
    assert held_out < float(lines[0][1]) - 0.5


def test_equinox_learns_digits_within_a_budget():
    pytest.importorskip("equinox")
    text = run("equinox/train.py", "--target", "rtx-3090", "--budget", "4MiB", "--steps", 100)
    assert "  chosen: the least predicted time that fits\n" in text
    accuracy = float(re.search(r"held-out accuracy (\S+)%", text)[1])
    assert accuracy > 85


def test_what_jaxmem_refuses_ends_an_example_with_a_line():
    command = [sys.executable, str(EXAMPLES / "unet/train.py"), "--plan", "gpu-of-tomorrow"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "gpu-of-tomorrow" in done.stderr
