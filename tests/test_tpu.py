"""TPUs that are not in the machine: their slices, what XLA says of a step, and plans for them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem import cli
from jaxmem.program import costs
from jaxmem.targets import FAMILIES, known_targets
from tests.absent_tpu import needs_libtpu

NAMES = [name for name, one in known_targets().items() if one.family == "tpu"]
RULES = FAMILIES["tpu"].rules


def shape(*sizes, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def tanh_loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


TANH = [shape(512, 512)] * 16, shape(16384, 512)


def normalised(x):
    mean, variance = (f(x, (0, 1, 2), keepdims=True) for f in (jnp.mean, jnp.var))
    return (x - mean) / jnp.sqrt(variance + 1e-3)


def network(weights, x, attends=True):
    """Convolutions, statistics, a pooling, a concatenation, and attention or another layer."""
    first, second, inner, outer = weights

    def convolved(x, w, stride):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x = convolved(x, first, 1)
    x = jax.nn.relu(normalised(x))
    x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = jnp.concatenate([x, convolved(x, second, 1)], -1)
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    for w in inner:
        read = tokens @ w
        if attends:
            scores = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", read, tokens))
            read = jnp.einsum("bqk,bkc->bqc", scores, tokens)
        tokens = tokens + jax.nn.gelu(read) @ w
    return jnp.mean((tokens @ outer) ** 2)


def network_args(batch, size, channels, make):
    weights = [
        make(3, 3, 3, channels),
        make(3, 3, channels, channels),
        [make(2 * channels, 2 * channels)] * 2,
        make(2 * channels, 8),
    ]
    return weights, make(batch, size, size, 3)


# ---- targets


def test_seven_generations_are_known():
    assert NAMES == ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert re.fullmatch(
        r"v5e: Google TPU v5e, \d+\.\d\d GiB \(\d+\.\d\d GiB usable\)", str(jaxmem.target("v5e"))
    )
    known = [known_targets()[name] for name in NAMES]
    assert all(one.usable_bytes < one.memory_bytes for one in known)


@pytest.mark.parametrize(
    ("name", "count", "topology"),
    [
        ("v5e", 1, "1x1"), ("v5e", 8, "2x4"), ("v6e", 256, "16x16"), ("v5p", 4, "2x2x1"),
        ("v5p", 64, "4x4x4"), ("v4", 512, "8x8x8"), ("v2", 1, "1x1"), ("v2", 2, "1x1"),
        ("v3", 32, "4x4"), ("tpu7x", 8, "2x2x1"),
    ],
)  # fmt: skip
def test_a_count_is_a_slice(name, count, topology):
    target = jaxmem.target(name, count=count)
    assert (target.count, target.topology) == (count, topology)
    if count > target.cores:
        assert jaxmem.target(name, topology=topology) == target


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": 3}, "No slice of Google TPU v5e that jaxmem makes from a count has 3 devices; "
         "the nearest have 1, 4, 8. topology= names any other."),
        ({"topology": "3x4"}, "'3x4' is no topology of Google TPU v5e: its slices have 2 dimension"
         "s, and are of one chip ('1x1') or of whole hosts of 2x2 chips ('4x8')."),
        ({"topology": "2x2x1"}, "'2x2x1' is no topology of"),
        ({"topology": "axb"}, "'axb' is no topology of"),
        ({"topology": "4x4", "count": 4}, "has 16 devices, and count is 4. Pass one of the two."),
    ],
)  # fmt: skip
def test_what_is_no_slice_is_told(options, text):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.target("v5e", **options)
    assert text in str(caught.value)


def test_a_gpu_has_no_topology():
    with pytest.raises(jaxmem.JaxmemError, match=r"has no topology; got topology='2x2'\. Pass cou"):
        jaxmem.target("h100", topology="2x2")


@pytest.mark.parametrize(
    ("sizes", "itemsize", "apart", "expected"),
    [
        ((1000, 3), 4, (), 16384),  # the columns innermost: 4 rows of 1024
        ((16, 256, 256, 64), 4, (1, 2), 512 * 2**20),  # 64 of 128 lanes
        ((16, 256, 256, 64), 4, (), 256 * 2**20),
        ((100, 112, 112, 64), 4, (1, 2), 128 * 112 * 112 * 64 * 4),
        ((64, 197, 768), 4, (), 64 * 197 * 768 * 4),
        ((4096, 1024), 2, (), 8 * 2**20),
        ((1000,), 4, (), 4096),
        ((), 4, (), 4),
        ((0, 8), 4, (), 0),
        ((1, 1), 4, (), 4),
    ],
)
def test_arrays_are_padded_to_tiles(sizes, itemsize, apart, expected):
    assert RULES.bytes_of(sizes, itemsize, apart) == expected
    assert FAMILIES["cuda"].rules.bytes_of(sizes, itemsize, apart) == np.prod(sizes) * itemsize


# ---- the compiler


def test_without_libtpu_the_error_gives_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    with pytest.raises(jaxmem.JaxmemError) as caught:
        jaxmem.memory(jax.grad(tanh_loss), *TANH, target="v5e")
    text = str(caught.value)
    assert text.startswith("Compiling for a TPU that is not in the machine needs libtpu for jaxlib")
    assert "    python -m jaxmem install-compiler --tpu\n" in text
    assert f"python -m pip install --target {tmp_path}/compilers/tpu-" in text
    assert "'libtpu==0.0." in text
    assert text.endswith("libtpu comes under the Google Cloud Platform terms of service.")


@needs_libtpu
def test_the_command_line_installs_libtpu_once(capsys):
    assert cli.main(["install-compiler", "--tpu"]) == 0
    said = capsys.readouterr().out
    assert "(libtpu comes under the Google Cloud Platform terms of service)\n" in said
    assert "XLA's compiler for tpu is in " in said
    assert cli.main(["install-compiler", "--tpu", "3"]) == 1
    assert "There is one libtpu for each version of JAX: --tpu takes no number." in (
        capsys.readouterr().err
    )


@needs_libtpu
@pytest.mark.parametrize("name", NAMES)
def test_every_generation_compiles(name, capfd):
    report = jaxmem.memory(jax.jit(jax.grad(tanh_loss)), *TANH, target=name)
    arguments = 16 * 512 * 512 * 4 + 16384 * 512 * 4
    assert report.argument == arguments
    assert report.device == report.peak_bytes + report.fragmentation
    assert sum(report.by_phase.values()) == report.device
    assert report.peak_operation.operation != "parameter"
    # Of the activations some are on the chip.
    assert report.output <= report.device <= arguments + 20 * 16384 * 512 * 4
    assert report.work.flops == (3 * 16 - 1) * 2 * 16384 * 512 * 512
    assert (report.host, capfd.readouterr()) == (0, ("", ""))


@needs_libtpu
def test_a_step_that_is_too_large_has_its_bytes_told():
    report = jaxmem.memory(jax.grad(tanh_loss), TANH[0], shape(2**20, 512), target="v5e")
    assert report.device > 16 * 2**30
    assert not report.fits()


@needs_libtpu
def test_flops_are_those_of_the_matmuls_however_they_are_written():
    """Those of a batch are convolutions with windows that hardly touch anything."""

    def loss(q, k, w, x):
        scores = jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        y = jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(scores**2) + jnp.sum(jnp.sin(y))

    args = [shape(8, 128, 6, 32)] * 2 + [shape(3, 3, 16, 32), shape(8, 33, 33, 16)]
    tpu, gpu = (
        jaxmem.memory(jax.grad(loss, (0, 1, 2, 3)), *args, target=name, timeline=False)
        for name in ("v5e", "h200")
    )
    assert tpu.work.flops == gpu.work.flops


@needs_libtpu
@pytest.mark.parametrize(
    ("stride", "padding", "taps", "size"),
    [(1, "SAME", 3, 16), (2, "SAME", 3, 16), (1, "VALID", 3, 16), (2, "SAME", 7, 32)],
)
def test_flops_of_convolutions_are_those_on_a_gpu(stride, padding, taps, size):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(
                jax.lax.conv_general_dilated(
                    x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean(x**2)

    args = [shape(taps, taps, 64, 64)] * 2, shape(8, size, size, 64)
    tpu, gpu = (
        jaxmem.memory(jax.grad(loss, (0, 1)), *args, target=name, timeline=False)
        for name in ("v5e", "h200")
    )
    assert tpu.work.flops == gpu.work.flops


def layers_of_tanh(count, rows):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, ([shape(512, 512)] * count, shape(rows, 512))


@needs_libtpu
@pytest.mark.parametrize(("count", "rows"), [(8, 4096), (16, 8192)])
def test_what_fits_by_the_memory_of_the_chip_is_not_recomputed(count, rows):
    loss, args = layers_of_tanh(count, rows)
    plain = jaxmem.memory(jax.value_and_grad(loss), *args, target="v5e")
    assert plain.on_chip["VMEM"] > 2**20
    plan = jaxmem.plan(loss, *args, budget=plain.device, target="v5e")
    assert plan.compiled_bytes <= plain.device
    assert plan.compiled.flops == plain.work.flops and not plan.predicted.recompute_flops
    assert plan.bound.recompute_flops == 0


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_no_plan_recomputes_less_than_its_bound(share):
    loss, args = layers_of_tanh(16, 8192)
    plain = jaxmem.memory(jax.value_and_grad(loss), *args, target="v5e")
    plan = jaxmem.plan(loss, *args, budget=int(share * plain.device), target="v5e")
    assert plan.bound.recompute_flops <= plan.compiled.flops - plain.work.flops


def pallas_matmul(x, w, **options):
    from jax.experimental import pallas as pl

    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    (rows, depth), columns = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=shape(rows, columns),
        grid=(rows // 256,),
        in_specs=[
            pl.BlockSpec((256, depth), lambda row: (row, 0)),
            pl.BlockSpec((depth, columns), lambda row: (0, 0)),
        ],
        out_specs=pl.BlockSpec((256, columns), lambda row: (row, 0)),
        **options,
    )(x, w)


@needs_libtpu
def test_a_pallas_kernel_has_the_flops_of_its_estimate():
    from jax.experimental import pallas as pl

    args, flops = (shape(1024, 512), shape(512, 256)), 2 * 1024 * 512 * 256
    estimate = pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
    told = functools.partial(pallas_matmul, cost_estimate=estimate)
    report = jaxmem.memory(told, *args, target="v5e")
    assert report.work.flops == flops
    assert report.time.seconds > 0
    assert jaxmem.memory(pallas_matmul, *args, target="v5e", timeline=False).work.flops == 0
    for fun in (told, pallas_matmul):  # of the second by its body, once for each row of blocks
        (equation,) = jax.make_jaxpr(fun)(*args).eqns
        assert costs.flops(equation) == flops


@needs_libtpu
def test_what_follows_a_splash_attention_is_counted():
    """XLA writes the attributes of such a kernel over several lines."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
        splash_attention_mask as masks,
    )

    heads, length, depth = 4, 512, 128

    def loss(w, x):
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
        attend = kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
        for _ in range(2):
            q, k, v = (jnp.einsum("ld,dhk->hlk", x, w[i]) for i in range(3))
            x = x + jnp.einsum("hlk,dhk->ld", attend(q, k, v), w[3])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    width = heads * depth
    args = shape(4, width, heads, depth, dtype="bfloat16"), shape(length, width, dtype="bfloat16")
    with jax.enable_x64(False):  # the kernel is not written for it
        report = jaxmem.memory(jax.grad(loss), *args, target="v5e")
    # Four matmuls a layer, forward and twice backward, but for the cotangent of the first input;
    # the value of the last is not needed for the gradient's own.
    matmul = 2 * length * width**2
    assert report.work.flops == (2 * 4 * 3 - 3) * matmul
    assert report.by_source.get("(not attributed)", 0) < report.device / 4


