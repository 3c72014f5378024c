"""Low precision and accumulation on ResNet50, compiled for an H200: the figures of benchmarks/."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxmem

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "resnet50"), str(ROOT)]

from train import plan_step  # noqa: E402

from benchmarks.levers import accumulation  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def float32_bytes():
    step, args = plan_step(200)
    return jaxmem.memory(step, *args, target="h200").device


@pytest.mark.parametrize("by", ["autocast", "dtype"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_takes_half_the_bytes(float32_bytes, precision, by):
    levers = {"precision": precision}
    if by == "dtype":
        levers["dtype"] = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]
    if precision == "fp16":
        levers["loss_scale"] = jaxmem.LossScale()
    step, args = plan_step(200, **levers)
    assert jaxmem.memory(step, *args, target="h200").device <= 0.52 * float32_bytes


def test_eight_slices_take_the_memory_of_one():
    (step, small), (sliced, large) = plan_step(32), plan_step(256, microbatches=8)
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(small[0].params))
    one = jaxmem.memory(step, *small, target="h200").device
    assert jaxmem.memory(sliced, *large, target="h200").device <= 1.15 * one + parameters


def test_eight_micro_steps_cost_what_eight_gradients_and_an_update_cost():
    flops, moved = accumulation.overhead()
    assert abs(flops) <= 0.001 and 0 <= moved <= 0.03
