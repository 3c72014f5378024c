"""The documentation: its code runs, it knows every public name, and it builds without a warning."""

import inspect
import pathlib
import re
import subprocess
import sys
import typing

import pytest

import jaxmem

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "results.md"]


@pytest.fixture
def as_users_run_it():
    """Without the strictness of the other tests."""
    import jax

    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_runs(page, as_users_run_it, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


def public(module) -> set[str]:
    names = {name for name in vars(module) if not name.startswith("_")}
    return {name for name in names if not inspect.ismodule(getattr(module, name))}


def parts_of_a_plan() -> set[str]:
    """The classes that a plan's fields have: a user meets them, and they have no name in jaxmem."""
    found = set()
    for hint in typing.get_type_hints(jaxmem.Plan).values():
        for kind in {hint, *typing.get_args(hint)}:
            if inspect.isclass(kind) and kind.__module__.startswith("jaxmem."):
                found.add(f"{kind.__module__.split('.')[1]}.{kind.__name__}")
    return found


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: jaxmem\.([\w.]+)$", text, re.MULTILINE))
    parts = parts_of_a_plan()
    assert {"planning.Region", "planning.Loop", "rematerialization.Choice"} <= parts
    expected = public(jaxmem) | parts
    expected |= {f"optim.{name}" for name in public(jaxmem.optim)}
    expected |= {f"ops.{name}" for name in public(jaxmem.ops)}
    assert expected - listed == set()
    for name in listed:
        value = jaxmem
        for part in name.split("."):
            value = getattr(value, part)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    subprocess.run([sys.executable, "-m", "benchmarks.page"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "guides" / "fit" / "index.html").is_file()
    measured = (tmp_path / "results" / "index.html").read_text()
    assert '<h3 id="planner">' in measured and 'href="#planner"' in measured
    assert 'class="tabbed-set' in measured and "<!--/table-->" not in measured
