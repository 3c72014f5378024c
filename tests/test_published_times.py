"""What predicted times assume of GPUs, and how far they are from published ones."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import pytest

import jaxmem
from benchmarks.speed.published import errors_by_gpu
from jaxmem.reports.speed.kernels import CompiledContraction, CompiledKernel
from jaxmem.reports.speed.model import parts_of
from jaxmem.targets import AchievableShares, known_targets

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks/results/speed.json"


@pytest.fixture(scope="module")
def runs():
    return json.loads(RESULTS.read_text())["published"]["runs"]


def test_shares_are_those_that_are_fitted(runs):
    found = dict(re.findall(r"(\w+) (0\.\d\d)\b", runs["0.10.2"]["note"]))
    stated = dataclasses.asdict(AchievableShares())
    assert {name: float(found[name]) for name in ("matmul", "convolution", "memory", "cache")} == {
        name: stated[name] for name in ("matmul", "convolution", "memory", "cache")
    }


def test_errors_of_gpus_are_those_of_their_published_times(runs):
    errors = errors_by_gpu(runs["0.10.2"]["rows"])
    stated = {name: one.time_error for name, one in known_targets().items() if one.time_error}
    assert stated == errors


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1"])
def test_half_is_held_out_and_predicted_to_fifteen_percent(runs, version):
    recorded = runs[version]
    found = [abs(int(row["error"][:-1])) for row in recorded["rows"] if row["set"] == "held out"]
    assert len(found) >= 30 and len(found) >= 0.4 * len(recorded["rows"])
    assert sorted(found)[len(found) // 2] <= 15
    assert sorted(found)[int(0.9 * len(found))] <= 30


def reached(target, dtype):
    """The share of a rate that a large matmul reaches."""
    one = CompiledContraction("matmul", dtype, "default", 8192, 8192, 8192)
    flops, target = 2 * 8192**3, jaxmem.target(target)
    parts = parts_of(CompiledKernel("one", flops, 3 * 8192**2 * 2, one), target)
    busy = target.share_of(8192, 8192, 8192)
    return flops / (busy * target.flops_per_second(dtype) * parts.seconds)


def test_the_faster_a_core_beside_its_cache_the_less_of_its_rate_is_reached():
    """Operands twice as long at half of the rate are as late."""
    assert reached("h100", "bfloat16") < reached("a100-80gb", "float16") < 0.6
    assert 0.7 < reached("rtx-3090", "float16") < AchievableShares().matmul
    assert reached("a100-80gb", "float32") == pytest.approx(reached("a100-80gb", "float16"))


def convolution(target, window=(3, 3), channels_last=True, dtype="float32", precision="default"):
    one = CompiledContraction(
        "convolution", dtype, precision, 10**5, 256, 2304, 1, window, channels_last
    )
    kernel = CompiledKernel("one", 2 * 10**5 * 256 * 2304, 10**8, one)
    return parts_of(kernel, jaxmem.target(target))


def test_a_convolution_of_three_by_three_needs_fewer_products_without_units_for_matrices():
    few, all_of_them = convolution("v100-16gb"), convolution("v100-16gb", (5, 5))
    assert few.arithmetic == pytest.approx(all_of_them.arithmetic * 16 / 36)
    assert convolution("v100-16gb", dtype="float16") == convolution(
        "v100-16gb", (), dtype="float16"
    )
    exact = convolution("a100-40gb", precision="highest")
    assert exact.arithmetic < convolution("a100-40gb", (), precision="highest").arithmetic / 2


def test_units_for_matrices_have_channels_turned():
    last, first = (convolution("a100-40gb", channels_last=is_last) for is_last in (True, False))
    assert last.turning == 0 and first.turning == 2 * first.traffic
    assert first.seconds == pytest.approx(last.seconds + first.turning)
    assert convolution("v100-16gb", channels_last=False).turning == 0
    assert convolution("v5e", channels_last=False).turning == 0


@pytest.mark.parametrize(
    ("strides", "precision", "window", "last"),
    [
        ((1, 1), "default", (3, 3), False),
        ((2, 2), "default", (), False),
        ((1, 1), "highest", (3, 3), False),
    ],
)
def test_windows_and_channels_are_those_of_the_compiled_program(strides, precision, window, last):
    def loss(kernel, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=precision,
        )  # fmt: skip
        return (y**2).mean()

    args = (
        jax.ShapeDtypeStruct((3, 3, 64, 64), "float32"),
        jax.ShapeDtypeStruct((16, 32, 32, 64), "float32"),
    )
    report = jaxmem.memory(jax.grad(loss), *args, target="a100-40gb", timeline=False)
    ran = [one.kernel.contraction for one in report.time.ran if one.kernel]
    found = [one for one in ran if one and one.kind == "convolution"]
    assert found and {(one.window, one.channels_last) for one in found} == {(window, last)}


# Elements of a row, what is moved for one of its bytes: in sectors of 32, read by the gather, read
# and written by the scatter of its derivative.
@pytest.mark.parametrize(("width", "times"), [(1, 8), (3, 8 / 3), (8, 1), (20, 1.2), (64, 1)])
def test_rows_of_a_table_are_moved_in_sectors(width, times):
    def loss(table, places):
        return (jax.numpy.tanh(table[places]) ** 2).mean()

    count = 2**25 // width
    args = (
        jax.ShapeDtypeStruct((count, width), "float32"),
        jax.ShapeDtypeStruct((count // 8,), "int32"),
    )
    report = jaxmem.memory(jax.grad(loss), *args, target="h100", timeline=False)
    kernels = [one.kernel for one in report.time.ran if one.kernel and one.kernel.rows]
    rows = [row for kernel in kernels for row in kernel.rows]
    taken = count // 8 * width * 4
    assert [(row.moved, row.piece) for row in rows] == [
        (taken, 4 * width),
        (2 * taken, 4 * width),
    ]
    rate = AchievableShares().memory * report.target.memory_bandwidth
    more = sum(parts_of(kernel, report.target).traffic - kernel.moved / rate for kernel in kernels)
    assert more == pytest.approx(3 * taken * (times - 1) / rate, abs=1e-9)
    assert all(
        jaxmem.target("v5e").bytes_beside_rows(*dataclasses.astuple(row)) == 0 for row in rows
    )


def test_a_table_that_fits_the_cache_is_read_once():
    h100 = jaxmem.target("h100")
    assert h100.bytes_beside_rows(h100.l2_bytes, 10**9, 4) == 0
    assert h100.bytes_beside_rows(h100.l2_bytes + 1, 10**9, 4) == 7 * 10**9


def test_columns_are_read_together():
    """Of columns in any order each row is read by neighbours."""
    args = jax.ShapeDtypeStruct((65536, 1024), "float32"), jax.ShapeDtypeStruct((1024,), "int32")
    report = jaxmem.memory(
        lambda x, places: jax.numpy.tanh(x[:, places]), *args, target="h100", timeline=False
    )
    kernels = [one.kernel for one in report.time.ran if one.kernel]
    rate = AchievableShares().memory * report.target.memory_bandwidth
    assert any(kernel.rows for kernel in kernels)
    for kernel in kernels:
        assert parts_of(kernel, report.target).traffic == pytest.approx(kernel.moved / rate)


def test_patches_are_read_in_pieces():
    """Of a window of an image each row is apart."""

    def patches(images, places):
        cut = functools.partial(jax.lax.dynamic_slice, slice_sizes=(16, 16))
        return jax.numpy.tanh(jax.vmap(cut, (None, 0))(images, places))

    args = (
        jax.ShapeDtypeStruct((16384, 16384), "float32"),
        (jax.ShapeDtypeStruct((4096,), "int32"),) * 2,
    )
    report = jaxmem.memory(patches, *args, target="h100", timeline=False)
    rows = [row for one in report.time.ran if one.kernel for row in one.kernel.rows]
    assert [row.piece for row in rows] == [16 * 4]


def test_only_short_floats_have_fewer_products_in_a_convolution():
    few, all_of_them = (
        convolution("v100-16gb", window, dtype="float64") for window in [(3, 3), (5, 5)]
    )
    assert few == all_of_them


def test_a_complex_product_reads_its_operands_once_for_four():
    one = jaxmem.target("h100")
    assert one.feeding_seconds(4e12, "complex64") == one.feeding_seconds(2e12, "float32")
