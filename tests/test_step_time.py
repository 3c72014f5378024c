"""The predicted time of a compiled step, by its kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.program import costs
from jaxmem.reports.speed.model import collective_seconds
from jaxmem.reports.speed.step_time import step_time
from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.groups import first_group
from jaxmem.reports.xla.hlo import operands_of, result_bytes
from jaxmem.targets.links import Group

A100 = jaxmem.target("a100-80gb")
SHARES = A100.shares


def compiled(fun, *shapes, dtype="float32", **options):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jaxmem.memory(fun, *args, target="a100-80gb", **options)


@pytest.mark.parametrize(
    ("precision", "rate"), [("default", A100.peaks.tfloat32), ("highest", A100.peaks.float32)]
)
def test_a_matmul_takes_its_flops_over_the_rate_of_its_precision(precision, rate):
    side = 108 * 128  # whole tiles for every core, whole waves
    report = compiled(lambda x, w: jnp.dot(x, w, precision=precision), (side, 4096), (4096, side))
    time = report.time
    assert report.work.flops == 2 * side * side * 4096
    expected = report.work.flops / (SHARES.matmul * rate) + SHARES.launch
    expected += A100.feeding_seconds(report.work.flops, "float32")
    assert time.seconds == pytest.approx(expected, rel=1e-3)
    assert list(time.by_limit) == ["arithmetic"]


def test_elementwise_work_takes_its_bytes_over_the_bandwidth():
    report = compiled(lambda x: jnp.tanh(x) + 1, (8192, 8192))
    assert report.moved == 2 * 4 * 8192**2
    expected = report.moved / (SHARES.memory * A100.memory_bandwidth) + SHARES.launch
    assert report.time.seconds == pytest.approx(expected, rel=1e-6)
    assert list(report.time.by_limit) == ["memory"]


def test_an_iteration_moves_its_slices_of_a_stack():
    """What a loop slices of a stack, or writes into one, counts once, not once an iteration."""
    steps, width = 32, 1024

    def through(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x * w), x), x, weights)

    report = compiled(through, (width, width), (steps, width, width))
    each = 4 * width**2
    # An iteration copies the carry into the stack, and reads carry and slice to write the carry.
    # The stack may be filled with zeros once, and the first carry copied.
    assert 5 * steps * each <= report.moved <= (6 * steps + 4) * each
    assert max(one.times for one in report.time.ran) == steps


def step(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_times_add_up_by_phase_module_and_line():
    grad = jax.value_and_grad(step)
    shapes = [(1024, 1024)] * 4
    args = (
        [jax.ShapeDtypeStruct(s, "float32") for s in shapes],
        jax.ShapeDtypeStruct((4096, 1024), "float32"),
    )
    report = jaxmem.memory(grad, *args, target="a100-80gb")
    time = report.time
    for rows in (time.by_phase, time.by_module, time.by_source, time.by_limit):
        assert sum(rows.values()) == pytest.approx(time.seconds)
    assert time.by_phase["backward"] > time.by_phase["forward"]
    text = str(time)
    assert text.startswith(f"{time.seconds * 1e3:.4g} ms a step on a100-80gb, predicted")
    assert "longest kernels" in text and "test_step_time.py" in text
    assert max(map(len, text.splitlines())) <= 100
    assert all(f" {phase}" in text for phase in ("forward", "backward"))


def test_copies_to_the_host_run_beside_kernels():
    """What XLA waits for counts as waiting, and what it does meanwhile does not."""

    def loss(weights, x):
        def body(x, w):
            return jnp.tanh(jnp.dot(x, w, precision="highest")), None

        return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

    args = [jax.ShapeDtypeStruct(s, "float32") for s in [(16, 2048, 2048), (4096, 2048)]]
    plan = jaxmem.plan(loss, *args, target="a100-80gb", budget="900MiB", offload=True)
    assert plan.predicted.host_bytes
    report = jaxmem.memory(
        jax.value_and_grad(plan.apply(loss)),
        *args,
        target="a100-80gb",
        compiler_options=plan.compiler_options,
    )
    slow = dataclasses.replace(A100, host_bandwidth=A100.host_bandwidth / 1000)
    fast = dataclasses.replace(A100, host_bandwidth=A100.host_bandwidth * 1000)
    waits = [step_time(report.hlo, report.arguments, one).waiting for one in (slow, A100, fast)]
    assert waits[0] > 100 * waits[1] and waits[1] >= waits[2]
    # Each turn sends a slice of what waits in host memory, and gets one.
    sent = 2 * plan.predicted.host_bytes / (SHARES.link * slow.host_bandwidth)
    assert waits[0] == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(
    ("groups", "bandwidth"),
    [
        ("[8,8]<=[64]", 300e9),  # within nodes
        ("[1,64]<=[64]", 200e9),  # all of eight nodes: each sends by its eight network cards
        ("[8,8]<=[8,8]T(1,0)", 25e9),  # one of each node
        ("{{0,8,16,24},{1,9,17,25}}", 25e9),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(groups, bandwidth):
    target = jaxmem.target("a100-80gb", count=64)
    line = f"f32[8] all-gather(%x), replica_groups={groups}"
    count = 4 if "{" in groups else 64 if "[1,64]" in groups else 8
    seconds = collective_seconds(line, "all-gather", 10**11, target)
    share = SHARES.link if bandwidth == 300e9 else SHARES.network
    assert seconds == pytest.approx((count - 1) / count * 1e11 / (share * bandwidth), rel=0.03)


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("{{0,2},{1,3}}", [0, 2]),
        ("[2,4]<=[8]", [0, 1, 2, 3]),
        ("[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("mesh['data'=4,'model'=2] {'data'}", [0, 2, 4, 6]),
        ("mesh['data'=4,'model'=2] {'model'}", [0, 1]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=8] {'b':(1)2}", [0, 4]),
        ("mesh['a'=2,'b'=8] {'b':(4)2}", [0, 1]),
        ("mesh['a'=2,'b'=8] {'b':(1)2,'b':(4)2}", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}", [0, 2, 4, 6]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [0, 2, 4, 6]),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,0,1)) {'b','c'}", [0, 2, 4, 6]),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [3, 1]),
        ("", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_groups_are_read_in_every_form(written, devices):
    line = f"f32[8] all-gather(%x), channel_id=1, replica_groups={written}, dimensions={{0}}"
    assert first_group(line, 8).tolist() == devices


def test_groups_of_a_mesh_are_those_of_its_axes():
    """Whatever form XLA writes: float16 maxima over windows are gathered, and the program has
    groups by axes then."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=auto)

    def rows(shape, *axes):
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, "float16", sharding=spec)

    def loss(w, x):
        x = (x @ w).reshape(-1, 32, 32)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "SAME").sum()

    args = rows((512, 1024), None, "model"), rows((1024, 512), "data", None)
    report = jaxmem.memory(jax.grad(loss), *args, target=jaxmem.target("h100", count=8))
    lines = [line for line in report.hlo.splitlines() if "replica_groups=" in line]
    groups = {tuple(sorted(first_group(line, 8).tolist())) for line in lines}
    assert groups and groups <= {(0, 1), (0, 2, 4, 6), tuple(range(8))}
    for form in ("replica_groups={{", "replica_groups=[", "replica_groups=mesh["):
        lines = [line for line in lines if form not in line]
    assert lines == []


