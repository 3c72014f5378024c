"""The search over the levers: what it chooses fits, keeps the mathematics, and says why."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import tanh_apart

import jaxmem
from jaxmem import cli
from jaxmem.fitting import LeverSearch
from jaxmem.fitting.verdicts import Verdicts
from jaxmem.reports import Compiling

MIB = 2**20
LAYERS, ROWS, WIDTH = 8, 4096, 512
PARAMS = {"layers": [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS}
BATCH = {name: jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32) for name in "xy"}
ADAM = optax.adam(1e-3)


def loss_fn(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def fit(budget, **options):
    common = {"target": "h200"} | options
    return jaxmem.fit(loss_fn, ADAM, PARAMS, BATCH, budget=budget, **common)


def compiled(step):
    state = step.abstract(PARAMS)
    return step.memory(state, BATCH, target="h200")


def test_what_fits_as_it_is_stays_as_it_is(capsys, caplog):
    step = fit("1GiB")
    chosen = step.fitting.chosen
    assert chosen.levers == jaxmem.fitting.Levers() and chosen.remat == "none"
    assert compiled(step).device == chosen.compiled == step.fitting.report.device
    out, _ = capsys.readouterr()
    assert out.startswith("jaxmem.fit: fits: ") and "\non h200: NVIDIA H200" in out
    assert " of 1.00 GiB, the step as it is\n" in out
    assert "chosen: the least predicted time that fits" in " ".join(out.split())
    assert "not searched: precision: would compute in bfloat16" in out
    assert "have not been compared with a real device's" in " ".join(out.split())
    assert "jaxmem: compiled 1 of at most 6 for h200: precision as it is; " in caplog.text


def test_every_predicted_time_has_its_error_or_says_that_nobody_checked_it(capsys):
    fitting = fit("1GiB").fitting
    assert re.search(r"projected +compiled +ms \(unchecked\)$", str(fitting), re.MULTILINE)
    assert fitting.to_dict()["time_error"] is None
    checked = dataclasses.replace(jaxmem.target("h200"), time_error=0.2)
    fitting = fit("1GiB", target=checked).fitting
    text = " ".join(str(fitting).split())
    assert " compiled ms ±20% " in text and "unchecked" not in text
    assert "are as far from measured ones on such a device as is printed" in text
    assert fitting.to_dict()["time_error"] == 0.2


def test_steps_that_are_as_fast_within_the_error_are_named():
    """Which choices would flip if the predicted times were wrong by as much as they may be."""
    fitting = fit("100MiB").fitting
    assert "as fast as the chosen step" not in str(fitting)  # unchecked: nobody knows
    for error, any_is in [(1e-9, False), (0.9, True)]:
        checked = dataclasses.replace(jaxmem.target("h200"), time_error=error)
        again = dataclasses.replace(fitting, target=checked)
        text = " ".join(str(again).split())
        alike = [
            one
            for one in again.considered
            if one.plan and one is not again.chosen and (one.compiled or one.projected) <= 100 * MIB
            if abs(one.seconds / again.chosen.seconds - 1) <= error
        ]
        assert bool(alike) == any_is == ("as fast as the chosen step within ±90%: " in text)
        if any_is:
            assert f"{alike[0].name} (recompute {alike[0].remat})" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": ("batch", "placement")}, (1, False, True)),
        ({"keep": ("residuals", "placement")}, (2, False, False)),
        ({"keep": ("residuals", "batch")}, (1, True, False)),
    ],
)
def test_each_lever_alone(options, expected):
    """Recomputation, microbatches, and the state on the host: 32 MiB of 8 MiB parameters."""
    plain = compiled(jaxmem.train_step(loss_fn, ADAM)).device
    budget = plain - 12 * MIB
    step = fit(budget, **options)
    chosen = step.fitting.chosen
    recomputes = bool(chosen.plan.regions)
    assert (chosen.levers.microbatches >= 2) == (expected[0] >= 2)
    assert (chosen.levers.host, recomputes) == expected[1:]
    report = compiled(step)
    assert report.device == chosen.compiled <= budget
    assert (report.host > 0) == chosen.levers.host
    plain_row = next(r for r in step.fitting.considered if r.remat == "none" and r is not chosen)
    assert "not compiled: expected" in plain_row.verdict or "compiled: " in plain_row.verdict
    for name in options["keep"]:
        assert step.fitting.refused[name] == "it is to be kept"


def attention_loss(params, batch):
    """Scores of 128 MiB."""
    x = batch["x"]
    query, key, value = (
        jnp.reshape(x @ params[name], (*x.shape[:2], 8, 8)) for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
    return jnp.mean((mixed @ params["out"]) ** 2)


@pytest.mark.slow
def test_operations_that_hold_no_scores_are_searched_where_they_are_allowed():
    names = ("query", "key", "value", "out")
    params = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in names}
    batch = {"x": jax.ShapeDtypeStruct((4, 1024, 64), jnp.float32)}
    given = attention_loss, ADAM, params, batch
    options = {"target": "h200", "keep": ("batch", "placement")}
    plain = jaxmem.fit(*given, **options).fitting
    text = " ".join(str(plain).split())
    assert (
        "operations: would put jaxmem.ops in the place of attention and cross-entropy, with other "
        "rounding; allow=('operations',). Without scores of attention (test_fitting.py:"
    ) in text
    taken = re.search(r"takes ([\d.]+) MiB instead of ([\d.]+) MiB \(projected, nothing", text)
    without, whole = float(taken[1]), float(taken[2])
    assert whole == pytest.approx(plain.plain.projected / MIB, abs=0.01)
    assert re.search(r"the step would take [\d.]+ ms instead of [\d.]+ ", text)
    assert "kernels" not in text  # in float32
    step = jaxmem.fit(*given, **options, allow="operations", budget="300MiB")
    chosen = step.fitting.chosen
    assert chosen.levers.operations and "jaxmem.ops" in str(chosen.levers)
    assert chosen.compiled <= 300 * MIB < plain.chosen.compiled
    assert chosen.compiled / MIB == pytest.approx(without, rel=0.15)
    drawn = jax.random.split(jax.random.key(0), 5)
    values = {
        name: jax.random.normal(key, (64, 64)) / 8
        for name, key in zip(names, drawn[:4], strict=True)
    }
    real = {"x": jax.random.normal(drawn[4], (4, 1024, 64), jnp.float32)}
    values = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)
    expected = attention_loss(values, real)
    _, metrics = step(step.init(values), real)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_what_is_proved_of_a_loss_holds_with_operations_in_it(recwarn):
    """A mean over examples; blocks of an attention count examples, and would stand in the way."""
    names = ("query", "key", "value", "out")
    params = {name: jnp.ones((64, 64), jnp.float32) / 64 for name in names}
    batch = {"x": jnp.cos(jnp.arange(4 * 1024 * 64.0, dtype=jnp.float32)).reshape(4, 1024, 64)}
    swapped, expected = jaxmem.ops.swap(attention_loss, least="1MiB"), attention_loss(params, batch)
    step = jaxmem.train_step(swapped, optax.sgd(0.1), microbatches=2)
    _, metrics = step(step.init(params), batch)
    assert not [one for one in recwarn if issubclass(one.category, jaxmem.JaxmemWarning)]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_where_there_are_no_operations_to_replace_the_table_says_so():
    refused = fit("1GiB", allow="operations").fitting.refused
    assert refused["operations"] == (
        "the loss has no attention and no cross-entropy of 64 MiB or more"
    )
    assert "operations" not in fit("1GiB").fitting.refused


EXACT = [(16, 1024, 1024), (4096, 1024)]  # of weights and rows


def exact_loss(weights, x):
    """Of a scan in exact float32: work enough for copies to the host to run beside."""

    def body(x, w):
        hidden = jnp.tanh(jnp.dot(x, w, precision="highest"))
        return jnp.tanh(jnp.dot(hidden, w.T, precision="highest")), None

    return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)


@pytest.mark.slow
def test_residuals_of_a_scan_wait_in_host_memory_where_that_is_needed(monkeypatch):
    # There is no room on the device for the states of a schedule: all of a layer's, or all but the
    # last one's, wait on the host.
    weights, x = (jax.ShapeDtypeStruct(s, "float32") for s in EXACT)
    carries = 15 * x.size * 4
    common = {"target": "h200", "budget": "340MiB"}
    step = jaxmem.fit(exact_loss, ADAM, weights, x, keep="batch", **common)
    chosen = step.fitting.chosen
    waits = chosen.plan.predicted.host_bytes
    assert waits >= carries and chosen.host >= 2 * carries
    assert f"{waits / MIB:.2f} MiB on the host" in chosen.remat
    assert step.fitting.report.host >= carries and chosen.compiled <= 340 * MIB
    with pytest.raises(jaxmem.BudgetError, match="Nothing fits the budget of 340.00 MiB"):
        jaxmem.fit(exact_loss, ADAM, weights, x, keep=("batch", "placement"), **common)

    monkeypatch.setattr(jaxmem.MemoryReport, "host", 0)
    fitting = jaxmem.fit(exact_loss, ADAM, weights, x, keep="batch", **common).fitting
    why = "not searched: residuals in host memory: XLA keeps on the device what was to wait"
    assert why in str(fitting) and not fitting.chosen.plan.predicted.host_bytes


@pytest.mark.slow
def test_where_nothing_compiles_that_waits_on_the_host_the_rest_is_searched(monkeypatch):
    """The levers are not to blame: the same ones with all on the device fit."""
    found = LeverSearch._finish

    class RefusingCompilation(Compiling):
        def __init__(self):
            pass

        def report(self, compile="buffers", timeout=3600):
            raise jaxmem.CompileError("XLA could not compile the program for h200:\nno such output")

    def finish(self, candidate, made):
        waits = candidate.plan.predicted.host_bytes
        return found(self, candidate, RefusingCompilation() if waits else made)

    monkeypatch.setattr(LeverSearch, "_finish", finish)
    args = exact_loss, ADAM, *(jax.ShapeDtypeStruct(s, "float32") for s in EXACT)
    fitting = jaxmem.fit(*args, keep="batch", target="h200", budget="340MiB").fitting
    why = "not searched: residuals in host memory: XLA could not compile it: no such output"
    assert why in str(fitting) and not fitting.chosen.plan.predicted.host_bytes


def test_the_chosen_step_trains_as_the_plain_one():
    rng = np.random.default_rng(0)
    params = {"layers": [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 23) for _ in range(LAYERS)]}
    batch = {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH))) for name in "xy"}
    optimizer = optax.sgd(0.1, momentum=0.9)
    plain = jaxmem.train_step(loss_fn, optimizer)
    state = plain.abstract(params)
    budget = int(0.55 * plain.memory(state, batch, target="h200").device)
    step = jaxmem.fit(loss_fn, optimizer, params, batch, budget=budget, target="h200")
    assert step.fitting.chosen.compiled <= budget
    state, metrics = step(step.init(jax.tree.map(jnp.copy, params)), batch)
    expected, others = plain(plain.init(params), batch)
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-12)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_precision_and_moments_only_where_they_are_allowed():
    step = fit("1GiB", allow=("precision", "moments"))
    assert step.fitting.chosen.levers.precision == "bf16"
    assert not step.fitting.chosen.levers.moments, "not where it gains nothing"
    assert str(step.precision) == str(jaxmem.precision("bf16"))
    with pytest.warns(jaxmem.JaxmemWarning, match="in float16 without a loss scale"):
        half = fit("1GiB", precision="fp16", allow="precision")
    assert half.precision.compute == jnp.float16, "the user's own"
    old = fit("1GiB", target="rtx-2080-ti", allow="precision")
    assert old.fitting.chosen.levers.precision == ""
    assert "capability 7.5 has no bfloat16 arithmetic" in old.fitting.refused["precision"]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.first(x)))


def module_loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def normalised_loss(params, batch):
    x = batch["x"] @ params["layers"][0]
    return jnp.mean(((x - jnp.mean(x)) - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (
            lambda params, batch: jnp.mean(batch["x"] @ params["layers"][0]) ** 2,
            "the loss cannot be cut: it is no plain mean over examples (integer_pow at test_fit",
        ),
        (normalised_loss, "the loss cannot be cut: its examples see one another (sub at test_fit"),
    ],
)
def test_a_loss_that_is_no_mean_over_examples_is_not_cut(loss, why):
    workload = jaxmem.fitting.Workload(loss, ADAM, PARAMS, BATCH, budget="1GiB", target="h200")
    assert {levers.microbatches for levers in workload.options} == {1}
    assert workload.refused["statistics"].startswith(why)
    assert workload.refused["statistics"].endswith("; allow=('statistics',)")
    workload = jaxmem.fitting.Workload(
        loss, ADAM, PARAMS, BATCH, budget="1GiB", target="h200", allow="statistics"
    )
    assert 64 in {levers.microbatches for levers in workload.options}


def test_a_sum_over_examples_is_cut_as_one():
    workload = jaxmem.fitting.Workload(
        lambda params, batch: jnp.sum((batch["x"] @ params["layers"][0]) ** 2),
        *(ADAM, PARAMS, BATCH),
        budget="1GiB",
        target="h200",
    )
    assert 64 in {one.microbatches for one in workload.options}


def test_metrics_of_a_step_that_is_cut_are_proved_too():
    def loss_fn(params, batch):
        x = batch["x"] @ params["layers"][0]
        return jnp.mean(x**2), {"largest": x.max()}

    workload = jaxmem.fitting.Workload(loss_fn, ADAM, PARAMS, BATCH, budget="1GiB", target="h200")
    levers = next(one for one in workload.options if one.microbatches == 2)
    with pytest.warns(
        jaxmem.JaxmemWarning, match=r"metrics\['largest'\], float32\[\], is averaged"
    ):
        workload.step(levers).trace(workload.state(levers), workload.batch)


def test_a_model_state_is_seen_and_its_batch_is_not_cut():
    batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    model = Net(nnx.Rngs(0))
    step = jaxmem.fit(module_loss, ADAM, model, batch, budget="1GiB", target="h200")
    assert {row.levers.microbatches for row in step.fitting.considered} == {1}
    assert "its examples see one another (sub at" in step.fitting.refused["statistics"]
    allowed = jaxmem.fit(
        module_loss, ADAM, model, batch, budget="1GiB", target="h200", allow="statistics"
    )
    assert 64 in {row.levers.microbatches for row in allowed.fitting.considered}
    state, metrics = step(step.init(model), jnp.ones((4, 64), jnp.float32))
    assert np.isfinite(metrics["loss"]) and int(state.step) == 1


def test_on_a_mesh_zero_stages_are_searched():
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    step = fit("64MiB", mesh=mesh, keep="placement")
    chosen = step.fitting.chosen
    assert {row.levers.stage for row in step.fitting.considered} == {1, 2, 3}
    assert step.fitting.target.count == 4 and step.sharding.stage == chosen.levers.stage
    report = jaxmem.memory(
        step,
        step.abstract(PARAMS),
        step.sharding.place_batch(BATCH),
        target=jaxmem.target("h200", count=4),
    )
    assert report.device == chosen.compiled <= 64 * MIB
    with pytest.raises(jaxmem.JaxmemError, match="The mesh has 4 devices and the target 2: pass"):
        fit("64MiB", mesh=mesh, target=jaxmem.target("h200", count=2))


@pytest.mark.slow
def test_the_answer_on_a_mesh_says_what_is_set(capsys):
    """No step is as it is there: there is a stage at least."""
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    fitting = fit("1GiB", mesh=mesh, compilations=2).fitting
    assert fitting.chosen == fitting.plain
    answer = capsys.readouterr().out.splitlines()[0]
    assert answer.endswith(" of 1.00 GiB, ZeRO stage 1, nothing recomputed")
    fit("36MiB", mesh=mesh, keep="placement")
    answer = " ".join(capsys.readouterr().out.partition("\non ")[0].split())
    assert re.search(r"% (slower|faster) than ZeRO stage \d, nothing recomputed \(unch", answer)
    assert "the step as it is" not in answer


TANH_LAYERS = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 12
TANH_ROWS = jax.ShapeDtypeStruct((4096, 512), jnp.float32)


def fitted(budget, compilations):
    """The layers fitted into so many MiB."""
    args = tanh_apart, ADAM, TANH_LAYERS, TANH_ROWS
    budget = f"{budget}MiB"
    return jaxmem.fit(*args, budget=budget, target="h100", compilations=compilations)


@pytest.mark.slow
def test_the_last_compilation_is_no_leap_to_the_fewest_bytes():
    """Of 64 microbatches, each a thirtieth as fast: projections are known by then, if not well."""
    two, six = (fitted(90, count) for count in (2, 6))
    assert two.fitting.chosen.compiled <= 90 * MIB
    assert two.fitting.chosen.seconds < 2 * six.fitting.chosen.seconds


@pytest.mark.slow
@pytest.mark.parametrize("compilations", [2, 3])
@pytest.mark.parametrize("budget", [65, 90])
def test_no_budget_is_refused_that_the_fewest_bytes_meet(budget, compilations):
    """Projections of so small a step are a third off: the last compilation has room for it."""
    step = fitted(budget, compilations)
    assert step.fitting.chosen.compiled <= budget * MIB


@pytest.mark.parametrize(
    ("compilations", "verdict"),
    [
        (1, "chosen: the least predicted time of 1 compiled; faster ones are projected to fit"),
        (6, "chosen: the least predicted time that fits"),
    ],
)
def test_the_verdict_says_whether_the_search_came_to_its_end(compilations, verdict):
    step = fitted(110, compilations)
    assert step.fitting.chosen.verdict.startswith(verdict)


def test_the_table_tells_bounds_from_projections_and_what_is_expected():
    workload = jaxmem.fitting.Workload(
        *(loss_fn, ADAM, PARAMS, BATCH), target="h200", budget="45MiB", keep="placement"
    )
    search = jaxmem.fitting.LeverSearch(workload)
    search.projected()
    search.compiled.corrections.ratios[jaxmem.fitting.Levers()] = 1.037
    fitting = search.fitting()
    text = " ".join(str(fitting).split())
    bounds = [row for row in fitting.considered if row.plan is None and row.projected is not None]
    assert f" at least {jaxmem.format_bytes(bounds[0].projected)} " in text  # others are one row
    expectations = 0
    for row in fitting.considered:
        if row.plan is not None:
            assert f"at least {jaxmem.format_bytes(row.projected)}" not in text
        said = EXPECTED.fullmatch(row.verdict)
        assert bool(said) == row.verdict.startswith("not compiled: expected")
        if said:
            expectations += 1
            least, size, unit, ratio, over = said.groups()
            assert bool(least) == (row.plan is None) and unit == "MiB"
            expected = row.projected * float(ratio or 1)
            assert expected / MIB == pytest.approx(float(size), rel=1e-3)
            assert float(size) - 45 == pytest.approx(float(over), abs=0.011)
    assert expectations


EXPECTED = re.compile(
    r"not compiled: expected (at least )?([\d.]+) (\w+)(?: \(projected x ([\d.]+)\))?, "
    r"([\d.]+) MiB over the budget"
)


def test_a_byte_more_than_the_budget_shows_in_the_table():
    fitting = fit("1GiB").fitting
    chosen = fitting.chosen
    for row in (chosen, dataclasses.replace(chosen, compiled=2**30 + 1)):
        table = dataclasses.replace(fitting, considered=(row,), chosen=row)
        assert ("1.00 GiB + 1 B" in str(table)) == (row is not chosen)
    assert str(table).startswith("jaxmem.fit: does not fit: 1.00 GiB + 1 B of 1.00 GiB")


def test_stage_3_counts_the_parameters_that_xla_gathers():
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    workload = jaxmem.fitting.Workload(loss_fn, ADAM, PARAMS, BATCH, target="h100", mesh=mesh)
    levers = jaxmem.fitting.Levers(stage=3)
    plain = jaxmem.fitting.LeverSearch(workload).costs.plain_plan(levers)
    report = jaxmem.memory(
        workload.step(levers, plain), workload.state(levers), workload.batch, target=workload.target
    )
    assert report.collectives.count["all-gather"] >= 1
    projected = jaxmem.fitting.LeverSearch(workload).costs.candidate_of(levers, plain).projected
    assert 0.8 * projected < report.device < 1.12 * projected, report.device / projected


@pytest.mark.slow
def test_residuals_of_a_scan_wait_in_host_memory_on_a_mesh():
    """Each device's share of them on its own host."""
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    weights, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(16, 1024, 1024), (4 * 4096, 1024)])
    step = jaxmem.fit(
        exact_loss, ADAM, weights, x, keep="batch", target="h200", budget="450MiB", mesh=mesh
    )
    chosen, carry = step.fitting.chosen, x.size // 4 * 4
    waits = chosen.plan.predicted.host_bytes
    assert waits >= 10 * carry
    assert waits / 2 < step.fitting.report.host <= waits + carry
    assert chosen.compiled <= 450 * MIB


