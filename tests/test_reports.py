"""What a person gets of a report: files, a page, diffs, residuals, the command line."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from programs import array, cnn, mlp, report, tanh_layers

import jaxmem
from jaxmem import cli
from jaxmem.reports.drawn.plot import unit_of


def deep(w, x):
    for _ in range(16):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def deep_step():
    return jax.grad(deep), (array(256, 256), array(4096, 256))


def remat_step():
    return jax.grad(jaxmem.remat(deep)), (array(256, 256), array(4096, 256))


def not_a_step():
    return deep


def no_arguments():
    return deep, {"w": 1}


def nothing():
    return 3


@pytest.fixture(scope="module")
def plain():
    step, args = deep_step()
    return jaxmem.memory(step, *args, target="h200")


@pytest.fixture(scope="module")
def planned():
    step, args = remat_step()
    return jaxmem.memory(step, *args, target="h200")


# ---- files


def test_a_plot_has_the_budget_and_a_unit_that_suits(tmp_path, plain, planned):
    pytest.importorskip("matplotlib")
    light, dark = tmp_path / "light.svg", tmp_path / "dark.svg"
    plain.plot(light, budget="80MiB")
    text = light.read_text()
    assert "budget 80.00 MiB" in text and "live device memory (MiB)" in text
    assert "peak 72.50 MiB, backward: deep, tests/test_reports.py:" in text
    plain.plot(dark, dark=True)
    assert "#1f2023" in dark.read_text() and "#1f2023" not in text
    assert "budget" not in dark.read_text()
    plain.plot(dark, budget="2GiB")  # far above the scale
    assert "budget" not in dark.read_text()
    jaxmem.diff(plain, planned).plot(dark, budget="50MiB", dark=True)
    assert dark.read_text().count("budget 50.00 MiB") == 2
    assert [unit_of(size)[0] for size in (5, 2**10, 2**29, 2**31)] == ["bytes", "KiB", "MiB", "GiB"]
    frontier = jaxmem.pareto(deep, array(256, 256), array(4096, 256))
    frontier.plot(light, budget="50MiB")
    text = light.read_text()
    assert "budget 50.00 MiB" in text and "projected bytes of value_and_grad (MiB)" in text
    with pytest.raises(jaxmem.JaxmemError, match="A plot is written as"):
        frontier.plot("a.gif")


@pytest.mark.parametrize("share", [1.0, 1.02, 1.05, 1.3])
def test_no_budget_goes_through_the_label_of_the_peak(monkeypatch, tmp_path, plain, share):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: kept.append(figure))
    plain.plot(tmp_path / "plot.png", budget=int(share * plain.peak_bytes))
    FigureCanvasAgg(kept[0]).draw()
    (axes,) = kept[0].axes
    line = axes.transData.transform((0, share * plain.peak_bytes / 2**20))[1]
    peak, budget = (
        next(text for text in axes.texts if word in text.get_text()).get_window_extent()
        for word in ("peak ", "budget ")
    )
    assert not peak.y0 <= line <= peak.y1 and not peak.overlaps(budget)
    assert peak.y1 <= axes.bbox.y1


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_plots(tmp_path, plain, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline{suffix}"
    plain.plot(path)
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 5_000
    both = tmp_path / f"both{suffix}"
    jaxmem.diff(plain, plain).plot(both)
    assert both.read_bytes().startswith(magic) and both.stat().st_size > path.stat().st_size


def test_a_plot_of_another_suffix(plain):
    with pytest.raises(jaxmem.JaxmemError, match=r"written as .png, .svg, .pdf; got .* 'a.x'"):
        plain.plot("a.x")


def test_json_has_all_of_it():
    found = report(cnn)
    about = json.loads(found.to_json())
    assert about["device"] == found.device and about["peak"] == found.peak_bytes
    assert sum(buffer["bytes"] for buffer in about["buffers"]) == found.peak_bytes
    assert len(about["timeline"]["live"]) == len(about["timeline"]["phases"])
    rows = about["timeline"]["live_by_kind"].values()
    assert [sum(column) for column in zip(*rows, strict=True)] == about["timeline"]["live"]
    assert about["work"] == dataclasses.asdict(found.work) and about["work"]["flops"] > 0
    assert about["moved"] == found.moved > 0
    time = about["time"]
    assert time["seconds"] == found.time.seconds > time["waiting"] and time["error"] is None
    for part in ("by_phase", "by_limit", "by_module", "by_source"):
        assert sum(time[part].values()) == pytest.approx(time["seconds"])
    cpu = jaxmem.memory(jnp.sin, array(8), target="local")
    about = json.loads(cpu.to_json())  # nothing is known of how fast it is
    assert about["time"] is None and about["moved"] == cpu.moved and "peak" not in about


def test_the_page_is_one_small_file(tmp_path):
    path = tmp_path / "report.html"
    report(cnn).to_html(path)
    text = path.read_text()
    assert len(text) < 3_000_000
    assert not any(part in text for part in ("http://", "https://", "src=", "@import", "url("))
    with pytest.raises(jaxmem.JaxmemError, match="There is no timeline"):
        jaxmem.memory(jnp.sin, array(8), target="local").to_html(path)


def test_a_diff_without_timelines_has_no_page(tmp_path):
    small = jaxmem.memory(jnp.sin, array(8), target="local")
    found = jaxmem.diff(small, small)
    for write, name in ((found.to_html, "a.html"), (found.plot, "a.png")):
        with pytest.raises(jaxmem.JaxmemError, match="There is no timeline of what was compiled"):
            write(tmp_path / name)


@pytest.mark.parametrize(("terminal", "width"), [(60, 80), (80, 80), (90, 90), (200, 100)])
def test_a_report_fits_the_terminal(monkeypatch, plain, planned, terminal, width):
    monkeypatch.setenv("COLUMNS", str(terminal))
    printed = [*str(plain).splitlines(), *str(report(cnn)).splitlines()]
    printed += str(jaxmem.diff(plain, planned)).splitlines()
    assert max(map(len, printed)) <= width


# ---- diff


def test_a_diff_adds_up_and_names_what_changed_most(plain, planned):
    found = jaxmem.diff(plain, planned)
    assert found.device == planned.device - plain.device < 0
    for changes in found.changes.values():
        assert sum(changes.values()) == found.device
    taken = jaxmem.format_bytes(plain.device - planned.device)
    assert found.verdict.startswith(f"{taken} came off the peak, the largest change in residuals; ")
    assert "test_reports.py" in found.verdict
    assert max(map(len, str(found).splitlines())) <= 100
    back = jaxmem.diff(planned.to_json(), plain)
    assert back.verdict.startswith(f"{taken} were put onto the peak, the largest change in resid")
    assert json.loads(back.to_json())["changes"]["by_kind"]["residuals"] > 0
    same = jaxmem.diff(plain, plain).verdict
    assert same.startswith("The step takes as much as before") and "the peak is still in" in same


def test_a_diff_has_the_memories_of_the_chip(plain, planned, tmp_path):
    """As a TPU's report has them; what an earlier version wrote has none."""
    first, second = (json.loads(one.to_json()) for one in (plain, planned))
    first["on_chip"] = {"VMEM": 3 * 2**20, "SMEM": 256}
    second["on_chip"] = {"VMEM": 5 * 2**20}
    found = jaxmem.diff(first, second)
    printed = [line.split() for line in str(found).splitlines()]
    assert "3.00 MiB 5.00 MiB +2.00 MiB on the chip: VMEM".split() in printed
    assert "256 B 0 B -256 B on the chip: SMEM".split() in printed
    assert json.loads(found.to_json())["on_chip"]["VMEM"] == [3 * 2**20, 5 * 2**20]
    del first["on_chip"]
    assert "on the chip" not in str(jaxmem.diff(first, plain))


