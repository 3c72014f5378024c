"""Compiled bytes, and what remat and offload do to them on a GPU."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import jaxmem
from jaxmem.reports.xla.schedule import count_collectives

LAYERS, BATCH, WIDTH = 32, 8192, 1024
ACTIVATION = BATCH * WIDTH * 4


def deep(w, x):
    for _ in range(LAYERS):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


SHAPES = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(WIDTH, WIDTH), (BATCH, WIDTH)]]


def test_device_is_argument_plus_output_less_alias_plus_temp():
    report = jaxmem.memory(
        jax.jit(lambda w, x: w - jax.grad(deep)(w, x), donate_argnums=0), *SHAPES, target="h200"
    )
    assert report.alias == report.output == WIDTH * WIDTH * 4
    assert report.argument == report.alias + ACTIVATION
    assert report.device == report.argument + report.temp
    assert report.host == 0


@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_an_array_that_the_step_closes_over_counts_as_if_it_were_an_argument(target):
    table = np.random.default_rng(0).random((1024, 4096), np.float32)
    args = [jax.ShapeDtypeStruct((n, 1024), jnp.float32) for n in (1024, 64)]

    def loss(w, x, table):
        return jnp.sum(jnp.tanh(x @ w) @ table.astype(jnp.bfloat16))

    def closed(w, x):
        return loss(w, x, table)

    passed = jaxmem.memory(jax.value_and_grad(loss), *args, table, target=target)
    report = jaxmem.memory(jax.value_and_grad(closed), *args, target=target)
    constant = report.on_device.constant
    # XLA converts and lays it out while it compiles: of what is left there may be two.
    assert passed.on_device.constant < 100 < table.size * 2 <= constant <= 2 * table.nbytes
    assert report.device == report.argument + report.output + report.temp + constant
    assert report.by_kind["constants"] == report.by_module["(constants)"] == constant
    assert sum(report.by_source.values()) == report.device
    assert "constant " in str(report) and "constant " not in str(passed)
    full = jaxmem.memory(jax.value_and_grad(closed), *args, target=target, compile="full")
    assert (full.device, full.on_device) == (report.device, report.on_device)


def test_a_step_without_constants_prints_none():
    number = jax.ShapeDtypeStruct((), jnp.float32)
    assert "constant" not in str(jaxmem.memory(lambda x: x + 1, number, target="h200"))


def test_real_and_abstract_arguments_give_the_same():
    real = [jnp.zeros(s.shape, s.dtype) for s in ((jnp.zeros((8, 4))), jnp.zeros((2, 8)))]
    abstract = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in real]
    of_real, of_abstract = (
        jaxmem.memory(lambda w, x: x @ w, *args, target="h200") for args in (real, abstract)
    )
    assert of_real == of_abstract


def test_the_report_prints_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    target = jaxmem.target("rtx-2080-ti")
    report = jaxmem.memory(lambda x: x + 1, SHAPES[1], target=target)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 45
    assert lines[:6] == [
        f"fits: 64.00 MiB of {jaxmem.format_bytes(target.usable_bytes)} usable, 1%",
        f"compiled for {target}",
        "                  device",
        "argument       32.00 MiB",
        "output         32.00 MiB",
        "total          64.00 MiB",
    ]
    assert report.fits("64MiB") and not report.fits("63MiB")
    assert report.fits("1%") and not report.fits("0.1%")
    with pytest.raises(jaxmem.BudgetError, match="does not parse"):
        report.fits("lots")


def test_sqrt_regions_take_the_memory_of_sqrt_layers():
    plain = jaxmem.memory(jax.grad(deep), *SHAPES, target="h200")
    remat = jaxmem.remat(deep, planner="sqrt")
    planned = jaxmem.memory(jax.grad(remat), *SHAPES, target="h200")
    plan = jaxmem.plan(deep, *SHAPES, planner="sqrt")
    assert plain.temp >= LAYERS * ACTIVATION
    assert planned.temp <= 14 * ACTIVATION  # 2 sqrt(32) = 11.3, and cotangents
    assert abs(plan.projected_bytes / planned.device - 1) < 0.05
    assert abs(plan.plain_bytes / plain.device - 1) < 0.05
    extra = planned.work.flops - plain.work.flops
    assert extra == plan.predicted.recompute_flops > 0


def test_a_projected_budget_holds_in_the_compiled_program():
    plain = jaxmem.memory(jax.grad(deep), *SHAPES, target="h200")
    planned = jaxmem.remat(deep, budget=20 * ACTIVATION)
    report = jaxmem.memory(jax.grad(planned), *SHAPES, target="h200")
    least = jaxmem.memory(jax.grad(jaxmem.remat(deep)), *SHAPES, target="h200")
    assert report.device <= 1.03 * 20 * ACTIVATION
    assert plain.work.flops < report.work.flops < least.work.flops


def test_offload_takes_the_state_off_the_device_and_aliases_it():
    layers, width = 8, 1024
    size = width * width * 4
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    batch = jax.ShapeDtypeStruct((64, width), jnp.float32)

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def report(optimizer):
        step = jaxmem.train_step(loss, optimizer)
        return step.memory(jaxmem.eval_shape(step.init, params), batch, target="h200")

    plain, offloaded = report(optax.adam(1e-3)), report(jaxmem.offload(optax.adam(1e-3)))
    assert plain.device >= 3 * layers * size and plain.host == 0
    assert offloaded.host == offloaded.on_host.alias == 2 * layers * size
    assert offloaded.alias >= layers * size
    # Parameters, gradients, and the state of two parameters at a time.
    assert offloaded.device <= (2 * layers + 4) * size


def test_not_a_function():
    with pytest.raises(jaxmem.JaxmemError, match="jaxmem.memory takes a function or a jitted one"):
        jaxmem.memory(3, target="h200")


# ---- FLOPs in the optimised HLO


def test_contractions_are_counted_in_the_compiled_program():
    def loss(kernel, w, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(jnp.tanh(y).reshape(16, -1) @ w))

    shapes = [(3, 3, 32, 64), (8 * 8 * 64, 128), (16, 16, 16, 32)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    convolution = 2 * (16 * 8 * 8 * 64) * (3 * 3 * 32)
    matmul = 2 * 16 * (8 * 8 * 64) * 128
    forward = jaxmem.memory(loss, *arguments, target="h200").work
    assert (forward.flops, forward.convolutions) == (convolution + matmul, 1)
    gradient = jaxmem.memory(jax.grad(loss, (0, 1, 2)), *arguments, target="h200").work
    assert (gradient.flops, gradient.convolutions) == (3 * (convolution + matmul), 3)


def test_loops_count_their_iterations_and_conditionals_their_dearest_branch():
    def fun(w, x):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)
        return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ w) @ w, lambda x: x @ w, x)

    work = jaxmem.memory(fun, *SHAPES, target="h200").work
    assert work.flops == (7 + 2) * 2 * BATCH * WIDTH * WIDTH
    assert work.matmuls == 9


def test_unknown_hlo_is_refused():
    from jaxmem.reports.xla.work import count_work

    with pytest.raises(jaxmem.JaxmemError, match="no ENTRY computation"):
        count_work("HloModule nothing")


def test_parameters_that_donation_would_move_to_the_host():
    """JAX aliases the donated state to the first result of its shape, here the parameters."""
    optimizer = jaxmem.offload(optax.adam(1e-3))
    params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    state = jaxmem.eval_shape(optimizer.init, params)

    def step(params, state):
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(jaxmem.OffloadError) as caught:
        jaxmem.memory(jax.jit(step, donate_argnums=1), params, state, target="h200")
    assert str(caught.value).startswith(
        "The step's result[0] should be on the device, and the compiled program has it in host "
        "memory. JAX pairs donated arguments with results of the same shape in order"
    )
    both = jaxmem.memory(jax.jit(step, donate_argnums=(0, 1)), params, state, target="h200")
    assert both.host == both.on_host.alias == 2 * 64 * 64 * 4


def test_residuals_that_stay_on_the_device():
    """XLA keeps what a loop sends to the host; unrolled, it sends it when it is needed again."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.tanh(jnp.tanh(checkpoint_name(x, "x") @ w) @ w)

    def scanned(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0])

    def unrolled(ws, x):
        return jnp.sum(functools.reduce(layer, ws, x))

    ws = jax.ShapeDtypeStruct((6, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    assert jaxmem.memory(jax.grad(scanned), ws, x, target="h200").on_host.temp == 6 * x.size * 4
    with pytest.raises(jaxmem.OffloadError) as caught:
        jaxmem.memory(jax.grad(unrolled), ws, x, target="h200")
    assert str(caught.value).startswith(
        "The step keeps 6.00 MiB in host memory, first the value sent there at test_memory.py:"
    )


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_state_that_is_not_written_in_place():
    optimizer = jaxmem.offload(optax.adam(1e-3))
    params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    state = jaxmem.eval_shape(optimizer.init, params)
    forgets = jax.jit(lambda p, state: optimizer.update(p, state, p)[0], donate_argnums=(0, 1))
    with pytest.raises(jaxmem.OffloadError) as caught:
        jaxmem.memory(forgets, params, state, target="h200")
    assert str(caught.value).startswith("state[0].mu is donated in host memory, and the compiled")


def printing(x):
    jax.lax.cond(x[0, 0] > 0, lambda x: jax.debug.print("{}", x), lambda x: None, x[0])
    return x + 1


def printing_in_order(x):
    jax.debug.print("{}", x[0], ordered=True)
    return jax.lax.scan(lambda c, _: (jax.debug.print("{}", c) or c + 1, None), x, length=2)[0]


def calling(x):
    return jax.pure_callback(lambda x: x, x, x) @ x


def calling_for_effect(x):
    return io_callback(lambda x: x, x, x, ordered=True) @ x


def checking(x):
    return eqx.error_if(x, jnp.any(jnp.isnan(x)), "not a number") + 1


@pytest.mark.parametrize(
    "step", [printing, printing_in_order, calling, calling_for_effect, checking]
)
def test_calls_into_python_are_left_out_and_named(step):
    with pytest.warns(jaxmem.JaxmemWarning, match="calls from the device into Python") as caught:
        report = jaxmem.memory(step, SHAPES[0], target="h200")
    assert "cannot be compiled for h200, which is not there" in str(caught[0].message)
    file = "_errors.py" if step is checking else "test_memory.py"
    assert file in str(caught[0].message)
    size = SHAPES[0].size * 4
    assert size <= report.output < size + 64
    made = size if step in (calling, calling_for_effect) else 0
    assert made <= report.temp < made + 4 * size, "what a call returns is in memory"


def test_bound_methods_and_partials_keep_their_donation():
    class Model:
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x):
            return x + 1

    assert jaxmem.memory(Model().step, SHAPES[0], target="h200").output == SHAPES[0].size * 4
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    x = jnp.zeros((8, 8), jnp.float32)
    assert jaxmem.memory(functools.partial(add, x), x, target="h200").alias == 8 * 8 * 4


@pytest.mark.parametrize("routine", ["cholesky", "qr", "eigh"])
def test_linear_algebra_compiles(routine):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert jaxmem.memory(getattr(jnp.linalg, routine), x, target="h200").argument == 64 * 64 * 4


def test_arguments_that_the_step_does_not_take():
    with pytest.raises(jaxmem.JaxmemError, match=r"given deep\(w, x\) and arguments that it does"):
        jaxmem.memory(deep, SHAPES[0], target="h200")


def test_a_device_whose_memory_is_not_known():
    from jaxmem.targets import LocalDevice

    report = jaxmem.memory(jnp.sin, jnp.ones(8), target="local")
    report = dataclasses.replace(report, target=LocalDevice("gpu", "some GPU", 0))
    assert "usable" not in str(report)
    assert report.fits("1GiB")
    unknown = "The memory of the target 'local' is not known; pass a budget."
    with pytest.raises(jaxmem.JaxmemError, match=unknown):
        report.fits()


@pytest.mark.parametrize(
    ("dtype", "size"), [("pred", 1), ("s16", 2), ("bf16", 2), ("f8e4m3fn", 1), ("c64", 8)]
)
def test_bytes_of_an_array_by_its_dtype(dtype, size):
    from jaxmem.reports.xla.hlo import array_bytes

    assert array_bytes(dtype, "2,3") == 6 * size
    assert array_bytes(dtype, "") == size


def test_totals_alone_serve_the_same_program_on_other_lines():
    def one(x):
        return jnp.tanh(x @ x).sum()

    def other(x):
        with jax.named_scope("elsewhere"):
            return jnp.tanh(x @ x).sum()

    other.__name__ = one.__name__
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    reports = [jaxmem.memory(jax.jit(f), x, target="h200", timeline=False) for f in (one, other)]
    located = jaxmem.memory(jax.jit(one), x, target="h200")
    assert reports[0].hlo == reports[1].hlo
    assert "elsewhere" not in reports[1].hlo
    assert (reports[0].device, reports[0].work) == (located.device, located.work)
    with pytest.raises(jaxmem.JaxmemError, match="or timeline=False was asked for"):
        _ = reports[0].timeline


ASYNCHRONOUS = """HloModule step

ENTRY %main (a: f32[4], b: f32[8]) -> f32[32] {
  %a = f32[4]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %g = ((f32[4]{0}, f32[8]{0}), (f32[16]{0}, f32[32]{0})) all-gather-start(%a, %b), dimensions={0}
  %gd = (f32[16]{0}, f32[32]{0}) all-gather-done(%g)
  %c = f32[16]{0} get-tuple-element(%gd), index=0
  %d = f32[32]{0} get-tuple-element(%gd), index=1
  %one = f32[64]{0} all-gather(%c), dimensions={0}
  %r = (f32[16]{0}, f32[32]{0}) all-reduce-start(%c, %d), to_apply=%add
  %rd = (f32[16]{0}, f32[32]{0}) all-reduce-done(%r)
  %s = (f32[4]{0}, f32[8]{0}) reduce-scatter(%c, %d), dimensions={0}, to_apply=%add
  %p = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%a)
  %pd = f32[4]{0} collective-permute-done(%p)
  %t = ((f32[16]{0}), f32[4]{0}) async-start(%c), calls=%later
  %f = f32[16]{0} fusion(%c), kind=kLoop, calls=%fused
  %td = f32[4]{0} async-done(%t)
  ROOT %e = f32[32]{0} negate(%d)
}

%later (x: f32[16]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  ROOT %y = f32[4]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add
}
"""


def test_combined_collectives_count_all_their_arrays():
    assert count_collectives(ASYNCHRONOUS).bytes == {
        "all-gather": 4 * (16 + 32) + 4 * 64,
        "all-reduce": 4 * (16 + 32),
        "reduce-scatter": 4 * (16 + 32) + 4 * 16,
        "collective-permute": 4 * 4,
    }


def test_collectives_that_run_beside_others_are_counted():
    """The second reduce-scatter is asynchronous, in a computation of its own, beside a fusion."""
    found = count_collectives(ASYNCHRONOUS)
    assert found.count["reduce-scatter"] == 2
    assert {kind: n for kind, n in found.overlapped.items() if n} == {"reduce-scatter": 1}
    assert "2 reduce-scatter (256 B, 1 overlapped)" in str(found)