def test_a_fitted_step_on_a_mesh_runs():
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    params = {"layers": [jnp.full((WIDTH, WIDTH), 1e-3)] * LAYERS}
    batch = {name: np.ones((32, WIDTH)) for name in "xy"}
    step = jaxmem.fit(loss_fn, ADAM, params, batch, budget="1GiB", target="h200", mesh=mesh)
    expected = loss_fn(params, batch)
    state, metrics = step(step.init(params), batch)
    assert state.opt_state[0].mu["layers"][0].sharding.mesh.shape == {"data": 1}
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-12)


def test_a_batch_with_a_scalar_is_not_cut():
    batch = {"x": jax.ShapeDtypeStruct((64, WIDTH), jnp.float32), "scale": 2.0}

    def scaled(params, batch):
        return loss_fn(params, {"x": batch["x"], "y": batch["scale"] * batch["x"]})

    step = jaxmem.fit(scaled, ADAM, PARAMS, batch, budget="1GiB", target="h200")
    assert {row.levers.microbatches for row in step.fitting.considered} == {1}


def test_nothing_fits():
    with pytest.raises(jaxmem.BudgetError) as caught:
        fit("20MiB", keep="batch")
    text = str(caught.value)
    assert text.startswith("Nothing fits the budget of 20.00 MiB on h200. The lowest compiled is ")
    lowest = caught.value.lowest
    assert lowest > 20 * MIB and f"({lowest} bytes: precision as it is, state on the host; " in text
    assert "held by " in text and "test_fitting.py:" in text
    assert "What else could be allowed: allow='precision' to compute in bfloat16" in text
    assert "What is kept and need not be: 'batch'. Or raise the budget" in text
    step = fit(lowest, keep="batch")  # the lowest one works
    assert step.fitting.chosen.compiled <= lowest


