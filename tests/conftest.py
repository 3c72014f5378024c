"""Strict JAX for every test: CPU only, float64, no silent promotion of dtypes or ranks."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs of the tests run for microseconds on the CPU and compile for seconds, which is a third
# less without LLVM's optimisations. XLA's own, and compilations for targets, are as ever.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def key():
    return jax.random.key(0)
