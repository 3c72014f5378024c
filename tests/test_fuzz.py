"""Random programs under random plans: values and gradients equal the plain function's.

``JAXMEM_FUZZ`` is the number of programs; ``make fuzz`` runs fifty times as many as the default.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings, strategies as st

import jaxmem
from jaxmem import jaxprs
from jaxmem.loops import Schedule
from jaxmem.planning import LeadingIterations, Loop, Region
from jaxmem.program import Program, read_program
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.plan_facts import OwnRegions, Predicted

PROGRAMS = int(os.environ.get("JAXMEM_FUZZ", "400"))
N = 4  # every value is [N, N], so that each operation is compiled once


@jax.custom_vjp
def odd(x):
    return x * jnp.cos(x)


odd.defvjp(lambda x: (odd(x), jnp.cos(x)), lambda c, g: (g * c - 0.5 * g,))


@jax.custom_vjp
def clipped(x):
    """Its cotangent is clipped: twice a part of it is not the whole of it."""
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (jnp.clip(g * c, -0.1, 0.1),))


@jax.custom_jvp
def signed(x):
    """The same, by a transpose of its own."""
    return jnp.cos(x)


@signed.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    call = jax.custom_derivatives.linear_call
    return signed(x), call(lambda s, t: t * s, lambda s, g: 0.1 * jnp.tanh(g * s), -jnp.sin(x), t)


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0.0)


soft.defjvp(lambda p, t: (soft(p[0]), t[0] * jax.nn.sigmoid(p[0])))


def convolve(a, b):
    out = jax.lax.conv_general_dilated(a[None, None], b[None, None, :3, :3], (1, 1), "SAME")
    return out[0, 0]


def pooled(a, b):
    return jax.lax.reduce_window(a * b, -jnp.inf, jax.lax.max, (2, 3), (1, 1), "SAME") + a


def pooled_view(a, b):
    y = jnp.tanh(a + b)
    return (
        jax.lax.reduce_window(y[None], -jnp.inf, jax.lax.max, (1, 2, 2), (1, 1, 1), "SAME")[0] * y
    )


def brain(a, b):
    return (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(a.dtype)


def body(c, x):
    state, b = c
    y = jnp.tanh(state @ b) + x[None]
    return (y * 0.5, b), jnp.sum(jnp.sin(y))


def loop(a, b):
    (out, _), sums = jax.lax.scan(body, (a, b), b)
    return out + jnp.sum(sums)


def body_back(c, _):
    state, b = c
    return (jnp.sin(state) @ b, b), jnp.cos(state[0])


def loop_back(a, b):
    (out, _), stacked = jax.lax.scan(body_back, (a, b), length=N, reverse=True)
    return out + stacked


def loop_of_loops(a, b):
    def outer(state, row):
        (state, _), stacked = jax.lax.scan(body, (state, b), jnp.sin(b))
        (state, _), _ = jax.lax.scan(body_back, (state, b), length=N - 1, reverse=True)
        return state + row[None], jnp.sum(stacked) + row

    out, stacked = jax.lax.scan(outer, a, b)
    return out * stacked


def loop_of_regions(a, b):
    """As `nn.scan` of `nn.remat` has it, with a region in a call, and some by a policy."""

    @jax.checkpoint
    def block(state, row):
        inner = jax.checkpoint(body_back, policy=jax.checkpoint_policies.dots_saveable)
        (state, _), _ = jax.jit(inner)((state, b), None)
        return jnp.sin(state) @ b + row[None], jnp.cos(state[0])

    out, stacked = jax.lax.scan(block, a, b)
    return out + stacked


@jax.jit
def jitted(a, b):
    return jnp.sin(a @ b)


@jax.checkpoint
def region(a, b):
    return jnp.sin(a @ b) * a


def then(a, b):
    return jnp.sin(a) @ b


def split(a, b):
    left, right = jnp.split(a, 2, axis=0)
    return jnp.concatenate([right * 2.0, left]) + b


def picked(a, b):
    index = jnp.argsort(b[:, 0])
    return a[index] + jnp.take_along_axis(b, index[:, None], 1)


def branch(a, b):
    return jax.lax.cond(jnp.sum(a) > 0, then, jnp.subtract, a, b)


def noisy(a, b):
    key = jax.random.fold_in(jax.random.key(3, impl="rbg"), 7)
    return jnp.where(jax.random.bernoulli(key, 0.7, a.shape), a, 0.0) * b


def dead(a, b):
    _ = jnp.linalg.norm(jnp.exp(a) @ b)
    return a * 1.5


def statistics(a, b):
    centred = a - a.mean(0, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(0, keepdims=True) + 1.0) + b


OPERATIONS = {
    "sin": lambda a, b: jnp.sin(a),
    "tanh": lambda a, b: jnp.tanh(a + b),
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (2.0 + b**2),
    "exp": lambda a, b: jnp.exp(-(a**2)),
    "relu": lambda a, b: jax.nn.relu(a),
    "matmul": lambda a, b: a @ b,
    "matmul_t": lambda a, b: jnp.einsum("ij,kj->ik", a, b),
    "convolution": convolve,
    "pooling": pooled,
    "pooling_view": pooled_view,
    "bfloat16": brain,
    "softmax": lambda a, b: jax.nn.softmax(a, -1) @ b,
    "max": lambda a, b: a - jnp.max(b, axis=1, keepdims=True),
    "cumsum": lambda a, b: jnp.cumsum(a, 0) * 0.1,
    "reshape": lambda a, b: a.reshape(2, 8).T.reshape(N, N) + b,
    "half": lambda a, b: (a.astype(jnp.float32) * 2).astype(a.dtype) + b,
    "jit": jitted,
    "checkpoint": region,
    "named": lambda a, b: jax.ad_checkpoint.checkpoint_name(a, "mine") * b,
    "stopped": lambda a, b: jax.lax.stop_gradient(a) * b,
    "rounded": lambda a, b: jnp.round(4 * a) * b,
    "custom_vjp": lambda a, b: odd(a),
    "custom_jvp": lambda a, b: soft(b),
    "clipped": lambda a, b: clipped(a),
    "signed": lambda a, b: signed(b),
    "scan": loop,
    "scan_back": loop_back,
    "scan_of_regions": loop_of_regions,
    "scan_of_scans": loop_of_loops,
    "split": split,
    "gather": picked,
    "cond": branch,
    "dropout": noisy,
    "dead": dead,
    "statistics": statistics,
}


def build(instructions):
    """A function of three arrays, of which some may go unused, with the last value's sum as its
    result and two values as aux."""

    def fun(a, b, c):
        pool = [a, b, c]
        for name, left, right in instructions:
            pool.append(OPERATIONS[name](pool[left % len(pool)], pool[right % len(pool)]))
        return jnp.sum(pool[-1] ** 2), (pool[len(pool) // 2], jnp.int32(3), pool[0])

    fun.names = [name for name, _, _ in instructions]
    return fun


# Those that are compiled anew for every plan come up less often. Operands are near the end of the
# pool, so that programs are deep, with some skips.
OFTEN = [name for name in OPERATIONS if name != "cond" and not name.startswith("scan")]
INSTRUCTION = st.tuples(
    st.sampled_from([*OFTEN * 3, "cond", "scan", "scan_back", "scan_of_regions", "scan_of_scans"]),
    st.sampled_from([-1, -1, -1, -2, -5]),
    st.integers(-4, 9),
)


def some(draw, values):
    return tuple(value for value in values if draw(st.booleans()))


def draw_regions(draw, program: Program, start: int, stop: int, depth: int) -> tuple[Region, ...]:
    """Any legal row of regions within ``start`` to ``stop``, with more inside each."""
    if depth == 0 or start >= stop:
        return ()
    ends = sorted(draw(st.lists(st.integers(start, stop), min_size=2, max_size=4)))
    regions = []
    for first, last in zip(ends[::2], ends[1::2], strict=False):
        if first == last:
            continue
        kernels = program.kernels[first:last]
        values = [v for kernel in kernels for v in kernel.results if v != kernel.residuals]
        inner = draw_regions(draw, program, first, last, depth - 1)
        regions.append(Region(first, last, some(draw, values), inner))
    return tuple(regions)


def draw_loops(draw, program: Program, depth: int) -> tuple[Loop, ...]:
    """Any legal loops of the scans of a program, with others inside each, and some whose first
    iterations are run otherwise."""
    loops = []
    for number in program.scans if depth else ():
        operation = program.operations[program.kernels[number].operations[-1]]
        blocks = draw(st.sampled_from([0, 1, 2, 3, 4]))
        if blocks:
            size = (operation.length - 1) // max(blocks - 1, 1)
            states = draw(st.integers(1, blocks))
            schedule = Schedule(operation.length, blocks, size, states) if size else None
            schedule = None if blocks == 1 else schedule
            loop = draw_iterations(draw, number, operation.body, depth)
            head = None
            if schedule is None and operation.length > 1 and draw(st.booleans()):
                count = draw(st.integers(1, operation.length - 1))
                head = LeadingIterations(
                    count, draw_iterations(draw, number, operation.body, depth)
                )
            loops.append(dataclasses.replace(loop, schedule=schedule, head=head))
    return tuple(loops)


def draw_iterations(draw, number: int, body: Program, depth: int) -> Loop:
    """Any legal way to run the iterations of a scan."""
    values = [v for kernel in body.kernels for v in kernel.results if v != kernel.residuals]
    whole = draw(st.booleans())
    saved = () if whole else some(draw, values)
    inner = () if whole else draw_regions(draw, body, 0, len(body.kernels), 2)
    return Loop(number, saved, inner, whole=whole, loops=draw_loops(draw, body, depth - 1))


@st.composite
def cases(draw):
    """A random function, and a random plan for it."""
    fun = build(draw(st.lists(INSTRUCTION, min_size=2, max_size=7)))
    keeps = draw(st.booleans())
    program = read_program(trace(fun, keeps))
    regions = draw_regions(draw, program, 0, len(program.kernels), 3)
    loops = draw_loops(draw, program, 2)
    plan = Plan("random", program.fingerprint, regions, loops, Predicted(0, 0, program.flops, 0))
    return fun, dataclasses.replace(
        plan, widens_bfloat16=draw(st.booleans()), own_regions=OwnRegions(kept=keeps)
    )


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (N, N), jnp.float64) * 0.5 for key in keys)


def trace(fun, keeps_regions=False):
    leaves = [jaxprs.abstract(x) for x in arguments()]
    return jaxprs.flatten(fun, leaves, not keeps_regions, merge=True)


def assert_equal(actual, expected, fun):
    # Where a cotangent passes through a shorter dtype, its last bit may round the other way: of
    # what cancels out that is a share of the summands.
    tolerance = 0.05 if "bfloat16" in fun.names else 1e-5 if "half" in fun.names else 1e-9
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(want).max(initial=1.0)) if tolerance == 0.05 else 1.0
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("part", range(8))
def test_planned_equals_plain(part):
    seen = tried = 0

    # Eager, since compiling each of them would take longer than all the rest.
    @seed(part)
    @settings(
        max_examples=PROGRAMS // 8,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case):
        nonlocal seen, tried
        fun, plan = case
        args = arguments()
        differentiate = functools.partial(
            jax.value_and_grad, argnums=(0, 1, 2), has_aux=True, allow_int=False
        )
        plain = differentiate(fun)(*args)
        assert_equal(differentiate(plan.apply(fun))(*args), plain, fun)
        seen += bool(plan.regions or plan.loops)
        tried += 1
        if tried % 250 == 0:
            # Each compiled operation is some mappings of memory, and a process may have 65,530.
            jax.clear_caches()

    check()
    assert seen > PROGRAMS // 8 // 3, "hardly any plan had a region"


@settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(cases())
def test_under_jit_and_vmap(case):
    fun, plan = case
    assume("signed" not in fun.names)  # JAX has no rule for linear_call under vmap
    args = tuple(jnp.stack([x, 0.5 * x]) for x in arguments())

    def gradients(f):
        return jax.jit(jax.vmap(jax.grad(f, (0, 1, 2), has_aux=True)))(*args)

    assert_equal(gradients(plan.apply(fun)), gradients(fun), fun)


SHARDED = """
import sys
sys.path.insert(0, {tests!r})
import conftest, jax, jax.numpy as jnp, test_fuzz
from hypothesis import Phase, assume, given, settings

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
stacked = [jnp.stack([x * (1 + i / 8) for i in range(8)]) for x in test_fuzz.arguments()]
args = jax.device_put(stacked, sharding)

