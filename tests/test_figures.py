"""Figures in the README and the documentation are those of benchmarks/results."""

import json
import re
import sys

import pytest
from PIL import Image

from benchmarks import _record, figures, page
from benchmarks.__main__ import GROUPS, modules

RESULTS = _record.results_by_name()


@pytest.mark.parametrize(
    "page", figures.pages(), ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_figures_are_those_of_the_results_and_an_altered_one_is_found(page):
    text = page.read_text()
    assert figures.fill(text) == (text, [])
    for mark in figures.MARKED.finditer(text):
        if mark["table"]:
            at = mark.start() + re.search(r"(?s)\n\|-.*?(\d)", mark[0]).start(1)
        else:
            at = mark.end("number") - 1
        altered = f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
        fixed, found = figures.fill(altered)
        assert fixed == text
        assert len(found) == 1 and " should be " in found[0], mark[0]


def test_most_pages_with_figures_are_marked():
    marked = [page.stem for page in figures.pages() if figures.MARKED.search(page.read_text())]
    assert {"README", "ops", "state", "precision", "remat", "comparison"} <= set(marked)


@pytest.mark.parametrize("name", ["fit", "fit-dark"])
def test_the_first_picture_says_what_the_readme_says(name):
    said = Image.open(figures.ROOT / "docs" / "images" / f"{name}.png").text["Description"]
    before, after = re.findall(r"(\d+\.\d+ GiB)", said)
    assert figures.ROOT.joinpath("README.md").read_text().count(f"{before}<!--") == 1
    marked = "<!--=fit[problem=ResNet50, 224x224, batch 200].compiled-->"
    assert f"{after}{marked}" in figures.ROOT.joinpath("README.md").read_text()


RESULT = {
    "0.10.2": {
        "rows": [
            {"what": "`a`", "bytes": "1.50 GiB", "FLOPs": "1.034x", "off": "-0.26%", "count": 1144},
            {"what": "b", "bytes": "2.004 GiB", "FLOPs": "1.000x", "off": "+0.10%", "count": 7},
        ]
    },
    "0.12.0.1": {"rows": [{"what": "a", "bytes": "1.75 GiB"}]},
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RESULTS", tmp_path)
    made = {"made": {"title": "Made", "runs": RESULT}}
    (tmp_path / "levers.json").write_text(json.dumps(made))
    figures._runs.cache_clear()
    yield
    figures._runs.cache_clear()


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("9.99 GiB<!--=made[what=a].bytes-->", "1.50 GiB"),
        ("9.9<!--=made[what=b].bytes--> GiB", "2.0"),
        ("1 MiB<!--=made[what=a].bytes-->", "1536 MiB"),
        ("1,000 MiB<!--=made[what=a].by-->", "1,536 MiB"),
        ("9.99 GiB<!--=made@0.12.0.1[what=a].bytes-->", "1.75 GiB"),
        ("9.9 %<!--=made[what=a].FLOPs-->", "3.4 %"),
        ("9 per cent<!--=made[what=a].FLOPs-->", "3 per cent"),
        ("9.99 times<!--=made[what=a & count=1144].FLOPs-->", "1.03 times"),
        ("9.9%<!--=made[what=a].off-->", "0.3%"),
        ("+9.99%<!--=made[what=a].off-->", "-0.26%"),
        ("9.99%<!--=largest made[].off-->", "0.26%"),
        ("9.99%<!--=least made[].off-->", "0.10%"),
        ("9,999<!--=made[what=a].count-->", "1,144"),
        ("9<!--=count made[]--> rows", "2"),
        ("9<!--=count made[what=b]--> rows", "1"),
        ("9<!--=count made@0.12.0.1[].what--> rows", "1"),
    ],
)
def test_a_figure_is_written_as_the_text_has_it(results, text, filled):
    new, found = figures.fill(f"the old {text} of it")
    assert new == f"the old {filled}{text[text.index('<') :]} of it"
    assert len(found) == 1


def test_a_table_has_the_columns_and_rows_that_are_named(results):
    marks = "<!--=table made[what=a]: what; bytes as held-->\n{}<!--/table-->\n"
    new, found = figures.fill(marks.format(""))
    assert new == marks.format("\n| what | held |\n|---|---|\n| `a` | 1.50 GiB |\n\n")
    assert len(found) == 1 and figures.fill(new) == (new, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1<!--=other[what=a].bytes-->", "benchmarks/results has nothing of a script 'other'"),
        ("1<!--=made[what=c].bytes-->", "no row has what=c"),
        ("1<!--=made[what=a].seconds-->", "there is no column 'seconds', but 'what', 'bytes'"),
        ("1<!--=made[].bytes-->", "2 rows are so, not one"),
        ("1<!--=made@0.9[what=a].bytes-->", "there is no run with jax 0.9, but with 0.10.2, 0.12"),
        ("1 %<!--=made[what=a].bytes-->", "'1.50 GiB' cannot be told in %"),
        ("1<!--=made[what=b].what-->", "'b' is no number"),
        ("1<!--=made[what=a]-->", "this is not"),
        ("1<!--=made.bytes-->", "this is not NAME[COLUMN=VALUE & ...].COLUMN"),
        ("GiB<!--=made[what=a].bytes-->", "no figure stands right before its comment"),
    ],
)
def test_what_cannot_be_filled_in_is_said_and_left(results, text, said):
    new, found = figures.fill(f"one\ntwo {text}\n")
    assert new == f"one\ntwo {text}\n"
    assert len(found) == 1 and found[0].startswith(f"line 2: {said}")