class FakeCompilation(Compiling):
    """A compilation of the next size, in shares of a budget, without a compiler."""

    def __init__(self, sizes, budget):
        self.device = int(next(sizes) * budget)

    def report(self, compile="buffers", timeout=3600):
        return types.SimpleNamespace(device=self.device, host=0, has_timeline=False)


class RefusedCompilation(Compiling):
    """A compilation whose code is not generated, where ``refuses(step)`` says so."""

    def __init__(self, made, refuses):
        self.made, self.refuses = made, refuses

    def start(self, compile="buffers", hold=False):
        self.made.start(compile, hold)

    def stop(self):
        self.made.stop()

    def report(self, compile="buffers", timeout=3600):
        if compile == "full" and self.refuses():
            raise jaxmem.CompileError("XLA could not compile the program for h200:\nno such kernel")
        return self.made.report(compile, timeout)


def fit_beside(monkeypatch, budget, sizes):
    """A step for a deep and narrow network, whose compiled bytes are the next of these shares of
    the budget."""
    monkeypatch.setattr(
        jaxmem.fitting.search, "begin", lambda *_, **__: FakeCompilation(sizes, budget)
    )
    params = {"layers": [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 32}
    batch = {name: jax.ShapeDtypeStruct((2048, 256), jnp.float32) for name in "xy"}
    return jaxmem.fit(
        loss_fn, ADAM, params, batch, budget=budget, target="h200", keep=("batch", "placement")
    )


def test_plans_between_two_that_do_not_fit_are_tried(monkeypatch):
    """Bytes of one's own in place of the compiler's: what recomputes most is not the smallest."""
    budget, sizes = 56 * MIB, itertools.chain([1.25, 1.2, 1.05, 0.9], itertools.repeat(1.1))
    step = fit_beside(monkeypatch, budget, sizes)
    chosen = step.fitting.chosen
    assert chosen.compiled == int(0.9 * budget)
    others = [row.projected for row in step.fitting.considered if row.compiled and row != chosen]
    assert min(others) < chosen.projected < max(others)


def test_plans_above_those_that_do_not_fit_are_tried(monkeypatch):
    """The same where the least is all that is projected to fit: what is projected to take a little
    more may compile to less."""
    budget, sizes = int(44.2 * MIB), iter([1.02, 0.9, 1.1, 1.1, 1.1, 1.1])
    step = fit_beside(monkeypatch, budget, sizes)
    chosen = step.fitting.chosen
    assert chosen.compiled == int(0.9 * budget)
    assert chosen.projected > budget


@pytest.mark.slow
def test_more_than_the_gpu_has_is_never_said_to_fit(capsys):
    """The smaller of budget and GPU counts: in `fit`, plans, batches, reports, the command line."""
    usable = jaxmem.target("rtx-3090").usable_bytes
    layers = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 8  # of 256 MiB
    x = jax.ShapeDtypeStruct((8192 * 11, 8192), jnp.float32)  # of 2.75 GiB
    workload = functools.partial(
        jaxmem.fitting.Workload, loss_fn, ADAM, {"layers": layers}, {"x": x, "y": x}
    )
    for budget in ("24GiB", "120%", "80GiB"):
        said = f"The budget '{budget}' is .* GiB, and rtx-3090 has 23.19 GiB that a step can use"
        with pytest.warns(jaxmem.JaxmemWarning, match=said):
            assert workload(budget=budget, target="rtx-3090").budget == usable
        with pytest.warns(jaxmem.JaxmemWarning, match=said):
            plan = jaxmem.plan(
                loss_fn, PARAMS, BATCH, budget=budget, target="rtx-3090", compilations=0
            )
        assert plan.budget == usable
        with pytest.warns(jaxmem.JaxmemWarning, match=said):
            jaxmem.remat(loss_fn, budget=budget, target="rtx-3090")
    report = jaxmem.memory(jnp.sin, jnp.ones(256), target="rtx-3090")
    totals = dataclasses.replace(report.on_device, argument=usable + 1)
    monster = dataclasses.replace(report, on_device=totals)
    with pytest.warns(jaxmem.JaxmemWarning, match="'80GiB' is 80.00 GiB, and rtx-3090 has 23.19"):
        assert not monster.fits("80GiB")
    half = dataclasses.replace(jaxmem.target("h200"), name="half", memory_bytes=int(20.5 * 2**30))
    with pytest.warns(jaxmem.JaxmemWarning, match="'24GiB' is 24.00 GiB, and half has 20.00 GiB"):
        answer = jaxmem.max_batch_size(
            lambda x: x + 1,
            lambda batch: (jax.ShapeDtypeStruct((batch, 2**20), jnp.float32),),
            budget="24GiB",
            target=half,
        )
    assert answer.budget == 20 * 2**30 >= answer.report.device
    command = ["estimate", f"{__name__}:make_loss", "--target", "rtx-3090", "--budget", "120%"]
    with pytest.warns(jaxmem.JaxmemWarning, match="'120%' is 27.83 GiB, and rtx-3090 has 23.19"):
        assert cli.main(command) == 0
    done = subprocess.run(
        [sys.executable, "-m", "jaxmem", "diff", *[f"{__name__}:make_loss"] * 2, *command[2:]],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert "\njaxmem: warning: The budget '120%' is 27.83 GiB" in "\n" + done.stderr, done.stderr


def test_one_compilation_goes_to_a_fast_plan():
    step = fit("1GiB", compilations=1)  # all fits as it is
    fastest = min(row.seconds for row in step.fitting.considered)
    assert step.fitting.chosen.seconds == fastest
    assert step.fitting.chosen.verdict == "chosen: the least predicted time that fits"


def test_the_table_says_where_compilations_ended_before_the_search_did():
    """With room for what projections miss; more compilations find one that is faster."""
    plain = compiled(jaxmem.train_step(loss_fn, ADAM)).device
    budget = plain - MIB
    only = fit(budget, compilations=1).fitting
    assert only.chosen.compiled <= budget
    assert only.chosen.verdict.startswith("chosen: the least predicted time of 1 compiled; faster ")
    assert only.chosen.verdict.endswith("ones are projected to fit (compilations=1)")
    faster = [row for row in only.considered if row.seconds < only.chosen.seconds]
    assert faster and all(
        " over the budget" in row.verdict or row.verdict.endswith("% faster") for row in faster
    )
    more = fit(budget).fitting
    assert more.chosen.seconds < only.chosen.seconds
    assert more.chosen.verdict == "chosen: the least predicted time that fits"


EMPTY = jax.ShapeDtypeStruct((0, WIDTH), jnp.float32)


@pytest.mark.parametrize(
    "loss",
    [
        lambda params, batch: jnp.float32(0),
        lambda params, batch: jnp.sum(params["layers"][0]),
        lambda params, batch: jnp.sum(batch["x"]),
        lambda params, batch: jnp.sum(jnp.tanh(batch["x"][:0] @ params["layers"][0])),
    ],
    ids=["a constant", "no matmul", "no parameters", "an empty matmul"],
)
def test_programs_that_do_nothing_print(loss, tmp_path):
    common = {"target": "h200", "budget": "1GiB"}
    for options in ({}, common):
        plan = jaxmem.plan(loss, PARAMS, BATCH, **options)
        assert " plan, 0 regions " in str(plan) and "ms beside " in str(plan)
        for choice in plan.choices:
            assert plan.explain(choice.line)
    frontier = jaxmem.pareto(loss, PARAMS, BATCH)
    frontier.plot(tmp_path / "frontier.svg")
    assert str(frontier).startswith("one plan: ")
    fitting = jaxmem.fit(loss, ADAM, PARAMS, BATCH, **common).fitting
    assert "chosen: " in str(fitting) and fitting.to_dict()["chosen"]["compiled"] > 0


def test_losses_that_cannot_be_differentiated_and_batches_without_examples():
    for result, loss in (
        (r"float32\[4096\]", lambda params, batch: jnp.sum(batch["x"] @ params["layers"][0], 1)),
        (
            r"int32\[\]",
            lambda params, batch: jnp.argmax(batch["x"] @ params["layers"][0]).astype("int32"),
        ),
    ):
        for call in (jaxmem.plan, jaxmem.fit):
            args = (loss, PARAMS, BATCH) if call is jaxmem.plan else (loss, ADAM, PARAMS, BATCH)
            with pytest.raises(jaxmem.JaxmemError, match=f"returns? ?e?d? ?{result}"):
                call(*args, target="h200", budget="1GiB")
        step = jaxmem.train_step(loss, ADAM)
        with pytest.raises(jaxmem.JaxmemError, match="loss_fn returned"):
            jaxmem.max_batch_size(
                step,
                lambda n, step=step: (
                    step.abstract(PARAMS),
                    {name: jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for name in "xy"},
                ),
                target="h200",
            )
    with pytest.raises(jaxmem.PlanError, match="a backward pass keeps, and there is none of a fun"):
        jaxmem.pareto(lambda x: jnp.argmax(x), BATCH["x"])
    with pytest.raises(jaxmem.JaxmemError, match=r"no examples \(.*float32\[0, 512\]"):
        jaxmem.fit(loss_fn, ADAM, PARAMS, {"x": EMPTY, "y": EMPTY}, target="h200")


def test_wrong_input_is_told_before_compiling():
    for options, text in (
        (
            {"allow": "bf16"},
            r"knows no allow='bf16'; the names are 'precision', 'operations', 'kernels', 'stat",
        ),
        ({"keep": ["everything"]}, r"knows no keep='everything'; the names are 'precision', "),
        ({"allow": "precision", "keep": "precision"}, r"allow= and keep= both name 'precision'"),
        (
            {"allow": "batch"},
            r"fit searches 'batch' by default: leave it out of allow=, or name it",
        ),
        ({"target": "local"}, r"has no figures \(memory, bandwidth, FLOP/s\) of cpu\. Name"),
        ({"target": "h20"}, r"There is no target named 'h20'"),
        ({"keep": None}, r"takes keep=, names as text; got None\."),
        ({"keep": b"batch"}, r"takes keep=, names as text; got b'batch'\."),
        ({"compilations": 0}, r"takes compilations=, an int of 1 or more; got 0\."),
        ({"budget": "much"}, r"The budget 'much' does not parse"),
        (
            {"budget": 11},
            r"11 bytes are too few to plan with\. Write '11GiB' if you mean GiB, or '11B'",
        ),
    ):
        given = {"budget": "1GiB"} | options
        with pytest.raises(jaxmem.JaxmemError, match=text):
            fit(**given)


def test_a_sharded_step_is_advised_for_its_mesh():
    fsdp = jaxmem.shard(jax.sharding.AbstractMesh((4,), ("data",)))
    step = jaxmem.train_step(loss_fn, fsdp.optimizer(ADAM), sharding=fsdp)
    target = jaxmem.target("rtx-2080-ti")
    text = jaxmem.fitting.advise(step, step.abstract(PARAMS), BATCH, 40 * MIB, target)
    assert "would take precision as it is, " in text and ", ZeRO stage " in text


def test_remedies_name_what_was_not_asked_for_yet():
    workload = jaxmem.fitting.Workload(
        loss_fn, ADAM, PARAMS, BATCH, target="rtx-2080-ti", allow="precision", keep="residuals"
    )
    assert "has no bfloat16 arithmetic" in workload.refused["precision"]
    text = Verdicts(jaxmem.fitting.LeverSearch(workload)).remedies()
    assert "allow='moments'" in text and "allow='precision'" not in text
    assert "What is kept and need not be: 'residuals'." in text


@pytest.mark.slow
def test_resnet50_at_batch_200_on_11_gb():
    """MegEngine's demonstration: without recomputation it takes 15.6 GiB."""
    folder = pathlib.Path(__file__).parents[1] / "examples" / "resnet50"
    spec = importlib.util.spec_from_file_location("resnet50_model", folder / "model.py")
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    net = model.ResNet()
    image = jax.ShapeDtypeStruct((200, 224, 224, 3), jnp.float32)
    batch = {"image": image, "label": jax.ShapeDtypeStruct((200,), jnp.int32)}
    with jax.enable_x64(False):
        variables = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), image)
        step = jaxmem.fit(
            *(model.make_loss(net), optax.sgd(0.1, momentum=0.9), variables["params"], batch),
            model_state=variables["batch_stats"],
            target="rtx-2080-ti",
            compilations=4,
        )
    chosen = step.fitting.chosen
    assert chosen.compiled <= step.fitting.budget < 15 * 2**30
    assert chosen.levers.microbatches == 1, "batch norm sees the whole batch"
    assert chosen.plan.predicted.recompute_seconds <= 0.05 * 3 * chosen.plan.predicted.seconds