def test_a_diff_of_two_precisions_credits_no_remat(plain):
    """autocast makes casts again in the backward pass: there is recompute in one of the two."""
    _, args = deep_step()
    half = jaxmem.memory(jax.grad(jaxmem.autocast(deep, "bf16")), *args, target="h200")
    assert " came off the peak, the largest change in " in jaxmem.diff(plain, half).verdict
    for pair in ((plain, half), (half, plain)):
        assert "remat" not in jaxmem.diff(*pair).verdict.lower()


def test_a_diff_of_two_targets_names_them(plain):
    step, args = deep_step()
    other = jaxmem.memory(step, *args, target="rtx-2080-ti")
    lines = str(jaxmem.diff(plain, other)).splitlines()
    told = [line for line in lines if line.startswith(("before: ", "after: "))]
    assert told[0].startswith("before: target h200: NVIDIA H200")
    assert told[1].startswith("after:  target rtx-2080-ti: NVIDIA GeForce RTX 2080 Ti")
    assert not any("target" in line for line in str(jaxmem.diff(plain, plain)).splitlines())


def test_a_diff_of_something_else():
    with pytest.raises(jaxmem.JaxmemError, match="compares two reports: jaxmem.MemoryReport, or"):
        jaxmem.diff("{}", "[]")


# ---- residuals