def test_collectives_of_a_sharded_step_are_waited_for():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=auto)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    args = (
        [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2,
        jax.ShapeDtypeStruct((8192, 1024), "float32", sharding=rows),
    )
    target = jaxmem.target("a100-80gb", count=8)
    report = jaxmem.memory(jax.grad(step), *args, target=target)
    assert report.collectives.count["all-reduce"]
    assert 0 < report.time.waiting < report.time.seconds


def test_what_runs_beside_a_collective_is_no_time_of_its_own():
    """Of an asynchronous reduce-scatter, which XLA writes as a call of a computation."""
    hlo = """HloModule step, entry_computation_layout={(f32[1048576], f32[1048576,1024])->f32[]}

%later (x: f32[1048576]) -> f32[131072] {
  %x = f32[1048576]{0} parameter(0)
  ROOT %y = f32[131072]{0} reduce-scatter(%x), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (a: f32[1048576], b: f32[1048576,1024]) -> f32[131072] {
  %a = f32[1048576]{0} parameter(0)
  %b = f32[1048576,1024]{1,0} parameter(1)
  %s = ((f32[1048576]{0}), f32[131072]{0}) async-start(%a), calls=%later
  BETWEEN
  ROOT %d = f32[131072]{0} async-done(%s)
}
"""
    target = jaxmem.target("a100-80gb", count=8)
    long = "%n = f32[1048576,1024]{1,0} negate(%b)"
    alone, beside = (step_time(hlo.replace("BETWEEN", line), (), target) for line in ("", long))
    assert alone.waiting == target.collective_seconds("reduce-scatter", 2**22, Group(8, 8))
    assert beside.waiting == 0 and beside.seconds > 8 * 2**30 / 2039e9


def test_the_time_on_a_cpu_is_refused():
    report = jaxmem.memory(lambda x: x + 1, jnp.ones(8), target="local")
    with pytest.raises(jaxmem.JaxmemError, match="rates of .* not known|No rates of CPUs"):
        report.time  # noqa: B018


def test_elements_of_tuples_that_are_operands_are_instructions():
    """As XLA writes them since jax 0.12: ``%pair#1`` has a name and a shape of its own."""
    hlo = """HloModule m

ENTRY %main (pair: (f32[2,3], (s32[], bf16[4]))) -> bf16[4] {
  %pair = (f32[2,3]{1,0}, /*index=1*/(s32[], bf16[4]{0})) parameter(0)
  %sum = f32[2,3]{1,0} add(%pair#0, %pair#0), metadata={op_name="a %b#1"}
  ROOT %twice = bf16[4]{0} add(%pair#1#1, %pair#1#1)
}
"""
    lines = computations_of(hlo)["main"]
    assert list(lines) == ["pair", "pair#0", "sum", "pair#1", "pair#1#1", "twice"]
    assert lines["pair#1#1"] == "bf16[4]{0} get-tuple-element(%pair#1), index=1"
    assert operands_of(lines["twice"]) == ["pair#1#1"] * 2
    assert [result_bytes(lines[name]) for name in ("pair", "pair#0", "pair#1#1")] == [36, 24, 8]


@pytest.mark.parametrize(("narrow", "wide"), [("float32", "complex64"), ("float64", "complex128")])
def test_a_complex_matmul_is_four_real_ones(narrow, wide):
    def time_of(dtype):
        array = jax.ShapeDtypeStruct((2048, 2048), dtype)
        report = jaxmem.memory(jnp.matmul, array, array, target="h100")
        return report.work.flops, report.time.seconds

    (flops, seconds), (complex_flops, complex_seconds) = time_of(narrow), time_of(wide)
    assert flops == 2 * 2048**3 and complex_flops == 4 * flops
    # (Each reads parts twice as long from the cache.)
    target = jaxmem.target("h100")
    fed = target.feeding_seconds(complex_flops, wide) - 4 * target.feeding_seconds(flops, narrow)
    assert complex_seconds == pytest.approx(4 * seconds + fed, rel=0.1)
    equation = jax.make_jaxpr(jnp.matmul)(*[jnp.ones((4, 4), wide)] * 2).eqns[0]
    assert costs.flops(equation) == 4 * 2 * 4**3
