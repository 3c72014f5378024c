"""Pages of reports, and of diffs, in a real browser."""

import json
import pathlib
import re

import numpy as np
import optax
import pytest
from browser import faint_texts, fits_its_width, needs_browser, one_browser, opened, overlap
from programs import array, cnn, report, tanh_layers
from test_reports import deep_step, remat_step

import jaxmem
from jaxmem import cli
from jaxmem.reports.drawn.page import page as draw

__all__ = ["one_browser"]  # a fixture of this module
pytestmark = needs_browser
TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture(scope="module")
def of_cnn():
    return report(cnn)


@pytest.fixture(scope="module")
def plain():
    step, args = deep_step()
    return jaxmem.memory(step, *args, target="h200")


@pytest.fixture(scope="module")
def planned():
    step, args = remat_step()
    return jaxmem.memory(step, *args, target="h200")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "page.html"


def drag(page, graph, reset):
    """Zooms into a timeline and out again."""
    box = page.locator(graph).bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 500, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, middle)
    page.mouse.up()
    assert page.is_visible(reset)


def test_a_page_by_clicks(path, of_cnn):
    of_cnn.to_html(path)
    with opened(path) as page:
        assert jaxmem.format_bytes(of_cnn.device) in page.inner_text("#tiles")
        drag(page, "#time", "#reset")
        assert "of " + str(len(of_cnn.timeline.schedule)) in page.inner_text("#tip")
        page.dblclick("#time")
        assert not page.is_visible("#reset")

        # The treemap: a click goes into a module, the path leads out again.
        before = page.inner_text("#crumbs")
        page.mouse.move(5, 5)
        page.locator("#map rect").first.click(position={"x": 8, "y": 6})
        assert page.inner_text("#crumbs") != before
        page.locator("#crumbs button").first.click()
        assert page.inner_text("#crumbs").startswith("step")

        # The table: sorts by a column, filters by words, opens a row of several.
        page.uncheck("#grouped")
        first = page.locator("#body tr").first
        largest = jaxmem.format_bytes(of_cnn.peak[0].bytes)
        assert first.locator("td").first.inner_text() == largest
        page.click("#heads th[data-k=bytes]")
        assert first.locator("td").first.inner_text() != largest
        page.fill("#filter", "Conv_1 residuals")
        modules = page.locator("#body tr td:nth-child(5)").all_inner_texts()
        assert modules and all("Conv_1" in module for module in modules)


def test_a_page_by_keys(path, of_cnn):
    of_cnn.to_html(path)
    with opened(path) as page:
        page.focus("#time")
        page.keyboard.press("ArrowRight")
        told = page.inner_text("#tip")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#tip") != told
        page.keyboard.press("Escape")
        assert not page.is_visible("#tip")
        page.focus("#map rect")
        before = page.inner_text("#crumbs")
        page.keyboard.press("Enter")
        assert page.inner_text("#crumbs") != before
        row = page.locator("#body tr[data-g]").first
        count, row_count = int(row.inner_text().split(TIMES)[1].split()[0]), "#body tr.member"
        row.focus()
        page.keyboard.press("Enter")
        assert page.locator(row_count).count() == count > 1
        page.keyboard.press("Enter")
        assert page.locator(row_count).count() == 0
        page.focus("#heads th[data-k=module]")
        page.keyboard.press("Enter")
        assert page.get_attribute("#heads th[data-k=module]", "aria-sort") == "ascending"


def test_equal_buffers_are_one_row(path, of_cnn):
    """The three layers of it are equal."""
    of_cnn.to_html(path)
    with opened(path) as page:
        rows = page.locator("#body tr").all_inner_texts()
        assert any(f"{TIMES} 3" in row and "CNN/Conv_*" in row for row in rows)
        assert len(rows) < len(of_cnn.peak) / 1.5


def test_the_tip_covers_nothing_of_what_it_tells_and_names_your_line_first(path, of_cnn):
    of_cnn.to_html(path)
    with opened(path) as page:
        box = page.locator("#time").bounding_box()
        for at in (0.2, 0.5, 0.99):
            page.mouse.move(box["x"] + at * box["width"], box["y"] + 100)
            assert overlap(page, "#tip", "#time") == 0
        for share in range(30, 60, 3):  # until one that XLA attributes
            page.mouse.move(box["x"] + share / 100 * box["width"], box["y"] + 100)
            told = page.inner_text("#tip")
            if re.match(r"tests/programs.py:\d+ \(", told):
                break
        else:
            raise AssertionError(told)
        assert told.index("programs.py") < told.index("XLA: ")
        for number in range(page.locator("#map rect").count()):
            page.locator("#map rect").nth(number).focus()
            tile = f"#map rect >> nth={number}"
            height = page.locator(tile).bounding_box()["height"]
            if height < 300:  # one that leaves room beside it
                assert overlap(page, "#tip", tile) == 0