@pytest.mark.parametrize("policy", [None, "everything_saveable", "dots_saveable"])
def test_residuals_are_those_that_jax_lists(policy):
    from jax._src.ad_checkpoint import saved_residuals

    fun = tanh_layers
    if policy:
        fun = jax.checkpoint(fun, policy=getattr(jax.checkpoint_policies, policy))
    args = {"layers": [array(8, 8)] * 3}, {"x": array(4, 8), "y": array(4, 8)}
    kept = jaxmem.residuals(fun, *args)
    listed = [(aval.shape, "argument" in text) for aval, text in saved_residuals(fun, *args)]
    assert sorted((one.shape, one.is_argument) for one in kept) == sorted(
        (shape, given) for shape, given in listed if shape
    ) + [(one.shape, one.is_argument) for one in kept if not one.shape]
    assert kept.total == sum(one.bytes for one in kept if not one.is_argument)
    sizes = [one.bytes for one in kept]
    assert sizes == sorted(sizes, reverse=True)
    made = [one for one in kept if not one.is_argument and one.shape]
    assert all("programs.py" in one.source for one in made)
    assert {one.source for one in kept if one.is_argument} <= {
        *(f"argument params['layers'][{n}]" for n in range(3)),
        *(f"argument batch['{name}']" for name in "xy"),
    }


def test_residuals_tell_modules_and_honour_remat():
    plain = jaxmem.residuals(deep, array(64, 64), array(128, 64))
    planned = jaxmem.residuals(jaxmem.remat(deep), array(64, 64), array(128, 64))
    assert planned.total < plain.total
    made = sum(not one.is_argument for one in plain)
    assert made >= 16  # one or two a layer, by the version of JAX
    assert str(plain).startswith(f"{jaxmem.format_bytes(plain.total)} kept in {made} values")

    @jax.named_scope("Encoder")
    def scoped(w, x):
        return jnp.sum(jnp.sin(x @ w))

    kept = [r for r in jaxmem.residuals(scoped, array(8, 8), array(4, 8)) if not r.is_argument]
    assert [(one.module, one.operation) for one in kept] == [("Encoder", "cos")]


def test_residuals_of_which_one_is_a_literal():
    """That of `jax.nn.gelu`, among others."""
    kept = jaxmem.residuals(lambda x: jnp.sum(jax.nn.gelu(x)), array(4, 8))
    assert (4, 8) in {one.shape for one in kept if not one.is_argument}


# ---- measured


def test_measure_runs_the_step_and_says_what_the_cpu_lacks():
    step, args, _ = mlp()
    measured = jaxmem.measure(step, *args)
    assert measured.arguments["batch"] == 2 * 2048 * 256 * 4
    assert measured.compiled.argument == sum(measured.arguments.values())
    assert measured.peak is None and measured.unexplained is None
    assert "the CPU keeps no statistics of its memory" in str(measured)
    assert measured.result[1]["loss"].shape == ()


def test_what_a_gpu_would_leave_unexplained(plain):
    """A device's statistics by hand: 10 bytes of others, 7 that nothing explains."""
    given = {"w": 100, "x": 200}
    peak = plain.device + 10 + 7
    measured = jaxmem.Measured(plain, given, 310, 400, 320, peak, {"backward": 5}, None)
    assert (measured.others, measured.unexplained) == (10, 7)
    assert "unexplained: rounding, kernels' workspace" in str(measured)
    earlier = dataclasses.replace(measured, earlier_peak=peak)
    assert earlier.unexplained is None
    assert "did not raise the allocator's peak" in str(earlier)


class Gpu:
    """The first device with the statistics of an allocator, one after the other."""

    def __init__(self, *statistics):
        self._statistics = iter(statistics)

    def __eq__(self, other):
        return other == jax.devices()[0]

    def memory_stats(self):
        found = next(self._statistics)
        if isinstance(found, Exception):
            raise found
        return found