@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(test_fuzz.cases())
def check(case):
    fun, plan = case
    assume("signed" not in fun.names)

    def mean(f):
        def loss(scale, *args):
            value, aux = jax.vmap(f)(*[x * scale for x in args])
            return value.mean(), aux
        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(jnp.float64(0.5), *args)

    test_fuzz.assert_equal(mean(plan.apply(fun)), mean(fun), fun)

assert jax.device_count() == 8
check()
"""


@pytest.mark.slow
def test_with_a_batch_sharded_over_eight_devices():
    script = SHARDED.format(tests=str(pathlib.Path(__file__).parent))
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=600)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(st.lists(INSTRUCTION, min_size=4, max_size=12), st.sampled_from(["dp", "dots", "sqrt"]))
def test_planners_on_random_programs(instructions, planner):
    """Whatever they plan, the projected bytes are no more than the plain ones, but where nothing is
    recomputed: derivatives of our own take other bytes than JAX's (of a gather, its indices)."""
    fun, args = build(instructions), arguments()
    plan = jaxmem.plan(fun, *args, planner=planner, argnums=(0, 1, 2), has_aux=True)
    most = plan.plain_bytes + (0 if plan.recomputes else 160)
    assert plan.projected_bytes <= most
    # What is said to fit does, and more does too.
    for budget in (plan.projected_bytes, most, most + 100):
        planned = jaxmem.plan(
            fun, *args, planner=planner, argnums=(0, 1, 2), has_aux=True, budget=budget
        )
        assert planned.projected_bytes <= budget
    plain = jax.value_and_grad(fun, (0, 1, 2), has_aux=True)(*args)
    assert_equal(jax.value_and_grad(plan.apply(fun), (0, 1, 2), has_aux=True)(*args), plain, fun)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(st.data())