@needs_libtpu
def test_a_slice_has_a_part_of_everything():
    mesh = AbstractMesh((16,), ("data",))
    rows = NamedSharding(mesh, P("data"))
    weights = [shape(512, 512, sharding=rows)] * 16
    report = jaxmem.memory(
        jax.jit(jax.grad(tanh_loss)),
        weights,
        shape(16384, 512, sharding=rows),
        target=jaxmem.target("v5e", topology="4x4"),
    )
    assert report.argument == (16 * 512 * 512 + 16384 * 512) * 4 // 16
    assert report.collectives.count
    with pytest.raises(jaxmem.JaxmemError, match="over 16 devices, and the target is 8"):
        jaxmem.memory(jax.grad(tanh_loss), weights, TANH[1], target=jaxmem.target("v5e", count=8))


@needs_libtpu
def test_optimizer_state_is_in_host_memory():
    reports = []
    for optimizer in (optax.adam(1e-3), jaxmem.offload(optax.adam(1e-3))):
        step = jaxmem.train_step(lambda w, batch: tanh_loss(w, batch["x"]), optimizer)
        state = step.abstract(TANH[0])
        reports.append(step.memory(state, {"x": TANH[1]}, target="v5e"))
    moments = 2 * 16 * 512 * 512 * 4
    assert reports[0].host == 0
    assert reports[1].host == moments
    assert reports[1].argument == reports[0].argument - moments
    assert reports[1].transfers.overlapped > 0


