"""Projections of rows of regions as their author would write them."""

import jax
import jax.numpy as jnp
import pytest
from test_segments import f32, own_rule, sliced, written

import jaxmem


def gelus_of_convolutions(wrap):
    @wrap
    def layer(kernel, x):
        return jax.nn.gelu(jax.lax.conv(x, kernel, (1, 1), "SAME"))

    def loss(kernels, x):
        for kernel in kernels:
            x = layer(kernel, x)
        return jnp.mean(x**2)

    return loss, ([f32(32, 32, 3, 3)] * 4, f32(16, 32, 64, 64))


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize(
    ("program", "off"),
    # (The newest XLA has an array of the last block less.)
    [(own_rule, 0.08), (gelus_of_convolutions, 0.01), (sliced, 0.1)],
)
def test_a_row_is_projected_with_what_each_block_hands_on_in_memory(program, off, policy):
    plain, args = program(lambda layer: layer)
    (plan,) = (plan for plan in written(plain, args) if plan.segments[0].policy == policy)
    as_it_is, row = (
        jaxmem.memory(jax.value_and_grad(fun), *args, target="h100", timeline=False)
        for fun in (plain, plan.apply(plain))
    )
    assert plan.projected_bytes == pytest.approx(row.device, rel=off)
    more = row.work.flops - as_it_is.work.flops
    assert plan.predicted.recompute_flops == pytest.approx(more, rel=0.02, abs=1e8)
