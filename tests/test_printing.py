"""What objects print: an answer first, at most 100 columns, equal rows as one; and in notebooks."""

import dataclasses
import sys

import jax.numpy as jnp
import pytest
from programs import array

import jaxmem
from jaxmem.cli import output
from jaxmem.ground.words import pluralize
from jaxmem.rematerialization import Row
from jaxmem.reports.drawn.grouping import common_path, without_numbers
from jaxmem.reports.drawn.tables import Table, as_html, as_text

DEPTH = 12


def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


SHAPES = [array(256, 256)] * DEPTH, array(2048, 256)


@pytest.fixture(scope="module")
def plan():
    return jaxmem.plan(deep, *SHAPES)


@pytest.fixture(scope="module")
def report():
    return jaxmem.memory(deep, *SHAPES, target="h200")


def test_the_answer_of_a_plan_comes_first(plan):
    assert str(plan).startswith(f"takes {jaxmem.format_bytes(plan.projected_bytes)} (projected), ")
    for budget, answer in ((2**40, "fits: "), (2**10, "does not fit: ")):
        text = str(dataclasses.replace(plan, budget=budget))
        assert text.startswith(answer) and f" of {jaxmem.format_bytes(budget)} (proj" in text


def test_equal_regions_are_one_row(plan, monkeypatch):
    """64 equal layers with one region in each, and one layer that is another."""
    monkeypatch.setenv("COLUMNS", "100")
    rows = []
    for layer in range(65):
        place = f"Net/Block_{layer}/Dense_0 (net.py:7 (Net.__call__))"
        rows.append(Row(0, place, place, 2**20 if layer < 64 else 2**21, 0, 10**9))
        rows.append(Row(1, place.replace("Dense", "Norm"), place, 0, 2**10, 0))
    text = str(dataclasses.replace(plan, rows=tuple(rows)))
    table = [line.split() for line in text.splitlines()]
    table = table[[row[-1:] for row in table].index(["net.py)"]) + 1 :]
    assert table == [
        ["1.00", "MiB", "1", "x", "64", "Net/Block_*/Dense_0:7"],
        ["1.00", "KiB", "x", "64", "Net/Block_*/Norm_0:7", "..", "Net/Block_*/Dense_0:7"],
        ["2.00", "MiB", "1", "Net/Block_64/Dense_0:7"],
        ["1.00", "KiB", "Net/Block_64/Norm_0:7", "..", "Net/Block_64/Dense_0:7"],
    ]


@pytest.mark.parametrize(("count", "text"), [(0, "0 regions"), (1, "1 region"), (2, "2 regions")])
def test_one_is_not_several(count, text):
    assert pluralize(count, "region") == text


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (0, "it is not recomputed:"),
        (1, "it is recomputed once in"),
        (2, "it is recomputed twice in"),
        (3, "it is recomputed 3 times in"),
    ],
)
def test_how_often_a_value_is_recomputed(plan, times, said):
    one = dataclasses.replace(plan.choices[0], action="recompute", times=times)
    text = dataclasses.replace(plan, choices=(one,)).explain("deep")
    assert f"In this plan {said}" in text


def test_a_plan_of_one_region(plan):
    text = str(dataclasses.replace(plan, rows=(Row(0, "a (net.py:1)", "a (net.py:1)", 0, 0, 0),)))
    assert " plan, 1 region (program " in text


@pytest.mark.parametrize("terminal", [40, 80, 100, 200])
def test_lines_are_not_longer_than_the_terminal(monkeypatch, plan, report, terminal):
    monkeypatch.setenv("COLUMNS", str(terminal))
    long = "a/very/long/module/of/many/parts" * 4
    row = Row(3, f"{long} (a.py:1 (f))", f"{long} (b.py:2 (g))", 1, 2, 3)
    frontier = jaxmem.pareto(deep, *SHAPES)
    for one in (plan, dataclasses.replace(plan, rows=(row,)), report, frontier, report.by_source):
        assert max(map(len, str(one).splitlines())) <= min(100, max(80, terminal))


