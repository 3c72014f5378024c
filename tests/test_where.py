"""Where the memory goes: timeline, peak and attribution, against XLA's totals and by hand."""

import gzip
import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import (
    FIVE,
    array,
    cnn,
    fsdp,
    mlp,
    nnx_transformer,
    report,
    scan_transformer,
    tanh_layers,
)

import jaxmem
from jaxmem.reports.drawn.plot import COLORS
from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.kinds import KINDS
from jaxmem.reports.where.peak import MemoryMap
from jaxmem.reports.xla.dump import read_dump

SAMPLES = sorted((pathlib.Path(__file__).parent / "samples").glob("*.json.gz"))
BREAKDOWNS = ("by_phase", "by_kind", "by_module", "by_source")
UNKNOWN = "(not attributed)"


def read_sample(path):
    sample = json.loads(gzip.decompress(path.read_bytes()))
    assignment = read_dump(sample["buffer-assignment"], sample["live-range"], sample["jax"])
    return sample, assignment


# ---- recorded samples of two versions


def test_samples_of_two_versions_and_five_programs():
    names = [path.name.removesuffix(".json.gz").split("-jax-") for path in SAMPLES]
    assert {(program, version[:4]) for program, version in names} == {
        (program.__name__, version) for program in FIVE for version in ("0.10", "0.12")
    }


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_samples_have_the_totals_of_memory_analysis(path):
    sample, assignment = read_sample(path)
    for role in ("argument", "output", "alias", "temp"):
        assert assignment.total(role) == sample["totals"][role]
        assert assignment.total(role, on_host=True) == sample["totals"][f"host_{role}"]
    arguments = [known and Argument(**known) for known in sample["arguments"]]
    found = MemoryMap(assignment, sample["hlo"], arguments)
    timeline, totals = found.timeline, sample["totals"]
    device = totals["argument"] + totals["output"] - totals["alias"] + totals["temp"]
    device += assignment.total("constant")  # which the analysis leaves out
    assert timeline.device == device
    assert sum(buffer.bytes for buffer in found.buffers) == timeline.peak == max(timeline.live)
    np.testing.assert_array_equal(sum(found.live_by_kind.values()), timeline.live)
    for key in ("phase", "kind", "module", "source"):
        rows = found.breakdown(lambda buffer, key=key: getattr(buffer, key))
        assert sum(rows.values()) == device
        assert rows.get(UNKNOWN, 0) <= 0.05 * timeline.peak
    assert not any("/site-packages/" in buffer.source for buffer in found.buffers)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("buffer-assignment", "BufferAssignment:", "Buffers:"),
        ("buffer-assignment", "preallocated-temp", "some-new-role"),
        ("buffer-assignment", "(size=", "(bytes="),
        ("buffer-assignment", "allocation 0: size", "allocation 0: bytes"),
        ("live-range", "HloLiveRange", "Ranges"),
        ("live-range", "    0:", "    1:"),
        ("live-range", "{}:0-", "{}:from 0-"),
    ],
)
def test_an_unknown_format_is_refused(file, old, new):
    sample, _ = read_sample(SAMPLES[0])
    assert old in sample[file]
    sample[file] = sample[file].replace(old, new)
    with pytest.raises(jaxmem.JaxmemError, match=r"XLA of jax 9\.9 wrote a .* does not know"):
        read_dump(sample["buffer-assignment"], sample["live-range"], "9.9")


def test_a_missing_live_range_is_refused():
    sample, _ = read_sample(SAMPLES[0])
    lines = sample["live-range"].splitlines()
    at = lines.index("  BufferLiveRange:")
    with pytest.raises(jaxmem.JaxmemError, match="live range or place of a value"):
        read_dump(sample["buffer-assignment"], "\n".join(lines[: at + 2]), "9.9")


# ---- the jax at hand


@pytest.mark.parametrize("program", FIVE, ids=lambda program: program.__name__)
def test_every_breakdown_adds_up_to_the_byte(program):
    found = report(program)
    assert found.timeline.device == found.device  # by memory_analysis
    assert found.device == found.peak_bytes + found.fragmentation
    for name in BREAKDOWNS:
        rows = getattr(found, name)
        assert sum(rows.values()) == found.device
        assert rows.get(UNKNOWN, 0) <= 0.05 * found.peak_bytes


