"""The page of a choice, in a real browser: of a plan, of a frontier, of a fit."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from browser import faint_texts, fits_its_width, needs_browser, one_browser, opened, overlap
from programs import array

import jaxmem
from jaxmem import cli

__all__ = ["one_browser"]  # a fixture of this module
DEPTH, WIDTH, ROWS = 8, 256, 2048
SHAPES = [array(WIDTH, WIDTH)] * DEPTH, {name: array(ROWS, WIDTH) for name in "xy"}
TIMES = "\N{MULTIPLICATION SIGN}"


def loss_fn(params, batch):
    x = batch["x"]
    for number, w in enumerate(params):
        with jax.named_scope(f"Net/Block_{number}"):
            x = jnp.tanh(jnp.tanh(x @ w) @ w.T)
    return jnp.mean((x - batch["y"]) ** 2)


def workload():
    return loss_fn, optax.adam(1e-3), *SHAPES


@pytest.fixture(scope="module")
def frontier():
    return jaxmem.pareto(loss_fn, *SHAPES, target="rtx-3090")


@pytest.fixture(scope="module")
def fitted():
    return jaxmem.fit(*workload(), budget="25MiB", target="rtx-3090").fitting


@pytest.fixture
def path(tmp_path):
    return tmp_path / "page.html"


def test_a_projected_timeline_has_the_projected_peak(frontier):
    for plan in frontier.plans:
        predicted = plan.predicted
        assert max(predicted.timeline.live) == plan.projected_bytes
        assert max(predicted.plain_timeline.live) == plan.plain_bytes
        assert 0 < predicted.timeline.backward < len(predicted.timeline.live) <= 400
        assert jaxmem.Plan.from_json(plan.to_json()) == plan


def test_the_first_plan_has_no_regions_that_bring_nothing(frontier):
    """A region per layer that recomputes nothing takes four bytes less than the step as it is."""
    assert not frontier.plans[0].regions
    assert frontier.plans[0].projected_bytes == frontier.plans[0].plain_bytes


def test_a_page_is_one_small_file(path, frontier, fitted):
    for write in (frontier.plans[-1].to_html, frontier.to_html, fitted.to_html):
        write(path, name="a </script> step")
        text = path.read_text()
        assert text.startswith("<!doctype html>") and len(text) < 300_000
        assert not any(part in text for part in ("http://", "https://", "src=", "@import", "url("))
        assert "a </script> step" not in text


def test_nothing_to_choose_from(path, fitted):
    empty = dataclasses.replace(fitted, considered=(), chosen=None)
    with pytest.raises(jaxmem.JaxmemError, match="nothing was considered"):
        empty.to_html(path)


@needs_browser
def test_a_point_is_chosen_and_the_rest_follows(path, frontier):
    frontier.to_html(path, name="net", budget="40MiB")
    with opened(path) as page:
        assert page.title() == "What to save and what to recompute: net on rtx-3090"
        answer = page.inner_text("#answer")
        assert answer.startswith("fits the budget of 40.00 MiB: dp, ")
        assert page.locator("#frontier .point.one-liner").count() == len(frontier.baseline_policies)
        shown = page.locator("#points tr").all_inner_texts()
        assert len(shown) == len(frontier.plans) + len(frontier.baseline_policies)
        smallest = min(frontier.plans, key=lambda plan: plan.projected_bytes)
        size = jaxmem.format_bytes(smallest.projected_bytes)
        before = [page.inner_html(box) for box in ("#time", "#tree", "#body")]
        page.locator("#points tr", has_text=size).first.click()
        assert f": {size} projected" in page.inner_text("#answer")
        assert all(
            page.inner_html(box) != was
            for box, was in zip(("#time", "#tree", "#body"), before, strict=True)
        )
        # A click in the picture; the tip stands beside the point.
        point = page.locator("#frontier .point.projected").last
        point.hover()
        assert overlap(page, "#tip", "#frontier .point.projected >> nth=-1") == 0
        point.click()
        assert point.get_attribute("aria-pressed") == "true"
        assert page.locator("#frontier .chosen").count() == 1
        one_liner = page.locator("#frontier .point[aria-label^=nothing_saveable]")
        one_liner.click()
        assert page.is_visible("#unknown") and not page.is_visible("#tree")


@needs_browser
def test_the_budget_is_dragged(path, frontier):
    frontier.to_html(path, budget="40MiB")
    with opened(path) as page:
        slide = page.locator("#budget")
        slide.fill("1000")
        assert "no more time" in page.inner_text("#answer")
        slide.fill("0")
        assert page.inner_text("#answer").startswith("does not fit the budget of ")
        assert "bad" in page.get_attribute("#answer", "class")
        slide.fill("500")
        middle = page.inner_text("#answer")
        line = page.locator("#line .grip").bounding_box()
        x, y = line["x"] + line["width"] / 2, line["y"] + line["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 120, y, steps=4)
        page.mouse.up()
        assert page.inner_text("#answer") != middle
        assert page.inner_text("#allowed") != jaxmem.format_bytes(40 * 2**20)


@needs_browser
def test_all_of_it_by_keys(path, frontier):
    frontier.to_html(path, budget="30MiB")
    with opened(path) as page:
        page.focus("#budget")
        before = page.inner_text("#allowed")
        for _ in range(20):
            page.keyboard.press("ArrowRight")
        assert page.inner_text("#allowed") != before
        page.focus("#points tr >> nth=0")
        page.keyboard.press("Enter")
        assert page.get_attribute("#points tr >> nth=0", "aria-selected") == "true"
        page.focus('#frontier .point[data-i="2"]')
        assert page.is_visible("#tip")
        page.keyboard.press("Enter")
        assert page.get_attribute("#points tr >> nth=2", "aria-selected") == "true"
        row = page.locator("#tree tr[aria-expanded]").first
        was = row.get_attribute("aria-expanded")
        row.focus()
        page.keyboard.press("Enter")
        assert page.locator("#tree tr[aria-expanded]").first.get_attribute("aria-expanded") != was


@needs_browser
def test_equal_layers_are_one_row_with_what_becomes_of_them(path, frontier):
    frontier.plans[0].to_html(path)  # nothing is recomputed: all layers are equal
    with opened(path) as page:
        rows = page.locator("#tree tr").all_inner_texts()
        assert any(f"Block_* {TIMES} " in row for row in rows) and len(rows) <= 5
        page.click("#tabs button[data-t=value]")
        body = page.locator("#body tr").all_inner_texts()
        equal = next(row for row in body if f"{TIMES} {2 * DEPTH}" in row)
        assert "Net/Block_*" in equal and "test_choice_pages.py:" in equal
        assert "outside all regions" in equal


@needs_browser
def test_decisions_say_why(path, frontier):
    plan = frontier.plans[len(frontier.plans) // 2]
    plan.to_html(path)
    with opened(path) as page:
        page.click("#points tr >> nth=1")
        page.click("#tabs button[data-t=value]")
        page.fill("#filter", "recompute made again")
        rows = page.locator("#body tr").all_inner_texts()
        assert rows and all("recompute" in row and "ms per GiB" in row for row in rows)
        saved = sum(one.bytes for one in plan.choices if one.action in ("save", "keep"))
        table = page.locator("#tree tr").first.inner_text()
        assert jaxmem.format_bytes(saved).split()[0].split(".")[0] in table


@pytest.fixture(scope="module")
def compiled_plan():
    return jaxmem.plan(loss_fn, *SHAPES, target="rtx-3090", budget="25MiB")


def test_a_compiled_timeline_has_the_compiled_peak(fitted, compiled_plan):
    live = compiled_plan.compiled.timeline.live
    assert 0.95 * compiled_plan.compiled_bytes < max(live) <= compiled_plan.compiled_bytes
    assert 100 < len(live) <= 400 and compiled_plan.compiled.timeline.backward == 0
    assert jaxmem.Plan.from_json(compiled_plan.to_json()) == compiled_plan
    assert fitted.chosen.report.device == fitted.chosen.compiled
    assert [one.report is None for one in fitted.considered] == [
        one.compiled is None for one in fitted.considered
    ]


@needs_browser
def test_what_was_compiled_is_drawn_as_compiled(path, fitted, compiled_plan):
    told = {}
    for name, one in (("fit", fitted), ("plan", compiled_plan)):
        one.to_html(path)
        with opened(path) as page:
            assert page.locator("#time path.fill.compiled").count() == 1
            assert page.locator("#time path.edge.dashed").count() == 1  # what was projected of it
            legend = page.inner_text("#lines").split("\n")
            curves = ["chosen, compiled", "chosen, projected", "as it is, projected"]
            assert legend == [*curves, "budget 25.00 MiB"]
            # One scale for all; the budget's name is in no curve's way.
            told_of_passes = page.locator("#time text", has_text="backward").count()
            assert told_of_passes == (1 if name == "fit" else 0)
            assert page.locator("#time text", has_text="budget").count() == 0
            ends = page.locator("#time path").evaluate_all(
                "all => all.map(e => { const b = e.getBBox(); return [b.x, b.x + b.width]; })"
            )
            assert all(abs(one - ends[0][at]) < 0.5 for each in ends for at, one in enumerate(each))
            told[name] = page.inner_text("#known")
            assert page.get_attribute("#time", "aria-label").count(" MiB") == 4
            page.locator("#points td:nth-child(3):text-is('projected')").first.click()
            assert page.locator("#time path.compiled").count() == 0
            assert page.locator("#time path.fill.projected").count() == 1
            assert page.inner_text("#known") == "projected"
    peak = jaxmem.format_bytes(fitted.chosen.report.peak_bytes)
    assert told["fit"] == f"compiled: peak {peak}"
    assert "where a backward pass begins is not known here" in told["plan"]


@pytest.mark.slow
@needs_browser
def test_a_step_as_it_is_that_was_compiled_is_drawn_so_beside_others(path):
    """And what takes ten times the time leaves room for what takes little more."""
    fitting = jaxmem.fit(*workload(), target="rtx-3090", compilations=1).fitting
    assert fitting.chosen == fitting.plain
    times = {"seconds": 11 * fitting.chosen.seconds, "projected": 20 * 2**20}
    slow = dataclasses.replace(fitting.chosen, compiled=None, report=None, **times)
    dataclasses.replace(fitting, considered=(*fitting.considered, slow)).to_html(path)
    with opened(path) as page:
        page.locator("#points td:nth-child(3):text-is('projected')").first.click()
        assert "as it is, compiled" in page.inner_text("#lines")
        marks = page.locator("#frontier text").all_text_contents()
        assert {"0%", "20%", "100%", "1000%"} <= set(marks)
        boxes = page.locator("#frontier text").evaluate_all(
            "all => all.map(e => { const b = e.getBoundingClientRect(); "
            "return [b.left, b.top, b.right, b.bottom]; })"
        )
        for at, (left, top, right, bottom) in enumerate(boxes):
            for other in boxes[at + 1 :]:
                apart = right <= other[0] or other[2] <= left or bottom <= other[1]
                assert apart or other[3] <= top, (marks[at], marks[boxes.index(other)])


@needs_browser
def test_a_fit_tells_compiled_from_projected(path, fitted):
    fitted.to_html(path, name="train:workload")
    with opened(path) as page:
        liners = page.locator("#frontier .point.one-liner")
        assert liners.count() == len(fitted.baseline_policies) > 2
        box = page.locator("#left .scroll")
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth")  # no verdict is cut
        compiled = [one for one in fitted.considered if one.compiled is not None]
        assert page.locator("#frontier .point.compiled").count() == len(compiled)
        assert page.locator("#frontier .point.projected").count() > 0
        answer = page.inner_text("#answer")
        size = jaxmem.format_bytes(fitted.chosen.compiled)
        assert answer.startswith("fits the budget of 25.00 MiB: ") and f"{size} compiled" in answer
        assert "chosen: the least predicted time that fits" in answer


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_every_text_can_be_read(path, frontier, scheme, width):
    frontier.to_html(path, budget="40MiB")
    with opened(path, width, scheme=scheme) as page:
        assert fits_its_width(page)
        page.locator("#frontier .point").nth(1).focus()
        assert page.is_visible("#tip")
        count, faint = faint_texts(page)
        assert count > 80 and faint == []
        page.locator("#budget").fill("0")
        assert faint_texts(page)[1] == []


@pytest.mark.slow
def test_explore_writes_a_page_and_gates(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(pathlib.Path(__file__).parent)
    page = tmp_path / "page.html"
    common = [
        "explore",
        "test_choice_pages:workload",
        "--target",
        "rtx-3090",
        "--compilations",
        "2",
    ]
    common += ["--keep", "batch"]
    assert cli.main([*common, "--budget", "25MiB", "-o", str(page)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("jaxmem.fit: fits: ") and f"wrote {page}" in printed.err
    data = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1]
    about = json.loads(data)
    assert about["name"] == common[1] and about["budget"] == 25 * 2**20
    hows = [point["how"] for point in about["points"]]
    assert "compiled" in hows and hows.count("projected") >= 10 and hows.count("one-liner") > 2
    plain = next(point for point in about["points"] if point["label"] == "as it is")
    liners = {one["label"]: one for one in about["points"] if one["how"] == "one-liner"}
    assert liners["everything_saveable"]["bytes"] == plain["bytes"]
    page.unlink()
    assert cli.main([*common, "--budget", "5MiB", "-o", str(page)]) == 3
    assert "Nothing fits the budget of 5.00 MiB" in capsys.readouterr().err
    assert page.read_text().startswith("<!doctype html>")
    assert cli.main([*common, "-o", "no/where.html"]) == 1
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_of_resnet50_is_small(path, monkeypatch, capsys):
    example = pathlib.Path(__file__).parents[1] / "examples" / "resnet50"
    monkeypatch.syspath_prepend(example)
    from model import ResNet
    from train import make_loss, plan_step

    _, (state, batch) = plan_step(200)
    given = (make_loss(ResNet()), optax.sgd(0.1, momentum=0.9), state.params, batch)
    options = {"model_state": state.model_state, "target": "rtx-2080-ti"}
    jaxmem.fit(*given, **options).fitting.to_html(path)
    assert path.stat().st_size < 3_000_000