@needs_libtpu
def test_memories_of_the_chip_are_their_own():
    """XLA keeps what is read next in VMEM, and loop counters in SMEM."""

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=16)[0] ** 2)

    report = jaxmem.memory(jax.grad(loss), TANH[0][0], TANH[1], target="v5e")
    assert 512 * 512 * 4 <= report.on_chip["VMEM"] <= 128 * 2**20
    assert 0 < report.on_chip["SMEM"] < 2**20
    assert f"\non the chip: VMEM {jaxmem.format_bytes(report.on_chip['VMEM'])}, " in str(report)
    assert report.device == report.peak_bytes + report.fragmentation
    assert jaxmem.memory(jax.grad(loss), TANH[0][0], TANH[1], target="h200").on_chip == {}
    small = jaxmem.memory(jnp.sin, shape(1_000_000, 3), target="v5e")  # which takes 0 bytes of it
    assert small.on_chip == {} and "on the chip" not in str(small)


@needs_libtpu
def test_pages_and_json(tmp_path):
    report = jaxmem.memory(jax.grad(tanh_loss), *TANH, target="v6e")
    report.to_html(tmp_path / "page.html")
    assert "Google TPU v6e" in (tmp_path / "page.html").read_text()
    assert '"device"' in report.to_json()


@needs_libtpu
def test_what_does_not_fill_its_tiles_is_listed():
    report = jaxmem.memory(lambda x: (x, jnp.sin(x)), shape(100000, 3), target="v5e")
    worst = report.padding[0]
    assert (worst.shape, worst.bytes % worst.count) == ("f32[100000,3]", 0)
    assert worst.bytes == worst.count * 100096 * 4 * 4
    assert worst.padding == worst.count * (100096 * 4 - 100000 * 3) * 4
    assert str(worst).endswith("axis 0 has 100000 of 100096 lanes, axis 1 has 3 of 4 rows")
    assert "padding to tiles: " in str(report) and "axis 0 has 100000" in str(report)
    full = jaxmem.memory(jnp.sin, shape(4096, 1024), target="v5e")
    assert full.padding == ()
    assert jaxmem.memory(jnp.sin, shape(1000, 3), target="h200").padding == ()