def test_measure_beside_an_allocator(monkeypatch):
    """Before the run 1,000 bytes of others and the step's arguments are in use; the run takes what
    was compiled and 7 * 256 bytes more. The peak of earlier was lower."""
    from jaxmem.reports import measured

    step, args, _ = mlp()
    args = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), args)
    given = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    compiled = jaxmem.memory(step, *args, target="local").device
    before = given + 1000
    peak = compiled + 1000 + 7 * 256
    first = {"bytes_in_use": before, "peak_bytes_in_use": before + 50, "bytes_limit": 10**12}
    gpu = Gpu(first, {"bytes_in_use": before + 8, "peak_bytes_in_use": peak})
    monkeypatch.setattr(measured, "_device", lambda: gpu)
    measured = jaxmem.measure(step, *args)
    assert sum(measured.arguments.values()) == given
    assert (measured.before, measured.after) == (before, before + 8)
    assert (measured.earlier_peak, measured.peak) == (before + 50, peak)
    assert (measured.others, measured.unexplained) == (1000, 7 * 256)
    printed = str(measured)
    assert f"allocator's peak (measured)                 {jaxmem.format_bytes(peak):>14}" in printed
    assert "unexplained: rounding, kernels' workspace         1.75 KiB" in printed
    assert "note:" not in printed


@pytest.mark.parametrize(
    "known",
    [
        None,
        {},
        {"bytes_in_use": 5},
        {"bytes_in_use": 5, "peak_bytes_in_use": -1},
        jax.errors.JaxRuntimeError("INTERNAL: allocator statistics are not supported"),
    ],
    ids=str,
)
def test_a_device_that_does_not_tell(monkeypatch, known):
    from jaxmem.reports import measured

    gpu = Gpu(known, known)
    monkeypatch.setattr(measured, "_device", lambda: gpu)
    measured = jaxmem.measure(jnp.sin, jnp.zeros(8))
    assert measured.peak is None and measured.others is None and measured.unexplained is None
    assert "keeps no statistics of its memory" in str(measured)


# ---- the command line


def run(*arguments):
    return cli.main(list(arguments))


@pytest.fixture
def in_test_folder(monkeypatch):
    import pathlib

    monkeypatch.chdir(pathlib.Path(__file__).parent)


def test_estimate_prints_writes_and_gates(in_test_folder, capsys, tmp_path, plain):
    page = tmp_path / "page.html"
    step = ("estimate", "test_reports:deep_step", "--target", "h200")
    assert run(*step, "--html", str(page), "--budget", "1GiB") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("fits: ") and "by kind" in printed.out
    line = "compiling test_reports:deep_step for h200"
    assert re.fullmatch(rf"{line} \.\.\.\n{line}: .* s\nwrote .*\n", printed.err)
    share = plain.device / 2**30
    assert f" of the budget of 1.00 GiB, {share:.0%}\ncompiled for h200" in printed.out
    assert page.read_text().startswith("<!doctype html>")
    assert run(*step, "--budget", "1MiB", "--json") == 3
    printed = capsys.readouterr()
    about = json.loads(printed.out)
    assert about["device"] == plain.device and about["fits"] is False
    assert run(*step, "--budget", "50MiB") == 3
    assert (
        "does not fit: 72.50 MiB is 22.50 MiB more than the budget of 50.00 MiB"
        in capsys.readouterr().out
    )
    assert str(plain).startswith("fits: 72.50 MiB of 140.50 GiB usable, under 1%\n")
    assert "more than the budget of 1.00 MiB" in printed.err