def test_a_dump_that_disagrees_with_memory_analysis_is_refused():
    import dataclasses

    totals = dataclasses.replace(report(mlp).on_device, temp=12345)
    wrong = dataclasses.replace(report(mlp), on_device=totals)
    with pytest.raises(jaxmem.JaxmemError, match="bytes of temp and its memory analysis 12345"):
        wrong.timeline  # noqa: B018


def test_the_mlp_by_hand():
    """Four layers of tanh(x @ w), 256 wide, 2048 rows, Adam; a value of 2 MiB a layer."""
    found, mib = report(mlp), 2**20
    layer, weight = 2 * mib, 256 * 256 * 4
    assert found.by_phase["batch"] == 2 * layer
    assert found.by_kind["residuals"] in (3 * layer, 4 * layer)
    assert found.by_kind["optimizer state"] == 2 * 4 * weight + 4  # moments and Adam's count
    assert 4 * weight <= found.by_kind["parameters"] <= 8 * weight  # copies, at most one of each
    line = next(name for name in found.by_source if name.startswith("tests/programs.py:"))
    assert line.endswith("(tanh_layers)") and found.by_source[line] >= 3 * layer
    kept = [buffer for buffer in found.peak if buffer.kind == "residuals"]
    assert {(one.shape, one.dtype, one.bytes) for one in kept} == {((2048, 256), "f32", layer)}
    assert found.peak_operation.phase == "backward"
    # tanh of the last layer reads no parameter, but its line does: the loss is the next line.
    told = enumerate(found.phases)
    loss = {found._map.describe(at).source for at, phase in told if phase == "loss"}
    lines, first = inspect.getsourcelines(tanh_layers)  # its last two: the tanh, the loss
    last = first + len(lines) - 1
    assert [name.partition(".py:")[2] for name in loss] == [f"{last} (tanh_layers)"]
    assert line.endswith(f"programs.py:{last - 1} (tanh_layers)")


def test_all_kinds_are_drawn():
    assert {*COLORS} == {*KINDS}


def test_linen_modules_and_kinds():
    found = report(cnn)
    assert {name.split("/")[0] for name in found.by_module if "Conv" in name} == {"CNN"}
    assert {"CNN/Conv_0", "CNN/Conv_1", "CNN/Conv_2", "CNN/BatchNorm_0"} <= set(found.by_module)
    assert found.by_kind["residuals"] > 0.6 * found.peak_bytes
    # Every parameter's allocation is attributed to its own module.
    state = [buffer for buffer in found.peak if buffer.source.startswith("argument state.params")]
    assert any(buffer.module == "CNN/Dense_0" for buffer in state)
    assert {"forward", "state", "batch"} <= set(found.by_phase)
    assert found.by_kind["batch"] == found.by_phase["batch"] == 16 * 32 * 32 * 3 * 4 + 16 * 4


@pytest.mark.slow
def test_nnx_modules_are_the_classes_on_the_stack():
    found = report(nnx_transformer)
    assert {"Transformer/Block/Linear", "Transformer/Block/MultiHeadAttention"} <= set(
        found.by_module
    )
    assert any(name.startswith("blocks/0/attention") for name in found.by_module)
    for name in BREAKDOWNS:
        assert getattr(found, name).get(UNKNOWN, 0) <= 0.05 * found.peak_bytes


def test_scan_with_checkpoint_tells_recompute_from_forward():
    found = report(scan_transformer)
    assert found.by_phase["recompute"] > 0
    assert "recompute" in found.phases and "forward" in found.phases and "update" in found.phases
    stack = 4 * 4 * 128 * 128 * 4  # layers x batch x length x width: each layer kept its input
    assert any(
        buffer.bytes == stack and buffer.kind == "residuals" and buffer.phase == "forward"
        for buffer in found.peak
    )
    gradients = [buffer for buffer in found.peak if buffer.kind == "gradients"]
    assert {buffer.shape for buffer in gradients} >= {(4, 128, 512), (4, 512, 128)}


