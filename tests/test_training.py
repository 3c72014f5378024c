"""A short training in low precision reaches the loss of float32 (benchmarks/levers/training.py)."""

import functools

import numpy as np
import pytest

from benchmarks.levers import training

pytestmark = pytest.mark.slow

STEPS = 60


@functools.cache
def float32_loss():
    losses, _ = training.train(training.characters, "fp32", STEPS, 1)
    assert losses[0] < 3  # of 4.6 for letters at random
    return losses[0]


@pytest.mark.parametrize("variant", ["bf16", "fp16", "fp16, 1% overflows"])
def test_characters_reach_the_loss_of_float32(variant):
    losses, skipped = training.train(training.characters, variant, STEPS, 1)
    np.testing.assert_allclose(losses[0], float32_loss(), rtol=0.01)
    assert skipped == ("overflows" in variant)
