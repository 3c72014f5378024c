"""The documentation: its code runs, it knows every public name, and it builds without a warning."""

import inspect
import pathlib
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import typing

import jax
import pytest

import jaxmem
from jaxmem import cli
from tests.absent_tpu import needs_libtpu

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "results.md"]
PAGES = [README, *DOCS]
ALONE = [ROOT / "docs" / "guides" / "sharding.md"]  # each block runs by itself
QUICK = ("README", "index", "start", "fit")  # pages whose code runs every time
TPUS = ROOT / "docs" / "guides" / "tpus.md"


@pytest.fixture
def as_users_run_it():
    """Without the strictness of the other tests."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


def marks_of(page) -> list:
    return [needs_libtpu] * (page == TPUS) + [pytest.mark.slow] * (page.stem not in QUICK)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks_of(page)) for page in PAGES], ids=lambda page: page.stem
)
def test_every_python_block_runs(page, as_users_run_it, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def run(page) -> None:
    names: dict = {}
    for block in blocks(page, "python"):
        if page in ALONE:
            names = {}
        exec(compile(block, str(page), "exec"), names)


def blocks(page, language: str) -> list[str]:
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)", "]", shown).split()) <= 600


def page_of_the_package(root, metadata: dict) -> str:
    from hatch_build import CustomMetadataHook

    CustomMetadataHook(str(root), {}).update(metadata)
    return metadata["readme"]["text"]


@pytest.fixture
def clone(tmp_path):
    shutil.copy(README, tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


REMOTES = {
    "https://example.org/jaxmem.git": "https://example.org/jaxmem",
    "https://someone:secret@example.org/jaxmem/": "https://example.org/jaxmem",
    "git@example.org:who/jaxmem.git": "https://example.org/who/jaxmem",
    "ssh://git@example.org:22/who/jaxmem": "https://example.org/who/jaxmem",
}


@pytest.mark.parametrize("remote", REMOTES)
def test_the_package_s_page_leads_into_the_repository_that_it_was_cloned_from(clone, remote):
    """A package index shows the page by itself: a relative link on it leads nowhere."""
    subprocess.run(["git", "-C", clone, "remote", "add", "origin", remote], check=True)
    text, source = page_of_the_package(clone, {}), REMOTES[remote]
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 20 and all(link.startswith(f"{source}/") for link in links)
    assert f"]({source}/blob/main/docs/proof.md#three-figures-of-one-step)" in text
    assert f"]({source}/raw/main/docs/images/fit.png)" in text
    named = {"urls": {"Source": "https://example.com/fork/"}}
    assert "](https://example.com/fork/blob/main/docs/limits.md)" in page_of_the_package(
        clone, named
    )
    (clone / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: jaxmem\n\n{text}")
    shutil.rmtree(clone / ".git")
    assert page_of_the_package(clone, {}) == text, "built from a source distribution"


@pytest.mark.parametrize("remote", [None, "/srv/jaxmem.git", "file:///srv/jaxmem", "../jaxmem"])
def test_the_package_s_page_has_no_link_that_leads_nowhere(clone, remote):
    if remote:
        subprocess.run(["git", "-C", clone, "remote", "add", "origin", remote], check=True)
    text = page_of_the_package(clone, {})
    assert "](" not in text and "jaxmem.plan" in text and "All limits" in text


def test_the_output_in_the_readme_is_what_the_code_prints(
    as_users_run_it, tmp_path, monkeypatch, capsys
):
    """Its lines, in their order; with jax 0.10 its figures too, which differ between versions of
    XLA."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    run(README)
    lines = capsys.readouterr().out.splitlines(), blocks(README, "text")[0].splitlines()
    printed, shown = ([" ".join(words(line)) for line in part] for part in lines)
    assert len(shown) == 6
    assert shown[0] == printed[0]
    recomputed = re.findall(r"by the .* would cost (\d+\.\d%)", README.read_text())
    assert recomputed and all(f"+{share}" in blocks(README, "text")[0] for share in recomputed)
    for line in shown:
        assert any(one.startswith(line) for one in printed), line
    if jax.__version_info__ < (0, 11):
        printed, shown = ([" ".join(line.split()) for line in part] for part in lines)
        for line in shown:
            assert any(one.startswith(line) for one in printed), line


def words(line: str) -> list[str]:
    return re.sub(r"[\d.]+", "#", line.partition("…")[0]).split()


@pytest.mark.slow
def test_every_command_runs_on_the_whole_train_py(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "command-line.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (whole,) = blocks(page, "python")
    (tmp_path / "train.py").write_text(whole)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    commands = [shlex.split(line.partition(" > ")[0])[1:] for line in lines]
    table = page.read_text().partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE))
    assert {command for command, *_ in commands} == listed - {"install-compiler"}
    commands[commands.index(["calibrate"])] += ["--seconds", "1"]  # not a minute
    try:
        for command in commands:
            assert cli.main(command) == 0, command
            assert capsys.readouterr().out, command
    finally:
        sys.modules.pop("train", None)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "report.html",
        "timeline.png",
        "frontier.svg",
    }


def test_links_of_the_readme_and_of_contributing_lead_somewhere():
    for page in (README, ROOT / "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", page.read_text())
        assert len(links) > 5
        for path, anchor in links:
            if path.startswith("https://"):
                continue
            assert (ROOT / path.replace("\\", "")).exists(), path
            if anchor:
                heads = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
                assert anchor in {f"#{head.lower().replace(' ', '-')}" for head in heads}


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
        assert pkgutil.resolve_name(f"jaxmem.{name}") is not None


@pytest.mark.slow
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