@pytest.mark.parametrize("planner", ["sqrt", "dp"])
def test_a_plan_keeps_the_lines_of_what_it_writes_again(planner):
    """JAX traces a custom rule when it is first needed, which is by the planner."""

    def loss(ws, x):
        for w in ws:
            x = x + jax.nn.silu(jax.nn.relu(x @ w))
            x = jax.nn.relu(x)
        return jnp.sum(x**2)

    args = [array(512, 512)] * 8, array(8192, 512)
    budget = None if planner == "sqrt" else "200MiB"
    planned = jaxmem.remat(loss, planner=planner, budget=budget, target="rtx-2080-ti")
    found = jaxmem.memory(jax.grad(planned), *args, target="rtx-2080-ti")
    assert found.by_source.get(UNKNOWN, 0) <= 0.01 * found.device
    first = loss.__code__.co_firstlineno + 2
    named = {source for source in found.by_source if source.endswith("(loss)")}
    assert named >= {f"tests/test_where.py:{line} (loss)" for line in (first, first + 1)}


def test_gathered_parameters_show_as_collectives():
    found = report(fsdp)
    gathered = [buffer for buffer in found.peak if buffer.operation == "all-gather"]
    assert gathered and all(buffer.kind == "residuals" for buffer in gathered)


def test_the_loss_is_a_phase_of_its_own():
    def loss_fn(w, x, labels):
        logits = x @ w
        return optax_loss(logits, labels)

    import optax

    optax_loss = optax.softmax_cross_entropy_with_integer_labels
    found = jaxmem.memory(
        lambda *args: loss_fn(*args).mean(),
        array(64, 1024),
        array(128, 64),
        array(128, dtype=jnp.int32),
        target="h200",
    )
    assert "loss" in found.phases and "update" not in found.phases


def test_collectives_in_branches_are_those_of_the_dearest():
    import functools

    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    spec = jax.sharding.PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(None, spec), out_specs=spec)
    def step(flag, x):
        def both(x):
            return jax.lax.psum(jax.lax.psum(x, "data") ** 2, "data") + x

        return jax.lax.cond(flag, both, lambda x: jax.lax.psum(x[:1], "data") + x, x)

    x = array(64, 1024, sharding=jax.sharding.NamedSharding(mesh, spec))
    target = jaxmem.target("h200", count=8)
    found = jaxmem.memory(step, array(dtype=jnp.bool), x, target=target)
    assert found.collectives.count == {"all-reduce": 2}
    assert found.collectives.bytes == {"all-reduce": 2 * 8 * 1024 * 4}


def handmade(params, tokens):
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"][None, None])  # forward, the last time too
    logits = x @ params["head"] + params["bias"][None, None]
    likely = logits - jax.nn.logsumexp(logits, -1, keepdims=True)  # loss
    picked = jnp.take_along_axis(likely, tokens[..., None], -1)  # loss
    penalty = sum(jnp.sum(layer["w"] ** 2) for layer in params["layers"])
    return -picked.mean() + 1e-4 * penalty  # loss


def lines_of(phase, found):
    """The lines of `handmade` in a phase, from its first one."""
    first = handmade.__code__.co_firstlineno
    names = found.timeline.schedule
    sources = [found._map.describe(at).source for at in range(len(names))]
    chosen = [s for s, p in zip(sources, found.phases, strict=True) if p == phase]
    lines = {int(s.partition(".py:")[2].partition(" ")[0]) for s in chosen if "(handmade)" in s}
    return {line - first for line in lines}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_written_by_hand_is_what_follows_the_last_parameter(microbatches):
    import optax

    layer = {"w": array(128, 128), "b": array(128)}
    params = {"embed": array(512, 128), "layers": [layer] * 3, "head": array(128, 512)}
    params["bias"] = array(512)
    step = jaxmem.train_step(handmade, optax.sgd(0.1), microbatches=microbatches)
    batch = array(4, 256, dtype=jnp.int32)
    found = step.memory(jaxmem.eval_shape(step.init, params), batch, target="h200")
    assert lines_of("loss", found) <= {5, 6, 8} and 5 in lines_of("loss", found)
    assert {3, 4} <= lines_of("forward", found) <= {1, 2, 3, 4, 7}


