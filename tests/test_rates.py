"""The rates of matmuls and convolutions, by their operands and by how exact they have to be."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem

EXACT = jax.lax.Precision.HIGHEST


@pytest.mark.parametrize(
    ("target", "dtype", "precision", "tflops"),
    [
        ("a100-80gb", "float32", "default", 156),  # TF32, as XLA multiplies float32 there
        ("a100-80gb", "float32", "high", 156),
        ("a100-80gb", "float32", "highest", 19.5),
        ("a100-80gb", "float32", "tfloat32x3", 52),
        ("a100-80gb", "bfloat16", "highest", 312),
        ("a100-80gb", "float64", "default", 19.5),
        ("a100-80gb", "float8_e4m3fn", "default", 312),  # no units of its own
        ("h100", "float8_e4m3fn", "default", 1978.9),
        ("h100", "int8", "default", 1978.9),
        ("h100", "float32", "bfloat16x3", 989.4 / 3),
        ("v100-16gb", "float32", "default", 15.7),  # no TF32 before Ampere
        ("v100-16gb", "bfloat16", "default", 15.7),  # nor bfloat16
        ("rtx-2080-ti", "float16", "default", 53.8),  # summed in float32; 107.6 in float16
        ("rtx-3090", "float16", "default", 71),
        ("v5e", "float32", "default", 197),
        ("v5e", "float32", "high", 197 / 3),
        ("v5e", "float32", "highest", 197 / 6),
        ("v5e", "int8", "default", 394),
    ],
)
def test_rates_as_they_are(target, dtype, precision, tflops):
    found = jaxmem.target(target).flops_per_second(jnp.dtype(dtype), precision)
    assert found == pytest.approx(tflops * 1e12)


def seconds(target, **options):
    """Predicted for a matmul of float32."""

    def loss(w, x):
        return jnp.sum(jnp.dot(x, w, **options))

    constraints = {"target": target, "budget": "1GiB"}
    args = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2
    return jaxmem.plan(loss, *args, **constraints).predicted.seconds


def test_predictions_follow_the_precision():
    rounded = seconds("h100")
    exact = seconds("h100", precision=EXACT)
    assert exact > 3 * rounded
    with jax.default_matmul_precision("float32"):
        assert seconds("h100") == exact
    with jax.default_matmul_precision("bfloat16"):
        assert seconds("h100") == rounded
    assert seconds("h100", precision=(jax.lax.Precision.DEFAULT, EXACT)) == exact
    assert seconds("h100", precision=jax.lax.DotAlgorithmPreset.F32_F32_F32) == exact
    shorter = seconds("h100", precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    assert shorter < rounded < seconds("h100", precision="BF16_BF16_F32_X3")
    assert seconds("t4") == seconds("t4", precision=EXACT)
