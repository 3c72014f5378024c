"""Matmuls of one row or one column each time, which XLA for GPUs multiplies and sums like any other
arrays, and those that sum nothing, which every XLA does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.program import apply_compiler_rules
from jaxmem.rematerialization.traced import TracedFunction
from tests.cases import slow_but

MULTIPLIED = {
    "rows by matrices": ("bk,bkn->bn", (64, 1024), (64, 1024, 256)),
    "matrices by columns": ("bnk,bk->bn", (64, 256, 1024), (64, 1024)),
    "rows by columns": ("bk,bk->b", (2048, 4096), (2048, 4096)),
    "experts combined": ("te,tec->tc", (2048, 8), (2048, 8, 512)),
    "one query": ("bhk,bshk->bhs", (8, 16, 64), (8, 1024, 16, 64)),
    "nothing summed": ("te,tec->tec", (2048, 8), (2048, 8, 512)),
}
MATMULS = {
    "a row by one matrix": ("k,kn->n", (64,), (64, 32)),
    "nothing summed, no batch": ("a,b->ab", (64,), (32,)),
    "matrices": ("bik,bkj->bij", (4, 8, 16), (4, 16, 8)),
}


def step(name, dtype=jnp.float32):
    equation, *shapes = (MULTIPLIED | MATMULS)[name]

    def loss(operands):
        one, other = map(jax.nn.relu, operands)
        return jnp.sum(jnp.einsum(equation, one, other).astype(jnp.float32) ** 2)

    return loss, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


@pytest.mark.parametrize("target", ["h100", pytest.param("t4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_projected_bytes_are_those_compiled(name, target):
    loss, operands = step(name)
    plan = jaxmem.plan(loss, operands, budget="10 GiB", target=target, compilations=1)
    assert abs(plan.compiled_bytes / plan.projected_bytes - 1) < 0.05, plan
    assert not plan.compiled.flops  # XLA made no matmul of it


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIPLIED)
def test_in_bfloat16(name):
    loss, operands = step(name, jnp.bfloat16)
    plan = jaxmem.plan(loss, operands, budget="10 GiB", target="h100", compilations=1)
    assert abs(plan.compiled_bytes / plan.projected_bytes - 1) < 0.05, plan


@pytest.mark.parametrize("name", MULTIPLIED | MATMULS)
def test_only_these_are_no_matmuls(name):
    loss, operands = step(name)
    program = TracedFunction(loss, (operands,), {}, 0).program
    on_gpu = apply_compiler_rules(program, jaxmem.target("h100").rules)
    assert bool(on_gpu.flops) == (name in MATMULS)
    on_tpu = apply_compiler_rules(program, jaxmem.target("v5e").rules)
    assert bool(on_tpu.flops) == (name != "nothing summed")


@pytest.mark.parametrize("name", slow_but([*MULTIPLIED][:1], MULTIPLIED))
def test_gradients_of_a_plan(name):
    equation, *shapes = MULTIPLIED[name]
    shapes = [tuple(min(size, 6) for size in shape) for shape in shapes]
    keys = jax.random.split(jax.random.key(0), 2)
    with jax.enable_x64():
        operands = [
            jax.random.normal(key, shape, jnp.float64)
            for key, shape in zip(keys, shapes, strict=True)
        ]

        def loss(operands):
            one, other = map(jnp.tanh, operands)
            return jnp.sum(jnp.sin(jnp.einsum(equation, one, other)) ** 2)

        plan = jaxmem.plan(loss, operands)
        expected = jax.grad(loss)(operands)
        for grad in (jax.grad(plan.apply(loss)), jax.jit(jax.grad(jaxmem.remat(loss)))):
            for ours, theirs in zip(grad(operands), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
