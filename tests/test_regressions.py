"""Memory as a test: `jaxmem.pytest`, and diffs with another environment or another commit."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from test_reports import deep_step, remat_step

import jaxmem
from jaxmem import cli
from jaxmem.pytest import assert_fits

ROOT = pathlib.Path(__file__).parents[1]

STEP = """
import jax, jax.numpy as jnp
WIDTH = {width}

def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)

def make():
    shapes = [(WIDTH, WIDTH), (1024, WIDTH)]
    return jax.grad(loss), tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
"""
TEST = """
from jaxmem.pytest import assert_fits
from step import make

def test_memory():
    assert_fits(*make(), target="h200", budget="{budget}", baseline="memory.json")
"""


def run(folder, *options):
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    env.pop("PYTEST_CURRENT_TEST", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "jaxmem.pytest", *options]
    command += ["-p", "no:cacheprovider", "--import-mode=prepend", "-c", "/dev/null"]
    command += ["--rootdir", "."]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def write(folder, width=256, budget="1GiB"):
    (folder / "step.py").write_text(STEP.format(width=width))
    (folder / "test_step.py").write_text(TEST.format(budget=budget))


@pytest.mark.slow
def test_a_baseline_is_written_kept_and_missed(tmp_path):
    write(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "memory.json has no entry 'test_step.py::test_memory'" in done.stdout
    done = run(tmp_path, "--jaxmem-update")
    assert done.returncode == 0, done.stdout
    entry = json.loads((tmp_path / "memory.json").read_text())["test_step.py::test_memory"]
    assert entry["device"] > 0 and entry["by_value"] and len(json.dumps(entry)) < 10_000
    assert run(tmp_path).returncode == 0
    write(tmp_path, width=512)
    done = run(tmp_path)
    assert done.returncode == 1
    lines = textwrap.dedent(done.stdout)
    assert "AssertionError: grew by " in lines and "(allowed: 1.0%)" in lines
    assert "by value" in lines and "step.py:7 (loss)" in lines
    assert "`pytest --jaxmem-update` writes the baseline anew" in lines
    assert "jaxmem/pytest.py" not in lines  # the failure is the test's
    write(tmp_path, budget="2MiB")
    done = run(tmp_path)
    assert "does not fit: " in done.stdout and "by line" in done.stdout


def test_what_fits_returns_its_report(monkeypatch):
    report = assert_fits(*deep_step(), target="h200", budget="80MiB")
    assert report.device < 80 * 2**20
    with pytest.raises(AssertionError, match="^does not fit: 72.50 MiB is 2.50 MiB more than the"):
        assert_fits(*deep_step(), target="h200", budget="70MiB")
    with pytest.raises(jaxmem.BudgetError, match="does not parse"):
        assert_fits(*deep_step(), target="h200", budget="lots")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with pytest.raises(jaxmem.JaxmemError, match="No test of pytest runs: .* needs a name="):
        assert_fits(*deep_step(), target="h200", baseline="memory.json")


@pytest.mark.parametrize(("text", "said"), [("{", "is no JSON"), ("[]", "holds no entries")])
def test_a_baseline_that_is_none(tmp_path, text, said):
    path = tmp_path / "memory.json"
    path.write_text(text)
    with pytest.raises(jaxmem.JaxmemError, match=said):
        assert_fits(*deep_step(), target="h200", baseline=path)


def test_growth_within_the_tolerance(tmp_path):
    path = tmp_path / "memory.json"
    device = jaxmem.memory(*_flat(remat_step()), target="h200").device
    path.write_text(json.dumps({"step": {"jaxmem": 1, "target": "h200", "device": device // 2}}))
    options = {"target": "h200", "baseline": path, "name": "step"}
    assert assert_fits(*remat_step(), **options, tolerance=1.01).device == device
    with pytest.raises(AssertionError, match=r"^grew by 100.0%: .* \(allowed: 50.0%\)"):
        assert_fits(*remat_step(), **options, tolerance=0.5)


def _flat(made):
    return made[0], *made[1]


def test_values_of_a_diff_add_up():
    plain, planned = (
        jaxmem.memory(*_flat(make()), target="h200") for make in (deep_step, remat_step)
    )
    found = jaxmem.diff(plain, planned)
    assert sum(found.changes["by_value"].values()) == found.device
    values = " ".join(found.changes["by_value"])
    assert " f32[4096,256] deep tests/test_reports.py:" in values and "(fragmentation)" in values
    assert jaxmem.diff(plain.to_json(), planned).changes == found.changes


@pytest.mark.slow
def test_diff_with_another_commit(tmp_path, monkeypatch, capsys):
    """The earlier commit lies in a folder of its own, as `git worktree add` makes it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, width in (("old", 256), ("new", 512)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "measured_step.py").write_text(STEP.format(width=width))
    monkeypatch.chdir(tmp_path / "new")
    common = ["diff", "measured_step:make", "--directory", "../old", "--target", "h200"]
    assert cli.main(common) == 0
    out, err = capsys.readouterr()
    assert out.split(" were put onto the peak")[0].endswith("MiB") and "by value" in out
    assert "compiling measured_step:make in ../old" in err
    assert cli.main([*common, "--python", sys.prefix, "--budget", "1MiB", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["device"][0] < found["device"][1]
    wrong = [
        (["--python", "nowhere"], "--python names an environment's folder or its Python; there is"),
        (["--directory", "nowhere"], "There is no folder 'nowhere'."),
        (["--directory", str(tmp_path)], "The estimate of measured_step:make in "),
        ([], "name both, or say with --python or --directory where the first one is"),
    ]
    for options, said in wrong:
        assert cli.main(["diff", "measured_step:make", "--target", "h200", *options]) == 1
        assert said in capsys.readouterr().err