# ---- plans


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_a_plan_fits_its_budget(name):
    plain = jaxmem.memory(
        jax.value_and_grad(tanh_loss), TANH[0], shape(262144, 512), target=name, timeline=False
    )
    budget = plain.device * 6 // 10
    plan = jaxmem.plan(tanh_loss, TANH[0], shape(262144, 512), budget=budget, target=name)
    assert plan.compiled_bytes <= budget
    assert 0.9 < plan.compiled_bytes / plan.projected_bytes < 1.1
    assert plan.compiler_options == {
        "xla_tpu_rematerialization_min_size_in_bytes": 2**40,
        "xla_tpu_max_hbm_size_mib": budget >> 20,
    }
    assert jaxmem.Plan.from_json(plan.to_json()) == plan
    report = jaxmem.memory(
        jax.value_and_grad(plan.apply(tanh_loss)), TANH[0], shape(262144, 512),
        target=name, compiler_options=plan.compiler_options, timeline=False,
    )  # fmt: skip
    assert (report.device, report.work.flops) == (plan.compiled_bytes, plan.compiled.flops)


@needs_libtpu
def test_what_a_tpu_keeps_is_projected():
    """What makes the operands of matmuls and convolutions is not in memory, and tiles are."""
    loss, args = functools.partial(network, attends=False), network_args(512, 64, 64, shape)
    options = FAMILIES["tpu"].planned_options()
    plain = jaxmem.memory(
        jax.value_and_grad(loss), *args, target="v5e", compiler_options=options, timeline=False
    ).device
    projected = jaxmem.plan(loss, *args, target="v5e", compilations=0).plain_bytes
    assert 0.85 < plain / projected < 1.15
    plan = jaxmem.plan(loss, *args, budget=plain * 7 // 10, target="v5e")
    assert plan.compiled_bytes <= plain * 7 // 10
    assert 0.85 < plan.compiled_bytes / plan.projected_bytes < 1.15


REPEATS = {
    "tile": lambda x: x * jnp.tile(x[:, :256], (1, 4)),
    "rows": lambda x: x * jnp.repeat(x[:2048], 4, axis=0),
    "shared heads": lambda x: (
        x.reshape(8192, 8, 128) * jnp.repeat(x[:, :256].reshape(8192, 2, 128), 4, axis=1)
    ).reshape(8192, 1024),
}


@needs_libtpu
@pytest.mark.parametrize("name", REPEATS)
def test_what_is_repeated_is_in_memory(name):
    """A broadcast alone is not; in another shape it is."""
    if name != "rows" and jax.__version_info__ >= (0, 12):
        pytest.xfail("the newest libtpu has some of it in memory: projected two fifths too high")

    def loss(weights, x):
        for w in weights:
            x = REPEATS[name](jnp.tanh(x @ w))
        return jnp.mean(x**2)

    array = jax.ShapeDtypeStruct
    args = [array((1024, 1024), jnp.float32)] * 6, array((8192, 1024), jnp.float32)
    plain = jaxmem.plan(loss, *args, target="v5e", compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="v5e", timeline=False)
    assert plain == pytest.approx(compiled.device, rel=0.1)


@needs_libtpu
def test_what_a_plan_keeps_is_of_the_line_that_made_it():
    """JAX rounds what regions keep, in operations of no line; on a TPU they have kernels."""

    def loss(weights, x):
        for w in weights:
            q, k, v = jnp.split(x @ w, 3, -1)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    args = [shape(64, 192, dtype="bfloat16")] * 6, shape(4, 1024, 8, 64, dtype="bfloat16")
    budget = jaxmem.plan(loss, *args, target="v5e", compilations=0).plain_bytes * 6 // 10
    plan = jaxmem.plan(loss, *args, budget=budget, target="v5e", compilations=1)
    assert any(region.saved for region in plan.regions)
    report = jaxmem.memory(
        jax.value_and_grad(plan.apply(loss)), *args,
        target="v5e", compiler_options=plan.compiler_options,
    )  # fmt: skip
    unknown = report.by_source.get("(not attributed)", 0)
    assert unknown < report.device / 100


@pytest.mark.parametrize("share", [0.7, 0])
def test_gradients_are_those_of_the_function(share):
    """What is emitted for a TPU, run on the CPU."""
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def make(*sizes):
        return jax.random.normal(next(keys), sizes, jnp.float64) / 4

    args = network_args(3, 8, 4, make)
    plain = jaxmem.plan(network, *args, target="v5e", compilations=0).plain_bytes
    budget = int(share * plain)
    try:
        planned = jaxmem.remat(network, budget=budget, target="v5e")
        found = jax.jit(jax.value_and_grad(planned))(*args)
    except jaxmem.BudgetError as error:
        planned = jaxmem.remat(network, budget=error.lowest, target="v5e")
        found = jax.jit(jax.value_and_grad(planned))(*args)
    expected = jax.jit(jax.value_and_grad(network))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-12), found, expected)