def test_a_page_says_of_which_step_and_whether_it_fits(path, of_cnn):
    of_cnn.to_html(path)
    with opened(path) as page:
        assert page.title().startswith("step on h200: ")
        assert page.inner_text("#answer").startswith("fits: ")
        assert "above this scale: usable 140.50 GiB" in page.inner_text("#beyond")
    of_cnn.to_html(path, budget="10MiB", name="train:make")
    with opened(path) as page:
        assert page.title().startswith("train:make on h200: ")
        assert page.inner_text("h1") == "Memory of train:make"
        answer = page.inner_text("#answer")
        assert re.fullmatch(r"does not fit: .* is .* more than the budget of 10.00 MiB", answer)
        assert page.locator("#time .limit.budget").count() == 1
        assert "fits:" not in page.inner_text("body")


def test_no_page_of_exit_code_3_says_that_it_fits(path, monkeypatch, capsys):
    monkeypatch.chdir(pathlib.Path(__file__).parent)
    steps = ["test_reports:deep_step", "--target", "h200", "--budget", "50MiB"]
    assert cli.main(["estimate", *steps, "--html", str(path)]) == 3
    with opened(path) as page:
        assert page.inner_text("#answer").startswith("does not fit: ")
        assert "test_reports:deep_step" in page.title()
        assert page.locator("#time .limit.budget").count() == 1
    assert cli.main(["diff", steps[0], *steps, "--html", str(path)]) == 3
    with opened(path) as page:
        assert page.inner_text("#answer").startswith("after: does not fit: ")
        assert page.locator("#time1 .limit.budget").count() == 1


def test_marks_of_the_axes_are_round(path, plain):
    plain.to_html(path)
    with opened(path) as page:
        texts = page.locator("#time text").all_text_contents()
    assert {"0", "20 MiB", "40 MiB", "60 MiB", "20", "100"} <= set(texts)
    assert {"live device memory", "instruction of the compiled schedule"} <= set(texts)


def test_no_limit_goes_through_the_label_of_the_peak(path, plain):
    plain.to_html(path, budget=int(1.03 * plain.peak_bytes))
    with opened(path) as page:
        label = page.locator("#time text", has_text="peak ").bounding_box()
        line = page.locator("#time .limit.budget").bounding_box()
    assert label["y"] + label["height"] <= line["y"] + 2


def test_small_fragmentation_is_no_tile(path, planned, plain):
    assert planned.fragmentation < 0.02 * planned.device  # of the newest XLA there is none
    for found in (planned, plain):
        found.to_html(path)
        with opened(path) as page:
            labels = page.locator("#map rect").evaluate_all(
                "all => all.map(r => r.getAttribute('aria-label'))"
            )
            assert labels and not any("fragmentation" in label for label in labels)


def test_nothing_of_0_bytes_is_a_row(path, plain, planned):
    plain.to_html(path)
    with opened(path) as page:
        assert plain.host == plain.fragmentation == 0
        for box in ("#tiles", "#splits", "#body"):
            assert not re.search(r"(?<![\d.])0 B", page.inner_text(box))
    jaxmem.diff(plain, planned).to_html(path)
    with opened(path) as page:
        assert page.inner_text("#tiles").count("→") == 2 + (planned.fragmentation > 0)
        changes = page.locator("#body td:nth-child(3)").all_inner_texts()
        assert changes and "0 B" not in changes


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 380])
def test_every_text_can_be_read(path, of_cnn, plain, planned, scheme, width):
    for write in (of_cnn.to_html, jaxmem.diff(plain, planned).to_html):
        write(path, budget="30MiB")
        with opened(path, width, scheme=scheme) as page:
            assert fits_its_width(page)
            box = page.locator("svg").first.bounding_box()
            page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 90)
            assert page.is_visible("#tip")
            count, faint = faint_texts(page)
            assert count > 50 and faint == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_a_step_closes_over_is_in_the_timeline(path, scheme):
    table = np.random.default_rng(0).random((512, 8192), np.float32)
    closed = jaxmem.memory(lambda x: x @ table, array(64, 512), target="h100")
    closed.to_html(path)
    with opened(path, scheme=scheme) as page:
        assert "constants" in page.inner_text("#legend")
        assert faint_texts(page)[1] == []