def test_no_more_is_kept_than_is_planned(data):
    """Of a program under one region, nested ones in it, JAX keeps what is saved: in bytes."""
    fun = build(data.draw(st.lists(INSTRUCTION, min_size=2, max_size=9)))
    program = read_program(trace(fun))
    kernels = program.kernels
    values = [v for kernel in kernels for v in kernel.results if v != kernel.residuals]
    saved = some(data.draw, values)
    inner = draw_regions(data.draw, program, 0, len(kernels), 2)
    regions = (Region(0, len(kernels), saved, inner),) if kernels else ()
    plan = Plan("random", program.fingerprint, regions, (), Predicted(0, 0, program.flops, 0))
    kept = jaxmem.residuals(lambda *args: plan.apply(fun)(*args)[0], *arguments())
    assert kept.total <= sum(program.sizes[value] for value in saved)


@pytest.mark.parametrize("depth", [0, 2])
def test_no_more_is_kept_than_is_planned_of_several_regions(depth):
    """One after the other: what each saves, and what it reads that another one has made. What a
    region inside of one saves may be kept twice if another one reads it: it comes out of both."""
    several = 0

    @settings(
        max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
    )
    @given(st.data())
    def check(data):
        nonlocal several
        fun = build(data.draw(st.lists(INSTRUCTION, min_size=4, max_size=9)))
        program = read_program(trace(fun))
        count = len(program.kernels)
        assume(count > 1)
        cuts = data.draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=3))
        regions, saved, handed_on = [], set(), set()
        for start, stop in itertools.pairwise((0, *sorted(cuts), count)):
            kernels = program.kernels[start:stop]
            made = {v for kernel in kernels for v in kernel.results}
            own = some(data.draw, [v for k in kernels for v in k.results if v != k.residuals])
            inner = draw_regions(data.draw, program, start, stop, depth)
            regions.append(Region(start, stop, own, inner))
            read = {v for kernel in kernels for v in kernel.sources}
            saved.update(own)
            handed_on |= {v for v in read - made if v >= program.input_count}
        forward = Predicted(0, 0, program.flops, 0)
        plan = Plan("random", program.fingerprint, tuple(regions), (), forward)
        kept = jaxmem.residuals(lambda *args: plan.apply(fun)(*args)[0], *arguments())
        planned = [*saved, *(handed_on if depth else handed_on - saved)]
        assert kept.total <= sum(program.sizes[value] for value in planned)
        several += kept.total > 0

    check()
    assert several > 10