def test_a_plan_is_of_one_program_whatever_it_is_planned_for():
    plans = [jaxmem.plan(tanh_loss, *TANH, target=name, compilations=0) for name in ("v5e", "h200")]
    assert plans[0].fingerprint == plans[1].fingerprint


@needs_libtpu
@pytest.mark.slow
def test_what_waits_in_host_memory_passes_no_barrier_of_a_region():
    """On a slice libtpu takes it for a result of the program, and compiles none."""

    def layer(x, weights):
        inner, outer, up, gate, down = weights
        keys = normed(x) @ inner
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", keys, keys).astype(jnp.float32))
        x = x + jnp.einsum("bqk,bkd->bqd", scores.astype(x.dtype), keys) @ outer
        return x + (jax.nn.silu(normed(x) @ up) * (normed(x) @ gate)) @ down, None

    def normed(x):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype)

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    mesh = AbstractMesh((4,), ("data",))
    half = functools.partial(shape, dtype="bfloat16")
    weights = [
        half(8, *sizes, sharding=NamedSharding(mesh, P()))
        for sizes in ((512, 128), (128, 512), (512, 2048), (512, 2048), (2048, 512))
    ]
    x = half(4, 2048, 512, sharding=NamedSharding(mesh, P("data")))
    common = {"target": jaxmem.target("v5e", count=4), "compilations": 1}
    plain = jaxmem.plan(loss, weights, x, **common).plain_bytes
    plan = jaxmem.plan(loss, weights, x, budget=int(0.17 * plain), offload=True, **common)
    assert any(loop.regions for loop in plan.loops) and plan.predicted.host_bytes
    assert plan.compiled_bytes <= plan.budget