def test_a_breakdown_is_a_dict_that_prints_its_units(report):
    assert report.by_phase == dict(report.by_phase) and sum(report.by_phase.values())
    lines = [line.split() for line in str(report.by_phase).splitlines()]
    assert [line[-1] for line in lines] == [name for name, size in report.by_phase.items() if size]
    assert lines[0][1] in ("KiB", "MiB") and lines[0][2].endswith("%")
    assert "<td" in report.by_phase._repr_html_()


def test_paths_that_differ_by_numbers():
    assert without_numbers("Block_12/Conv_3 (a.py:40)") == "Block_*/Conv_* (a.py:40)"
    assert common_path(["Block_1/Conv_3", "Block_12/Conv_3"]) == "Block_*/Conv_3"


def test_a_last_column_wraps_or_goes_below():
    words = "several words that do not fit beside the rest of their row"
    table = Table(("name", "n", ""), [("x", "12", words)], left=(0, 2), wraps=True)
    assert list(table.lines(40)) == [
        "name   n",
        "x     12  several words that do not fit",
        "          beside the rest of their row",
    ]
    wide = dataclasses.replace(table, rows=[("x" * 20, "12", words)])
    assert list(wide.lines(40))[1:] == [
        "x" * 20 + "  12",
        "    several words that do not fit beside",
        "    the rest of their row",
    ]
    cut = dataclasses.replace(table, wraps=False)
    assert list(cut.lines(30))[1] == "x     12  …e rest of their row"


def test_a_word_longer_than_a_last_column_goes_below():
    rows = [("1", "2" * 50, "dots_with_no_batch_dims_saveable on each"), ("1", "2" * 50, "")]
    lines = list(Table(("a", "b", "c"), rows, left=(2,), wraps=True).lines(80))
    assert max(map(len, lines)) <= 80 and len(lines) == 4
    assert lines[2] == "    dots_with_no_batch_dims_saveable on each"


def test_html_is_escaped_and_its_answer_bold():
    table = Table(("a", "b"), [("<x>", "1")], "title", (0,))
    text = as_html(["fits: 1 < 2", "", "and more", table])
    assert text.startswith("<p><b>fits: 1 &lt; 2</b></p>\n<p>and more</p>\n<table><caption>title")
    assert "&lt;x&gt;" in text and "<x>" not in text
    assert as_text([table]).splitlines() == ["title", "a    b", "<x>  1"]


def test_a_terminal_gets_colours_and_a_pipe_none(monkeypatch, capsys):
    output.show("fits: 1\nmore")
    assert capsys.readouterr().out == "fits: 1\nmore\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output.show("does not fit: 1\nmore")
    assert capsys.readouterr().out == "\x1b[1;31mdoes not fit: 1\x1b[0m\nmore\n"


@pytest.mark.slow
def test_a_notebook_shows_tables(tmp_path):
    """In a real kernel: reports, plans and fits as HTML."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    code = (
        "import jax, jax.numpy as jnp, jaxmem\n"
        "def loss(w, x): return jnp.sum(jnp.tanh(x @ w))\n"
        "shapes = [jax.ShapeDtypeStruct((64, 64), 'float32')] * 2\n"
    )
    cells = [f"{code}jaxmem.memory(loss, *shapes, target='h200')", "jaxmem.plan(loss, *shapes)"]
    cells.append("jaxmem.memory(loss, *shapes, target='h200').by_kind")
    cells = [nbformat.v4.new_code_cell(source) for source in cells]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, resources={}).execute(cwd=tmp_path)
    for cell, start in zip(
        notebook.cells, ("<p><b>fits: ", "<p><b>takes ", "<table>"), strict=True
    ):
        (shown,) = (one for one in cell.outputs if one.output_type == "execute_result")
        assert shown.data["text/html"].startswith(start)
