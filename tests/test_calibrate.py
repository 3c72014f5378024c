"""Rates measured on the attached device, kept, and used by all that predicts times."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import cli
from jaxmem.reports.calibrating.calibration import calibration
from jaxmem.reports.calibrating.fitted import held_out
from jaxmem.reports.calibrating.probes import ladders
from jaxmem.reports.calibrating.running import Sample
from jaxmem.reports.speed.model import seconds_of
from jaxmem.reports.speed.schedule import KernelSchedule
from jaxmem.reports.speed.step_time import step_time
from jaxmem.targets import (
    UNLIMITED,
    AchievableShares,
    LocalDevice,
    MeasuredRates,
    calibration_path,
    keep_calibration,
    rated,
)

A100 = jaxmem.target("a100-80gb")
REACHED = AchievableShares(
    matmul=0.5,
    convolution=0.4,
    memory=0.8,
    cache=UNLIMITED,
    link=A100.shares.link,
    launch=4e-6,
)
# Of bfloat16 and TF32 half, of float32 with all its bits nine tenths.
PEAKS = dataclasses.replace(A100.peaks, float32=1.8 * A100.peaks.float32)
TRUE = dataclasses.replace(A100, shares=REACHED, peaks=PEAKS)


def measured(name="a100-80gb", error=0.07, **others):
    about = {
        "name": name,
        "device": A100.device_kind,
        "date": "2026-11-23",
        "jaxlib": jax.lib.__version__,
        "peaks": PEAKS,
        "memory_bandwidth": A100.memory_bandwidth,
        "host_bandwidth": A100.host_bandwidth,
        "shares": REACHED,
        "error": error,
        "high_error": 0.2,
    }
    return MeasuredRates(**(about | others))


def deep(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in [(256, 256), (4096, 256)]]


# ---- the whole path, on the CPU


def test_the_cpu_is_calibrated_and_forgotten(capsys, calibrations):
    assert cli.main(["calibrate", "--seconds", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("calibrated: ±") and " on your cpu (median; 90th percentile ±" in text
    lines = [line for line in text.splitlines() if str(calibrations) not in line]
    assert len(lines) > 5 and max(map(len, lines)) <= 100
    assert "matmul float32" in text and "launch of a kernel" in text and "held out" in text
    (path,) = calibrations.iterdir()
    assert path.name == f"cpu-jaxlib-{jax.lib.__version__}.json" and str(path) in text
    kept = json.loads(path.read_text())
    assert kept["name"] == "cpu" and kept["peaks"]["float32"] > 0 and kept["error"] >= 0
    report = jaxmem.memory(deep, *SHAPES, target="local")
    assert f"predicted (±{kept['error']:.0%}, measured on your cpu)" in str(report.time)
    assert 0 < report.time.seconds < math.inf
    assert cli.main(["calibrate", "--forget"]) == 0
    assert capsys.readouterr().out == f"removed {path}\n"
    assert cli.main(["calibrate", "--forget"]) == 0
    assert capsys.readouterr().out == "there is no calibration\n"
    with pytest.raises(jaxmem.JaxmemError, match="rates of cpu are not known. `jaxmem calibrate`"):
        jaxmem.memory(deep, *SHAPES, target="local").time  # noqa: B018


@pytest.mark.slow
def test_what_is_not_kept_changes_nothing(calibrations):
    found = jaxmem.calibrate(seconds=1, keep=False)
    assert found.error <= found.high_error and found.path == ""
    assert not calibrations.exists()
    assert json.loads(json.dumps(found.to_dict()))["rates"]["device"] == "cpu"
    assert {"launch", "memory", "matmul", "float32"} <= set(found.fitted)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "60", True])
def test_too_short_a_time_is_refused(seconds):
    with pytest.raises(jaxmem.JaxmemError, match="takes seconds=0.5 or more; got"):
        jaxmem.calibrate(seconds=seconds)


# ---- the arithmetic, on what is compiled for a GPU


@pytest.fixture(scope="module")
def samples():
    """Programs compiled for an A100, and what they would take on one of other rates."""
    chosen = {
        "matmul float32": (6, 7, 8),
        "matmul bfloat16": (8, 9, 10),
        "matmul float32, highest": (6, 7),
        "elementwise float32": (8, 9, 10),
        "convolution float32": (7, 9),
        "layers, gradient": (6,),
    }
    found = []
    with jax.enable_x64(False):
        for ladder in ladders():
            for at in chosen.get(ladder.name, ()):
                probe = ladder.probes[at]
                hlo = jaxmem.memory(probe.fun, *probe.shapes, target=A100, timeline=False).hlo
                ran = KernelSchedule(hlo, A100).ran
                kernels = tuple((one.times, one.kernel) for one in ran if one.kernel)
                taken = sum(times * seconds_of(kernel, TRUE) for times, kernel in kernels)
                found.append(Sample(probe.name, ladder.name, kernels, taken, ladder.whole))
    return found


def test_the_rates_that_were_reached_are_found(samples):
    made = calibration(A100, A100, REACHED.launch, 20e9, samples, A100.name)
    found = made.rates.of(A100)
    assert found.shares.memory == pytest.approx(REACHED.memory, rel=0.01)
    for dtype, precision in [("float32", "default"), ("float32", "highest"), ("bfloat16", "")]:
        rates = [
            one.shares.matmul * one.flops_per_second(dtype, precision) for one in (found, TRUE)
        ]
        assert rates[0] == pytest.approx(rates[1], rel=0.02)
    # XLA lays out the arguments of convolutions before them, which is time of another rate.
    assert found.shares.convolution * found.flops_per_second("float32") == pytest.approx(
        REACHED.convolution * TRUE.flops_per_second("float32"), rel=0.05
    )
    assert found.shares.link * found.host_bandwidth == pytest.approx(20e9)
    assert made.error < 0.02 and made.high_error < 0.05
    assert set(made.fitted) == {
        *("launch", "memory", "matmul", "float32", "tfloat32", "bfloat16", "convolution", "host")
    }
    text = str(made)
    assert text.startswith("calibrated: ±0% on your NVIDIA A100") and "share" in text
    assert re.search(r"matmul bfloat16 +156 TFLOP/s +312 TFLOP/s +50%", text)
    assert re.search(r"convolution float32 +62.4 TFLOP/s +156 TFLOP/s +40%", text)
    assert max(map(len, text.splitlines())) <= 100


def test_the_error_is_that_of_what_was_held_out(samples):
    """A program that the model does not explain is an error, and does not bend the rates."""
    bent = [
        dataclasses.replace(one, seconds=2 * one.seconds) if one.whole else one for one in samples
    ]
    made = calibration(A100, A100, REACHED.launch, None, bent, A100.name)
    assert made.rates.shares.memory == pytest.approx(REACHED.memory, rel=0.01)
    assert made.high_error > 0.1 and "host" not in made.fitted
    wrong = next(one for one in made.checked if one.name.startswith("layers"))
    assert wrong.is_held_out and wrong.error == pytest.approx(-0.5, abs=0.02)
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(samples))
    noisy = [
        dataclasses.replace(one, seconds=one.seconds * factor)
        for one, factor in zip(samples, noise, strict=True)
    ]
    made = calibration(A100, A100, REACHED.launch, None, noisy, A100.name)
    assert 0.005 < made.error < 0.15


def test_every_second_rung_is_held_out_but_the_largest(samples):
    held_out_names = [one.name for one, out in zip(samples, held_out(samples), strict=True) if out]
    assert (
        "matmul float32, 2048 x 2048" not in held_out_names
        and "matmul float32, 3072 x 3072" in held_out_names
    )
    assert "layers, gradient, 2048 x 2048" in held_out_names


def test_nothing_measured_is_told():
    with pytest.raises(jaxmem.JaxmemError, match="No program ran on NVIDIA A100.* Calibrate for"):
        calibration(A100, A100, 1e-6, None, [], A100.name)


# ---- what is kept


def test_predictions_are_those_of_the_calibration():
    plain = jaxmem.memory(deep, *SHAPES, target="a100-80gb").time
    published = f"(±{plain.target.time_error:.0%}, the median of published"
    assert plain.target.calibrated == "" and published in str(plain)
    keep_calibration(measured())
    time = jaxmem.memory(deep, *SHAPES, target="a100-80gb").time
    assert time.seconds > 1.1 * plain.seconds
    assert f"predicted (±7%, measured on your {A100.description})" in " ".join(str(time).split())
    plan = jaxmem.plan(deep, *SHAPES, target="a100-80gb", budget="40MiB")
    assert plan.time_error == 0.07 and "±7% on a100-80gb" in str(plan)
    assert "unchecked" not in str(plan)
    for count in (1, 8):
        assert jaxmem.target("a100-80gb", count=count).shares == REACHED
    assert jaxmem.target("h200").calibrated == ""
    calibration_path("a100-80gb").unlink()
    assert jaxmem.target("a100-80gb") == A100


def test_a_device_that_nobody_knows_has_the_times_that_were_measured():
    card = LocalDevice("gpu", "Some Card 5 (rev. 2)", 2**33)
    with pytest.raises(jaxmem.JaxmemError, match="rates of Some Card 5 .rev. 2. are not known"):
        step_time("", (), card)
    keep_calibration(measured("some-card-5-rev-2", device=card.description))
    found = rated(card)
    assert found.peaks == PEAKS and found.shares == REACHED and found.memory_bytes == 2**33
    assert found.checked == "±7%, measured on your Some Card 5 (rev. 2)"


def changed(**others):
    def write(path: pathlib.Path):
        path.write_text(json.dumps(json.loads(path.read_text()) | others))

    return write


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe{"),
        lambda path: path.write_text("[1, 2]"),
        lambda path: path.write_text("{}"),
        changed(format="another's"),
        changed(name="h100"),
        changed(jaxlib="0.4.1"),
        changed(error=float("nan")),
        changed(error="0.1"),
        changed(more=1),
        changed(shares={"matmul": 0.0, "convolution": 1, "memory": 1, "link": 1, "launch": 1}),
        changed(shares={"matmul": -1.0}),
        changed(peaks={"float32": 0.0}),
        changed(memory_bandwidth=float("inf")),
    ],
)
def test_a_damaged_file_is_none(damage):
    path = keep_calibration(measured())
    assert jaxmem.target("a100-80gb").calibrated
    damage(path)
    assert jaxmem.target("a100-80gb") == A100


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMEM_CALIBRATIONS", str(tmp_path / "file"))
    with pytest.raises(jaxmem.JaxmemError, match="cannot be kept in .* Set JAXMEM_CACHE to a fold"):
        keep_calibration(measured())
    assert jaxmem.target("a100-80gb") == A100