@settings(max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(st.data())
def test_no_more_is_kept_than_is_planned_of_loops(data):
    """Of every iteration its carry and what is saved of it, in whatever parts the loop is run and
    whatever loops and regions are inside of it."""
    instructions = data.draw(st.lists(INSTRUCTION, min_size=2, max_size=6))
    length = data.draw(st.integers(2, 7))

    def body(carry, x):
        pool = [carry, x, carry * x]
        for name, left, right in instructions:
            pool.append(OPERATIONS[name](pool[left % len(pool)], pool[right % len(pool)]))
        return jnp.tanh(pool[-1]), None

    def fun(first, xs):
        return jnp.sum(jax.lax.scan(body, first, xs)[0])

    a, b, _ = arguments()
    args = a, jnp.stack([b] * length)
    program = read_program(
        jaxprs.flatten(fun, [jaxprs.abstract(x) for x in args], True, merge=True)
    )
    loops = draw_loops(data.draw, program, 2)
    assume(loops)
    (loop,) = loops
    head = loop.head
    assume(not loop.whole and not (head and head.loop.whole))
    plan = Plan("random", program.fingerprint, (), loops, Predicted(0, 0, program.flops, 0))
    kept = jaxmem.residuals(plan.apply(fun), *args)

    operation = program.operations[program.kernels[loop.kernel].operations[-1]]

    def saved(part):
        return sum(operation.body.sizes[value] for value in part.saved)

    parts = [head.loop] * head.count + [loop] * (length - head.count) if head else [loop] * length
    assert kept.total <= sum(a.nbytes + saved(part) for part in parts)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_nested_region_returns_as_it_is_counts_once(depth):
    """A saved value comes out of a region twice, as a result and for the backward pass, and so it
    does where the region in it saves and returns it too."""
    fun = build([("sin", -1, 0), ("matmul", -1, 0), ("statistics", -1, 0)])
    program = read_program(trace(fun))
    count = len(program.kernels)
    (saved,) = program.kernels[1].results
    regions: tuple[Region, ...] = (Region(0, 2, (saved,)), Region(2, 4))
    if depth == 2:
        regions = (Region(0, count - 1, (saved,), regions),)
    regions = (Region(0, count, (saved,), regions),)
    plan = Plan("random", program.fingerprint, regions, (), Predicted(0, 0, program.flops, 0))
    kept = jaxmem.residuals(lambda *args: plan.apply(fun)(*args)[0], *arguments())
    assert kept.total == program.sizes[saved] == 128


@pytest.mark.parametrize(
    "barrier", [jaxprs.barrier, jaxprs.cotangent_barrier, jax.lax.optimization_barrier]
)
def test_what_waits_at_a_barrier_is_what_it_was(barrier):
    """Plans let parameters wait for one another; they are still the arguments."""

    def fun(x, y, _):
        x, y = barrier([x, y])
        return jnp.sum(x @ y)

    kept = jaxmem.residuals(fun, *arguments())
    assert kept.total == 0