@pytest.mark.parametrize("name", page.PLOTS)
def test_the_committed_plots_show_the_results_as_they_are(name):
    runs = _record.same_rows(RESULTS[name]["runs"])
    for number, (versions, run) in enumerate(runs):
        file = f"{name}-jax-{versions[0]}" if number else name
        for scheme in page.INK:
            plot = _record.ROOT / "docs" / "plots" / f"{file}{scheme}.svg"
            assert page.checksum(name, run) in plot.read_text(), "make docs draws it again"


# ---- the results themselves


def test_every_benchmark_that_was_run_has_its_results_on_the_first_page():
    page = (_record.ROOT / "benchmarks" / "README.md").read_text()
    linked = {name: group for group, name in re.findall(r"\(results/(\w+)\.md#(\w+)\)", page)}
    assert linked.keys() == RESULTS.keys()
    assert all(name in _record.results_of(group) for name, group in linked.items())
    scripts = {module.rpartition(".")[2] for group in GROUPS for module in modules(group)}
    assert scripts - linked.keys() == {"gpu", "gpu_offload"}  # no GPU has run them yet
    assert len(modules("planner")) > 5 and "benchmarks.gpu" in modules("gpu")


@pytest.mark.parametrize("group", GROUPS)
def test_the_tables_to_read_are_those_of_the_results(group):
    found = _record.results_of(group)
    page = _record.RESULTS / f"{group}.md"
    assert page.exists() == bool(found)
    if found:
        assert page.read_text() == _record.page(group, found)
    for name, results in found.items():
        for jax, run in results["runs"].items():
            assert run["versions"]["jax"] == jax
            module = run["command"].removeprefix("python -m ")
            assert module == f"benchmarks.{group}.{name}"
            assert (_record.ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_a_run_replaces_that_of_its_version_and_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RESULTS", tmp_path)
    script = _record.ROOT / "benchmarks" / "levers" / "made.py"
    monkeypatch.setattr(sys, "argv", [str(script), "one"])
    for jax, rows in (
        ("0.12.0.1", [{"what": "one", "seconds": "1"}]),
        ("0.10.2", [{"what": "one", "seconds": "2"}]),
        ("0.10.2", [{"what": "one", "seconds": "1"}]),
    ):
        monkeypatch.setattr(_record, "version", {"jax": jax}.get)
        _record.record("Made", rows, "A note.")
    results = _record.results_of("levers")["made"]
    assert list(results["runs"]) == ["0.10.2", "0.12.0.1"]
    assert results["runs"]["0.10.2"]["rows"] == [{"what": "one", "seconds": "1"}]
    assert results["runs"]["0.10.2"]["command"] == "python -m benchmarks.levers.made"
    text = (tmp_path / "levers.md").read_text()
    assert (
        "## Made\n\n### jax 0.10.2 and 0.12.0.1\n\n| what | seconds |\n|---|---|\n"
    ) in text and "* [Made](#made)" in text
    assert text.count("| one | 1 |") == 1 and text.count("A note.") == 1


def test_a_part_has_the_date_of_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RESULTS", tmp_path)
    script = str(_record.ROOT / "benchmarks" / "levers" / "made.py")

    def run(date, *parts, jax="0.10.2", result=3):
        monkeypatch.setattr(sys, "argv", [script, *parts])
        monkeypatch.setattr(_record, "version", {"jax": jax}.get)
        monkeypatch.setattr(_record, "_today", lambda: date)
        _record.record_parts(
            "Made",
            "what",
            ["zero", "one", "none"],
            lambda name: [] if name == "none" else [{"what": name, "s": result}],
            lambda rows: f"{len(rows)} rows.",
        )
        return _record.results_of("levers")["made"]["runs"]["0.10.2"]

    first = {"what": "one", "s": 3}
    found = run("2026-01-01", "one", "none")
    assert (found["rows"], found["dates"]) == ([first], {"one": "2026-01-01"})
    run("2026-01-02", jax="0.12.0.1")
    found = run("2026-01-03", "zero", result=4)
    assert found["rows"] == [{"what": "zero", "s": 4}, first]
    assert found["dates"] == {"zero": "2026-01-03", "one": "2026-01-01"}
    assert found["note"] == "2 rows."
    text = (tmp_path / "levers.md").read_text()
    assert "made`, 2026-01-03 (2026-01-01: one), " in text and "made`, 2026-01-02, " in text
    with pytest.raises(SystemExit, match="'two' is not a what; there are zero, one, none"):
        run("2026-01-04", "zero", "two")
    assert run("2026-01-04", "none") == found