def test_what_microbatches_add_up_are_gradients():
    """Of the backward pass and of the modules whose gradients they are; a slice is of the batch."""
    depth, width, rows = 4, 256, 2048

    def loss_fn(params, batch):
        x = batch
        for number, w in enumerate(params):
            with jax.named_scope(f"Net/Block_{number}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    step = jaxmem.train_step(loss_fn, optax.adam(1e-3), microbatches=4)
    args = step.abstract([array(width, width)] * depth), array(rows, width)
    found = step.memory(*args, target="h200")
    added = [one for one in found.peak if one.source == "jaxmem: microbatch" and one.bytes > 1024]
    sums = [one for one in added if one.shape == (width, width)]
    assert {one.module for one in sums} == {f"Net/Block_{number}" for number in range(depth)}
    assert {(one.phase, one.kind) for one in sums} == {("backward", "gradients")}
    slices = [one for one in added if one not in sums]
    assert {one.module for one in slices} <= {"batch"}
    assert found.by_source.get(UNKNOWN, 0) <= 1024 and found.by_module.get(UNKNOWN, 0) <= 1024
    assert found.time.by_source.get(UNKNOWN, 0) < 0.1 * found.time.seconds


@pytest.mark.slow
def test_memory_that_values_share_is_said():
    found = report(mlp)
    timeline = found.timeline
    shared = [
        placed
        for point in range(len(timeline.schedule))
        for placed in timeline.at(point)
        if placed.shared_with
    ]
    assert shared, "an update written over its parameter shares its memory at that point"
    for point in (0, timeline.peak_point, len(timeline.schedule) - 1):
        assert sum(placed.bytes for placed in timeline.at(point)) == timeline.live[point]


def test_the_cpu_has_no_timeline_and_says_so():
    found = jaxmem.memory(jnp.sin, array(64, 64), target="local")
    assert not found.has_timeline
    with pytest.raises(jaxmem.JaxmemError, match="There is no timeline .* name a target, as in"):
        found.by_phase  # noqa: B018


def test_a_step_named_by_its_arguments_alone():
    """No names, no classes: floats that come back are parameters, the rest is batch."""
    found = jaxmem.memory(
        jax.grad(lambda a, b: jnp.sum(jnp.tanh(b @ a))), array(64, 64), array(32, 64), target="h200"
    )
    assert found.by_kind["parameters"] == 64 * 64 * 4
    assert found.by_kind["batch"] == 32 * 64 * 4
    assert found.by_kind["outputs"] == 64 * 64 * 4


def test_results_that_are_yet_to_come_are_attributed():
    """Two layers without donation: at the first one the memory of the result waits already."""

    def infer(w, x):
        return jnp.tanh(x @ w) @ w

    found = jaxmem.memory(infer, array(256, 256), array(2048, 256), target="h200")
    waits = 2048 * 256 * 4
    assert found.by_kind["outputs"] == waits
    assert set(found.by_phase) == {"batch", "forward", "(fragmentation)"}
    assert found.by_module["infer"] == 2 * waits
    assert all(UNKNOWN not in getattr(found, name) for name in BREAKDOWNS)
    result = next(one for one in found.peak if one.kind == "outputs")
    assert (result.shape, result.dtype) == ((2048, 256), "f32")


def test_an_update_without_donation_is_attributed():
    step, args, _ = mlp()
    plain = jax.jit(lambda *args: step(*args))
    found = jaxmem.memory(plain, *args, target="h200")
    assert found.by_kind["outputs"] >= 3 * 4 * 256 * 256 * 4  # parameters and two moments
    for name in BREAKDOWNS:
        assert getattr(found, name).get(UNKNOWN, 0) == 0


@pytest.mark.parametrize("form", ["args", "kwargs", "partial", "method"])
def test_arguments_are_known_however_they_are_passed(form):
    import functools

    def step(params, batch):
        return jax.grad(lambda p: jnp.sum(jnp.tanh(batch @ p)))(params)

    class Trainer:
        @functools.partial(jax.jit, static_argnums=0)
        def plain(self, params, batch):
            return step(params, batch)

    params, batch = array(64, 64), array(32, 64)
    calls = {
        "args": (lambda *args: step(*args), (params, batch), {}),
        "kwargs": (lambda **kwargs: step(**kwargs), (), {"params": params, "batch": batch}),
        "partial": (functools.partial(jax.jit(step), params), (batch,), {}),
        "method": (Trainer().plain, (params, batch), {}),
    }
    fun, args, kwargs = calls[form]
    found = jaxmem.memory(fun, *args, **kwargs, target="h200")
    assert found.by_kind["parameters"] == 64 * 64 * 4
    assert found.by_kind["batch"] == 32 * 64 * 4
