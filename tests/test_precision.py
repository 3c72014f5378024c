from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem


@pytest.mark.parametrize(
    ("text", "params", "compute", "output"),
    [
        ("bf16", "float32", "bfloat16", "float32"),
        ("fp16", "float32", "float16", "float32"),
        ("fp32", "float32", "float32", "float32"),
        ("params=bfloat16, compute=bf16", "bfloat16", "bfloat16", "float32"),
        ("params=float32,compute=float16,output=float16", "float32", "float16", "float16"),
    ],
)
def test_text_parses_and_prints_back(text, params, compute, output):
    precision = jaxmem.precision(text)
    assert str(precision) == f"params={params},compute={compute},output={output}"
    assert jaxmem.precision(str(precision)) == precision
    assert jaxmem.precision(precision) is precision


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bf17", "'bf17' is none of float32, bfloat16, float16, float64"),
        ("params=int8", "'int8' is none of"),
        (
            "weights=bfloat16",
            "'weights=bfloat16' does not give one of params, compute, output once",
        ),
        ("params=bf16,params=bf16", "does not give one of params, compute, output once"),
        ("", "'' is none of"),
        (16, "it is of type int"),
    ],
)
def test_bad_text_says_what_to_write(text, why):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.precision(text)
    assert f"The precision {text!r} does not parse: " in str(caught.value)
    assert why in str(caught.value)
    assert "Write 'bf16', 'fp16', 'fp32', or 'params=float32," in str(caught.value)


def test_casts_leave_integers_booleans_and_keys_alone():
    tree = {
        "x": jnp.ones(2, jnp.float32),
        "n": np.ones(2, np.float64),
        "i": jnp.arange(2),
        "b": jnp.array([True]),
        "k": jax.random.key(0),
        "s": "text",
    }
    cast = jaxmem.precision("bf16").cast_to_compute(tree)
    assert cast["x"].dtype == cast["n"].dtype == jnp.bfloat16
    for name in ("i", "b", "k", "s"):
        assert cast[name] is tree[name]
    back = jaxmem.precision("bf16").cast_to_output(cast)
    assert back["x"].dtype == jnp.float32


def test_dtypes_in_any_form_make_one_precision():
    assert jaxmem.Precision(jnp.float32, "bf16", np.dtype("float32")) == jaxmem.precision("bf16")
    assert hash(jaxmem.Precision()) == hash(jaxmem.precision("fp32"))


@pytest.mark.parametrize("dtype", [None, object(), "int32", jnp.int8])
def test_roles_take_floating_point_dtypes_alone(dtype):
    with pytest.raises(jaxmem.JaxmemError, match="is none of float32, bfloat16, float16, float64"):
        jaxmem.Precision(compute=dtype)


def test_float64_needs_jax_to_have_it():
    assert jaxmem.precision("fp64").cast_to_compute(jnp.ones(2, "float32")).dtype == jnp.float64
    with jax.enable_x64(False), pytest.raises(jaxmem.JaxmemError, match="jax_enable_x64"):
        jaxmem.precision("fp64")


def test_flax_modules_by_their_dtypes():
    class Model(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=self.dtype)(x)

    bf16 = jaxmem.precision("bf16")
    model = bf16.module(Model())
    assert model.dtype == jnp.bfloat16 and Model().dtype is None
    assert bf16.module(nn.Dense(2)).param_dtype == jnp.float32

    layer = jaxmem.precision("params=bf16,compute=bf16").module(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert layer.dtype == layer.param_dtype == layer.kernel.dtype == jnp.bfloat16
    norm = bf16.module(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    assert norm(jnp.ones((4, 3))).dtype == jnp.bfloat16 and norm.mean.dtype == jnp.float32


def test_modules_with_no_dtype_are_refused():
    class Model(nn.Module):
        def __call__(self, x):
            return x

    with pytest.raises(
        jaxmem.JaxmemError, match="Model has no dtype to set. Give it a field dtype"
    ):
        jaxmem.precision("bf16").module(Model())
    with pytest.raises(jaxmem.JaxmemError, match="takes a Flax linen or nnx module; got function"):
        jaxmem.precision("bf16").module(test_flax_modules_by_their_dtypes)