def make():
    return loss_fn, ADAM, PARAMS, BATCH


def make_with_options():
    return (*make(), {"keep": "batch"})


def make_with_everything():
    options = {"budget": "1200MiB", "target": "rtx-3090", "keep": "batch", "compilations": 2}
    return (*make(), options)


def make_with_typo():
    return (*make(), {"keeps": "batch"})


def make_loss():
    return loss_fn, (PARAMS, BATCH)


@pytest.mark.slow
def test_command_line_fit(capsys, tmp_path):
    page = tmp_path / "report.html"
    common = ["fit", "--target", "h200", "--budget"]
    assert cli.main([*common, "1GiB", f"{__name__}:make", "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("jaxmem.fit: fits: ")
    assert "<html" in page.read_text()[:200]
    name = f"{__name__}:make_with_options"
    assert cli.main([*common, "1GiB", name, "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["chosen"]["compiled"] <= about["budget"] == 2**30
    assert about["refused"]["batch"] == "it is to be kept"
    picture = tmp_path / "timeline.svg"
    name = f"{__name__}:make_with_everything"
    assert cli.main(["fit", name, "--json", "--plot", str(picture)]) == 0  # all as the module says
    about = json.loads(capsys.readouterr().out)
    assert about["budget"] == 1200 * MIB and about["target"].startswith("rtx-3090")
    assert about["refused"]["batch"] == "it is to be kept"
    assert "svg" in picture.read_text()[:300]
    others = ["--keep", "placement", "--compilations", "1"]
    assert cli.main([*common, "1GiB", name, *others, "--json"]) == 0  # the command line wins
    about = json.loads(capsys.readouterr().out)
    assert about["budget"] == 2**30 and about["target"].startswith("h200")
    assert "batch" not in about["refused"]
    assert about["refused"]["placement"] == "it is to be kept"
    assert cli.main([*common, "1GiB", f"{__name__}:make_with_typo"]) == 1
    assert "options that jaxmem.fit has not: ['keeps']" in capsys.readouterr().err
    name = f"{__name__}:make_with_options"
    assert cli.main([*common, "20MiB", name]) == 3
    assert "jaxmem: Nothing fits the budget of 20.00 MiB" in capsys.readouterr().err
    assert cli.main([*common, "1GiB", f"{__name__}:make_loss"]) == 1
    assert (
        "must return (loss_fn, optimizer, params, batch), and may return a dict"
        in capsys.readouterr().err
    )


def test_command_line_plan(capsys, caplog, tmp_path):
    name, picture = f"{__name__}:make_loss", tmp_path / "frontier.svg"
    assert cli.main(["plan", name, "--budget", "70MiB", "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert "ms (unchecked) at the rates of h200, as no target is given" in " ".join(out.split())
    assert out.startswith("fits: ") and "\ndp plan, " in out and f"wrote {picture}" in err
    assert "svg" in picture.read_text()[:300]
    common = ["plan", name, "--target", "h200", "--budget"]
    page = tmp_path / "plan.html"
    assert cli.main([*common, "70MiB", "--json", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    plan = jaxmem.Plan.from_json(text)
    assert plan.compiled_bytes <= 70 * MIB and '"time_error": null' in text
    assert page.read_text().startswith("<!doctype html>") and "h200" in page.read_text()
    assert cli.main([*common, "69MiB", "--compilations", "1", "--json"]) == 0
    capsys.readouterr()
    assert "compiling 1 of at most 1: " in caplog.text
    assert cli.main(["plan", name, "--regions", "keep", "--json"]) == 0
    assert jaxmem.Plan.from_json(capsys.readouterr().out).own_regions.kept
    assert cli.main(["plan", name, "--budget", "70MiB", "--html", str(page)]) == 1
    assert "name a target to compile for" in capsys.readouterr().err
    assert cli.main([*common, "1MiB"]) == 3
    assert "No dp plan fits the budget of 1.00 MiB" in capsys.readouterr().err
    assert cli.main([*common, "much"]) == 1
    assert "does not parse" in capsys.readouterr().err
    assert cli.main(["plan", f"{__name__}:make", "--budget", "1GiB"]) == 1
    assert "must return (loss, args)" in capsys.readouterr().err
    assert cli.main(["plan", f"{__name__}:loss_fn", "--budget", "1GiB"]) == 1
    said = "loss_fn is called without arguments and must return (loss, args): missing a required"
    assert said in capsys.readouterr().err


def test_help_says_what_keep_is_for(capsys):
    with pytest.raises(SystemExit):
        cli.main(["fit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "what may NOT be done although it changes no numerics, by name (may be repeated)" in text


def refuse(monkeypatch, refuses):
    """Every compilation in full asks ``refuses`` whether it fails."""
    begin = jaxmem.fitting.search.begin
    monkeypatch.setattr(
        jaxmem.fitting.search,
        "begin",
        lambda *args, **how: RefusedCompilation(begin(*args, **how), refuses),
    )


def test_a_step_whose_code_cannot_be_generated_is_not_returned(monkeypatch):
    """Its buffers could be assigned, and it fits: the next one is compiled in full too."""
    answers = [True, False]
    refuse(monkeypatch, lambda: answers.pop(0))
    fitting = fit("90MiB", keep="placement").fitting
    assert not answers and fitting.chosen.compiled <= 90 * MIB
    refused = [row for row in fitting.considered if "no such kernel" in row.verdict]
    assert [row.verdict for row in refused] == ["XLA could not compile it: no such kernel"]
    assert refused[0].seconds <= fitting.chosen.seconds and refused[0] != fitting.chosen


@pytest.mark.slow
def test_where_code_for_nothing_can_be_generated_the_compiler_is_heard(monkeypatch):
    """And not that the budget is too small: what fits was found."""
    refuse(monkeypatch, lambda: True)
    with pytest.raises(jaxmem.CompileError, match="no such kernel"):
        fit("90MiB", keep="placement", compilations=3)
    with pytest.raises(jaxmem.CompileError, match="no such kernel"):
        fit("1GiB", compilations=1)


def test_what_was_compiled_before_is_returned_where_the_best_has_no_code(monkeypatch):
    """The last compilation found the fastest step that fits, and an earlier one fits too."""
    sizes, budget, answers = iter([0.5, 0.9, 0.5]), 92 * MIB, [True, False]
    monkeypatch.setattr(
        jaxmem.fitting.search,
        "begin",
        lambda *_, **__: RefusedCompilation(FakeCompilation(sizes, budget), lambda: answers.pop(0)),
    )
    step = fit(budget, keep=("batch", "placement"), compilations=2)
    assert not answers and step.fitting.chosen.compiled == int(0.5 * budget)


def test_a_step_without_regions_has_the_derivatives_that_it_is_projected_with():
    """JAX's derivative of the label's logit scatters into an array as large as all of them; the
    search projected ours, compiled JAX's, and refused what fits."""

    def loss(params, tokens):
        words, last = params
        logits = (jnp.tanh(words[tokens]) @ last).astype(jnp.float32)
        picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - picked)

    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16000, 128), (128, 16000))]
    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    options = {"target": "h100", "budget": "700MiB", "keep": ("batch", "placement")}
    chosen = jaxmem.fit(loss, optax.sgd(1e-3), params, tokens, **options).fitting.chosen
    assert chosen.remat == "none"
    assert chosen.compiled == pytest.approx(chosen.projected, rel=0.05)


def test_a_scan_over_numbers_of_the_program_is_no_crash():
    """An array of NumPy that a jitted function closes over is written in the program as it is."""
    table = np.arange(8.0, dtype=np.float32)

    @jax.jit
    def polynomial(x):
        return jax.lax.scan(lambda y, k: (jnp.tanh(y * k + x), None), x, table)[0]

    def loss(p, x):
        return jnp.mean(polynomial(x @ p) ** 2)

    args = jnp.ones((4, 4), jnp.float32), jnp.ones((16, 4), jnp.float32)
    step = jaxmem.fit(loss, optax.sgd(1e-3), *args, budget="1MiB", target="h100")
    assert step.fitting.chosen.remat == "none"


def test_a_batch_that_cannot_be_cut_is_told():
    """Something in it has no examples: why there are no microbatches is in the table."""

    def loss(weights, batch):
        return batch["scale"].sum() * tanh_apart(weights, batch["x"])

    batch = {"x": TANH_ROWS, "scale": jax.ShapeDtypeStruct((), jnp.float32)}
    workload = jaxmem.fitting.Workload(loss, ADAM, TANH_LAYERS, batch, target="h100")
    told = workload.refused["microbatches"]
    assert told.startswith("the batch cannot be cut: batch['scale'] is a scalar: every array")
    uneven = batch | {"scale": jax.ShapeDtypeStruct((3,), jnp.float32)}
    workload = jaxmem.fitting.Workload(loss, ADAM, TANH_LAYERS, uneven, target="h100")
    assert "batch['scale'] has 3" in workload.refused["microbatches"]
    workload = jaxmem.fitting.Workload(loss, ADAM, TANH_LAYERS, batch, target="h100", keep="batch")
    assert "microbatches" not in workload.refused


@pytest.mark.slow
def test_a_plan_that_missed_is_not_said_to_be_projected_to_fit():
    """A policy on each block was the plan of the search by another name."""

    def loss(params, batch):
        x = batch["x"]
        for w in params["w"]:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    params = {"w": [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6}
    batch = {name: jax.ShapeDtypeStruct((8192, 32), jnp.float32) for name in "xy"}
    options = {"budget": "7MiB", "target": "rtx-2080-ti", "compilations": 8}
    step = jaxmem.fit(loss, optax.adam(1e-2), params, batch, **options)
    chosen, considered = step.fitting.chosen, step.fitting.considered
    faster = [row for row in considered if row.seconds < chosen.seconds]
    assert faster and all("over the budget" in row.verdict for row in faster)
    assert chosen.verdict == "chosen: the least predicted time that fits"
