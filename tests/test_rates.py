"""The rates of matmuls and convolutions, by their operands and by how exact they have to be."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem

EXACT = jax.lax.Precision.HIGHEST


@pytest.mark.parametrize(
    ("target", "dtype", "precision", "units", "passes"),
    [
        ("a100-80gb", "float32", "default", "tfloat32", 1),  # as XLA multiplies float32 there
        ("a100-80gb", "float32", "high", "tfloat32", 1),
        ("a100-80gb", "float32", "highest", "float32", 1),
        ("a100-80gb", "float32", "tfloat32x3", "tfloat32", 3),
        ("a100-80gb", "bfloat16", "highest", "bfloat16", 1),
        ("a100-80gb", "float64", "default", "float64", 1),
        ("a100-80gb", "float8_e4m3fn", "default", "bfloat16", 1),  # no units of its own
        ("h100", "float8_e4m3fn", "default", "float8", 1),
        ("h100", "int8", "default", "int8", 1),
        ("h100", "float32", "bfloat16x3", "bfloat16", 3),
        ("v100-16gb", "float32", "default", "float32", 1),  # no TF32 before Ampere
        ("v100-16gb", "bfloat16", "default", "float32", 1),  # nor bfloat16
        ("rtx-2080-ti", "float16", "default", "float16", 1),
        ("v5e", "float32", "default", "bfloat16", 1),
        ("v5e", "float32", "high", "bfloat16", 3),
        ("v5e", "float32", "highest", "bfloat16", 6),
        ("v5e", "int8", "default", "int8", 1),
    ],
)
def test_rates_as_they_are(target, dtype, precision, units, passes):
    target = jaxmem.target(target)
    found = target.flops_per_second(jnp.dtype(dtype), precision)
    rate = getattr(target.peaks, units)
    assert rate > 0 and found == pytest.approx(rate / passes)


@pytest.mark.parametrize("name", ["a100-80gb", "h100", "h200", "rtx-3090", "rtx-4090"])
def test_short_types_are_faster_from_ampere_on(name):
    peaks = jaxmem.target(name).peaks
    assert peaks.float64 < peaks.tfloat32 < peaks.bfloat16 <= peaks.int8


@pytest.mark.parametrize("name", ["rtx-2080-ti", "rtx-3090", "rtx-4090"])
def test_halves_that_are_summed_in_float32_count_as_that(name):
    """Data sheets of these have twice the rate, summed in float16."""
    peaks = jaxmem.target(name).peaks
    assert peaks.float16 < 4.5 * peaks.float32


def seconds(target, **options):
    """Predicted for a matmul of float32: seven times as many FLOPs in a second where it is rounded,
    but its operands come from the cache as slowly."""

    def loss(w, x):
        return jnp.sum(jnp.dot(x, w, **options))

    constraints = {"target": target, "budget": "1GiB"}
    args = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2
    return jaxmem.plan(loss, *args, **constraints).predicted.seconds


def test_predictions_follow_the_precision():
    rounded = seconds("h100")
    exact = seconds("h100", precision=EXACT)
    assert exact > 2 * rounded
    with jax.default_matmul_precision("float32"):
        assert seconds("h100") == exact
    with jax.default_matmul_precision("bfloat16"):
        assert seconds("h100") == rounded
    assert seconds("h100", precision=(jax.lax.Precision.DEFAULT, EXACT)) == exact
    assert seconds("h100", precision=jax.lax.DotAlgorithmPreset.F32_F32_F32) == exact
    shorter = seconds("h100", precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    assert shorter < rounded < seconds("h100", precision="BF16_BF16_F32_X3")
    assert seconds("t4") == seconds("t4", precision=EXACT)
