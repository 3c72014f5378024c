"""Copies of residuals to host memory and back: what a loop waits for them, and that it does not."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.jaxprs.flattening import flatten
from jaxmem.planning import Region
from jaxmem.planning.copies import exposed_seconds
from jaxmem.program import read_program

SIZE = 4 * 64 * 64  # bytes of each value


def chain(count):
    """Matmuls one after the other, and the values that they read and make, in their order."""

    def run(x, weights):
        for weight in weights:
            x = x @ weight
        return x

    square = jnp.ones((64, 64), jnp.float32)
    body = read_program(flatten(run, (square, [square] * count)))
    assert len(body.kernels) == count
    return body, [0, *(kernel.results[0] for kernel in body.kernels)]


def exposed(offloaded, link, saved=None, regions=(), count=4):
    """Of a chain with one second for each kernel; ``link`` are the seconds that a copy takes."""
    body, values = chain(count)
    kept = [values[at] for at in (range(count) if saved is None else saved)]
    away = [values[at] for at in offloaded]
    return exposed_seconds(body, [1.0] * count, {*kept}, regions, away, SIZE / link)


def test_what_is_there_at_once_and_read_in_the_end_is_hidden():
    # The first matmul's derivative begins six seconds after the pass does, and runs last.
    assert exposed([0], link=4.0) == 0
    assert exposed([0], link=4.5) == pytest.approx(0.5)
    assert exposed([0], link=7.0) == pytest.approx(3.0 + 1.0)


def test_what_is_made_late_and_read_first_is_waited_for():
    # Made a second before the pass ends; read when the derivative begins.
    assert exposed([3], link=0.5) == pytest.approx(0.5)
    assert exposed([3], link=1.5) == pytest.approx(0.5 + 1.5)


def test_copies_follow_one_another():
    # Sent from 0, 1, 2 and 3 seconds on; fetched in the order in which they are read.
    assert exposed([0, 1, 2, 3], link=1.0) == pytest.approx(1.0)
    assert exposed([0, 1, 2, 3], link=2.0) == pytest.approx((8 - 4) + 2.0)


def test_what_others_are_made_of_is_read_when_they_are():
    # Nothing but the input is kept: the last matmul's operand is made of it at once.
    assert exposed([0], link=3.0, saved=[0]) == pytest.approx(3.0)
    # With the third operand on the device the second, which is made again, is read after 4 seconds.
    assert exposed([0], link=3.0, saved=[0, 2, 3]) == 0


def test_a_region_begins_when_all_is_there_that_it_reads():
    assert exposed([0], link=3.0, regions=(Region(0, 4),)) == pytest.approx(3.0)
    assert exposed([0], link=3.0, regions=(Region(0, 2),)) == 0  # begins after four seconds


def layers(params, x):
    """Sixteen layers of width 2,048."""

    def layer(x, weights):
        return x + jnp.tanh(x @ weights[0]) @ weights[1], None

    return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)


LAYERS = (
    jax.ShapeDtypeStruct((16, 2, 2048, 2048), jnp.float32),
    jax.ShapeDtypeStruct((8192, 2048), jnp.float32),
)


@pytest.mark.slow
def test_no_copy_of_a_plan_is_waited_for_where_there_is_time():
    """Without the options XLA's schedule for the RTX 3090 has the two halves of each copy beside
    one another: 85 ms."""
    target = "rtx-3090"
    plain = jaxmem.memory(
        jax.jit(jax.value_and_grad(layers)), *LAYERS, target=target, timeline=False
    )
    plan = jaxmem.plan(
        layers,
        *LAYERS,
        budget=int(0.8 * plain.device),
        target=target,
        offload=True,
        compilations=4,
    )
    assert plan.predicted.host_peak == 2**30
    report = jaxmem.memory(
        jax.jit(jax.value_and_grad(plan.apply(layers)), compiler_options=plan.compiler_options),
        *LAYERS,
        target=target,
        timeline=False,
    )
    assert report.host >= plan.predicted.host_peak
    assert report.transfers.overlapped == report.transfers.count == 2
    waits = "(copies and collectives)"
    assert report.time.by_limit.get(waits, 0.0) < 0.001


def test_the_scheduler_may_use_what_a_plan_with_copies_may():
    """A step that takes most of it is scheduled for few bytes otherwise, and nothing overlaps."""
    target = jaxmem.target("rtx-3090")
    family = jaxmem.targets.family_of(target)
    options = family.planned_options(copies=True)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    limit = family.pass_limit(target, 0, options | family.pass_options)
    assert limit == pytest.approx(
        0.8 * 0.95 * target.memory_bytes, rel=1e-6
    )  # XLA's pass acts where it would
    assert 0.95 < 0.8 * options["xla_gpu_memory_limit_slop_factor"] / 100 < 0.98
    assert "xla_gpu_memory_limit_slop_factor" not in family.planned_options()