def test_a_reader_that_has_enough_is_no_error():
    """As `jaxmem targets | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jaxmem", "targets"]
    found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (found.returncode, found.stderr) == (1, "")


def test_diff_of_a_file_and_a_step(in_test_folder, capsys, tmp_path, plain):
    path = tmp_path / "before.json"
    path.write_text(plain.to_json())
    step = ("diff", str(path), "test_reports:remat_step", "--target", "h200")
    assert run(*step) == 0
    assert "came off the peak" in capsys.readouterr().out
    assert run(*step, "--json", "--budget", "1MiB") == 3
    assert json.loads(capsys.readouterr().out)["verdict"].count("came off the peak") == 1


def test_diff_draws_and_gates_on_a_share(in_test_folder, capsys, tmp_path, plain, planned):
    pytest.importorskip("matplotlib")
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, found in zip(files, (plain, planned), strict=True):
        path.write_text(found.to_json())
    page, picture = tmp_path / "diff.html", tmp_path / "diff.svg"
    step = ("diff", *map(str, files), "--html", str(page), "--plot", str(picture))
    assert run(*step, "--budget", "1%") == 0  # of what is usable on the file's target
    assert (
        page.read_text().startswith("<!doctype html>") and "came off the peak" in page.read_text()
    )
    assert picture.read_text().startswith("<?xml")
    assert f"wrote {page}" in capsys.readouterr().err


def test_profile_runs_on_the_attached_device(in_test_folder, capsys):
    assert run("profile", "test_reports:remat_step", "--budget", "1GiB") == 0
    assert run("profile", "test_reports:remat_step", "--budget", "1KiB") == 3
    assert "more than the budget of 1.00 KiB" in capsys.readouterr().err
    assert run("profile", "test_reports:remat_step") == 0
    assert "the CPU keeps no statistics" in capsys.readouterr().out
    assert run("profile", "test_reports:remat_step", "--json") == 0
    assert json.loads(capsys.readouterr().out)["peak"] is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_reports", "A step is given as module:function that returns (step, args), such as"),
        ("no_such_module:make", "The module 'no_such_module' of 'no_such_module:make' cannot be"),
        ("test_reports:no_such", "The module 'test_reports' has no function 'no_such'"),
        ("test_reports:not_a_step", "must return (step, args): a function and the tuple of its"),
        ("test_reports:nothing", "It returned a value of type int."),
        ("test_reports:deep", "test_reports:deep is called without arguments and must return (st"),
        ("test_reports:no_arguments", "with args a tuple, as in (step, (state, batch)); its args"),
    ],
)
def test_a_wrong_step_is_told(in_test_folder, capsys, name, message):
    assert run("estimate", name, "--target", "h200") == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["estimate", "profile", "diff"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--budget", "2 bananas", "The budget '2 bananas' does not parse"),
        ("--budget", "", "The budget '' does not parse"),
        ("--plot", "timeline.gif", "A plot is written as .png, .svg, .pdf; got the path 'timeline"),
        ("--html", "no/where/page.html", "cannot be written to no/where/page.html: there is no fo"),
    ],
)
def test_wrong_options_are_told_before_compiling(
    in_test_folder, capsys, command, option, value, message
):
    steps = ["test_reports:deep_step", "test_reports:remat_step"][: 1 + (command == "diff")]
    assert run(command, *steps, option, value) == 1
    told = capsys.readouterr().err
    assert message in told and "compiling" not in told and "running" not in told


def test_both_steps_of_a_diff_are_looked_at_before_compiling(in_test_folder, capsys, tmp_path):
    assert run("diff", "test_reports:deep_step", "test_reports:nothing") == 1
    told = capsys.readouterr().err
    assert "test_reports:nothing must return (step, args)" in told and "compiling" not in told
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    assert run("diff", "test_reports:deep_step", str(wrong)) == 1
    told = capsys.readouterr().err
    assert f"{wrong}: jaxmem.diff compares two reports" in told and "compiling" not in told
    assert run("diff", "nowhere.json", "test_reports:deep_step") == 1
    assert "There is no file 'nowhere.json'; a step is given as" in capsys.readouterr().err


def test_an_unknown_target(in_test_folder, capsys):
    assert run("estimate", "test_reports:deep_step", "--target", "h300") == 1
    assert "There is no target named 'h300'" in capsys.readouterr().err


@pytest.mark.slow
def test_resnet50_is_attributed_and_quick():
    import pathlib
    import sys

    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "resnet50"))
    from train import plan_step

    step, args = plan_step(100)
    found = jaxmem.memory(step, *args, target="h200")
    text = str(found) + found.to_json()
    assert "ResNet/Block_0" in text and "resnet50/model.py" in text
    for name in ("by_phase", "by_kind", "by_module", "by_source"):
        rows = getattr(found, name)
        assert sum(rows.values()) == found.device
        assert rows.get("(not attributed)", 0) <= 0.05 * found.peak_bytes
