"""Where XLA's own rematerialization pass begins, against where it does."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.reports.xla.usage import temporary_bytes
from jaxmem.targets import FAMILIES

A100 = jaxmem.target("a100-80gb")
CUDA = FAMILIES["cuda"]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def dense(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def convolutions(ws, x):
    for w in ws:
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)
        x = jax.nn.relu(x - jnp.mean(x, axis=(0, 1, 2), keepdims=True))
    return jnp.mean(x**2)


PROGRAMS = {
    "dense": (dense, ([array(256, 256)] * 12, array(8192, 256))),
    "convolutions": (convolutions, ([array(3, 3, 32, 32)] * 6, array(16, 28, 28, 32))),
}


def compiled(name="dense", target=A100, donate=(0,), **options):
    loss, args = PROGRAMS[name]

    def step(ws, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return [w - 0.1 * d for w, d in zip(ws, gradients, strict=True)], value

    return jaxmem.memory(
        jax.jit(step, donate_argnums=donate), *args, target=target, compiler_options=options
    )


def target_of(report, above: float):
    """An A100 of so much memory that the limit of the pass is that share above what it counts."""
    boundary = report.argument + report.output - report.alias
    limit = int((1 + above) * temporary_bytes(report.hlo))
    return CUDA.with_pass_limit(A100, boundary, {}, limit)


@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pass_acts_from_the_limit_on(name, donate):
    far = compiled(name, donate=donate)
    assert far.cliff.limit > 100 * far.device and not far.cliff.near
    assert "rematerialize" not in str(far)
    above = compiled(name, target_of(far, 0.01), donate)
    assert not above.cliff.recomputed and above.device == far.device
    assert 0.005 < above.cliff.left / far.temp < 0.015
    below = compiled(name, target_of(far, -0.01), donate)
    assert below.cliff.recomputed


def test_a_step_near_the_limit_is_told():
    far = compiled()
    near = compiled(target=target_of(far, 0.02))
    share = near.cliff.left / near.device
    line = (
        f"note: XLA starts to rematerialize at {jaxmem.format_bytes(near.cliff.limit)} "
        f"({share:.1%} above this step)"
    )
    assert 0.01 < share < 0.03 and line in str(near).splitlines()
    assert near.cliff.limit == near.device + near.cliff.left
    about = json.loads(near.to_json())["cliff"]
    assert about == {"limit": near.cliff.limit, "left": near.cliff.left}
    assert "XLA starts" not in str(compiled(target=target_of(far, 0.06)))
    over = str(compiled(target=target_of(far, -0.01)))
    assert "note: XLA recomputes 1 value by itself (1.074 GFLOP, " in over
    assert "times this step)" in str(far.cliff)


def test_what_would_be_recomputed_is_what_is():
    far = compiled()
    found = far.cliff.compile(0.3)
    smaller = compiled(target=target_of(far, -0.3))
    assert found.device == smaller.device < far.device
    assert found.flops == smaller.work.flops - far.work.flops > 0
    assert found.recomputed == smaller.cliff.recomputed
    assert found.seconds > 0 and found.moved > 0
    text = str(found)
    assert text.startswith(f"XLA recomputes {len(found.recomputed)} values by itself (")
    assert "test_cliff.py" in text and max(map(len, text.splitlines())) <= 100
    for wrong in (1, -0.1):
        with pytest.raises(jaxmem.JaxmemError, match="takes over= from 0 to below 1; got"):
            far.cliff.compile(wrong)


def test_where_the_pass_is_off_there_is_none():
    assert compiled(xla_disable_hlo_passes="copy_fusion,rematerialization").cliff is None
    assert compiled(xla_disable_hlo_passes="copy_fusion").cliff is not None
    loss, (ws, x) = PROGRAMS["dense"]
    plan = jaxmem.plan(loss, ws, x, target="a100-80gb", budget="60MiB")
    step = jax.jit(jax.grad(plan.apply(loss)), compiler_options=plan.compiler_options)
    assert jaxmem.memory(step, ws, x, target="a100-80gb").cliff is None
    assert jaxmem.memory(loss, ws, x, target="local").cliff is None
    assert FAMILIES["tpu"].pass_limit(jaxmem.target("v5e"), 0, {}) is None


def test_the_limit_follows_the_option_that_moves_it():
    option = {"xla_gpu_memory_limit_slop_factor": 50}
    usual, half = compiled().cliff, compiled(**option).cliff
    boundary = compiled().argument + compiled().output - compiled().alias
    allowed = 0.8 * A100.memory_bytes - boundary
    assert usual.limit - half.limit == pytest.approx(0.45 * allowed, rel=1e-6)
    target = CUDA.with_pass_limit(A100, boundary, option, 10**9)
    assert CUDA.pass_limit(target, boundary, option) == pytest.approx(10**9, abs=2)
    assert dataclasses.replace(target, memory_bytes=A100.memory_bytes) == A100


def test_the_pass_counts_every_result_till_its_last_reader():
    hlo = """HloModule m

%body (state: (f32[1000], f32[10])) -> (f32[1000], f32[10]) {
  %state = (f32[1000]{0}, f32[10]{0}) parameter(0)
  %large = f32[1000]{0} get-tuple-element(%state), index=0
  %small = f32[10]{0} get-tuple-element(%state), index=1
  %inner = f32[500]{0} slice(%large), slice={[0:500]}
  %again = f32[1000]{0} pad(%inner, %small), padding=0_500
  ROOT %both = (f32[1000]{0}, f32[10]{0}) tuple(%again, %small)
}

%condition (given: (f32[1000], f32[10])) -> pred[] {
  %given = (f32[1000]{0}, f32[10]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (x: f32[1000]) -> f32[10] {
  %x = f32[1000]{0} parameter(0)
  %copy = f32[1000]{0} negate(%x)
  %second = f32[1000]{0} negate(%copy)
  %ten = f32[10]{0} slice(%second), slice={[0:10]}
  %carry = (f32[1000]{0}, f32[10]{0}) tuple(%second, %ten)
  %loop = (f32[1000]{0}, f32[10]{0}) while(%carry), condition=%condition, body=%body
  %first = f32[1000]{0} get-tuple-element(%loop), index=0
  ROOT %end = f32[10]{0} slice(%first), slice={[0:10]}
}
"""
    # Two of the large ones, and, in the loop, one with what is carried and the inner one.
    assert temporary_bytes(hlo) == max(2 * 4000, 4000 + 40 + 2000)
    shorter = hlo.replace(
        "%second = f32[1000]{0} negate(%copy)", "%second = f32[1000] bitcast(%copy)"
    )
    assert temporary_bytes(shorter) == 4000 + 40 + 2000