def test_labels_are_inside_their_tiles(path, of_cnn):
    of_cnn.to_html(path)
    boxes = (
        "all => all.map(e => { const b = e.getBoundingClientRect(); return [b.left, b.right]; })"
    )
    with opened(path) as page:
        labels, tiles = (
            page.locator(f"#map {kind}").evaluate_all(boxes) for kind in ("text", "rect")
        )
    assert len(labels) > 3
    for left, right in labels:
        assert any(left >= tile[0] and right <= tile[1] + 1 for tile in tiles)


def test_the_page_of_a_diff(path, plain, planned):
    found = jaxmem.diff(plain, planned)
    found.to_html(path)
    assert path.stat().st_size < 3_000_000
    with opened(path, height=1100) as page:
        assert page.inner_text("#verdict") == found.verdict
        assert jaxmem.format_bytes(found.device) in page.inner_text("#tiles")
        for number, one in enumerate((plain, planned)):
            drag(page, f"#time{number}", f"#reset{number}")
            assert "of " + str(len(one.timeline.schedule)) in page.inner_text("#tip")
            assert not page.is_visible(f"#reset{1 - number}")
            page.click(f"#reset{number}")
        for name in ("by_kind", "by_phase", "by_source", "by_module"):
            page.click(f"#tabs button[data-t={name}]")
            assert jaxmem.format_bytes(found.device) in page.inner_text("#count")
            for column in (1, 2, 3):  # numbers end where their heading ends
                edges = [
                    page.locator(f"{row}:nth-child({column})").first.evaluate(
                        "e => { const r = document.createRange(); r.selectNodeContents(e); "
                        "return r.getBoundingClientRect().right; }"
                    )
                    for row in ("#heads th", "#body td")
                ]
                assert abs(edges[0] - edges[1]) < 2
        page.click("#tabs button[data-t=by_kind]")
        page.fill("#filter", "residuals")
        (row,) = page.locator("#body tr").all_inner_texts()
        change = jaxmem.format_bytes(found.changes["by_kind"]["residuals"])
        assert change in row and "residuals" in row


def test_padding_has_a_table_where_it_is_worth_a_look(path, of_cnn):
    """As a report for a TPU has it; on a GPU nothing is padded."""
    about = json.loads(of_cnn.to_json())
    assert about["padding"] == []
    one = {"shape": "f32[1000,3]", "count": 2, "logical": 24000, "why": "axis 1 has 3 of 4 rows"}
    for taken, shown in ((about["device"] // 2, True), (24000 + about["device"] // 200, False)):
        path.write_text(draw(about | {"padding": [one | {"bytes": taken}]}), "utf-8")
        with opened(path) as page:
            assert page.is_visible("#padded") == shown
            if shown:
                cells = page.locator("#padding td").all_inner_texts()
                padding = jaxmem.format_bytes(taken - 24000)
                sizes = [padding, jaxmem.format_bytes(taken), jaxmem.format_bytes(24000)]
                assert cells == [*sizes, f"{TIMES} 2", one["shape"], one["why"]]


def test_a_page_of_what_an_earlier_version_wrote(path, plain):
    about = json.loads(plain.to_json())
    del about["timeline"]["origins"], about["timeline"]["origin"], about["name"]
    jaxmem.diff(about, plain).to_html(path)
    with opened(path) as page:
        page.mouse.move(600, page.locator("#time0").bounding_box()["y"] + 50)
        assert "XLA: " in page.inner_text("#tip")


def test_a_diff_of_microbatches_credits_no_remat():
    """With remat and microbatches together all of it was the microbatches."""
    params = {"layers": [array(256, 256)] * 4}
    batch = {name: array(8192, 256) for name in "xy"}
    both = []
    for options in ({}, {"remat": "dp", "microbatches": 2}):
        step = jaxmem.train_step(tanh_layers, optax.adam(1e-3), **options)
        both.append(jaxmem.memory(step, step.abstract(params), batch, target="h200"))
    verdict = jaxmem.diff(*both).verdict
    assert " came off the peak, the largest change in " in verdict
    assert "remat" not in verdict
