"""The predicted time as a picture."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem

pytest.importorskip("matplotlib")


def loss(w, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)


@pytest.fixture(scope="module")
def report():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(8, 1024, 1024), (4096, 1024)]]
    return jaxmem.memory(jax.value_and_grad(loss), *shapes, target="h200")


@pytest.fixture
def figure(report, monkeypatch, tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: kept.append(figure))
    report.plot(tmp_path / "time.png", kind="time")
    FigureCanvasAgg(kept[0]).draw()
    return kept[0]


def test_the_time_is_drawn_with_its_units(report, tmp_path):
    light, dark, png = (tmp_path / name for name in ("light.svg", "dark.svg", "time.png"))
    report.plot(light, kind="time")
    text = light.read_text()
    ms = f"{1e3 * report.time.seconds:.4g}"
    assert f"{ms} ms a step on h200, predicted (unchecked)" in text
    for word in ("time since the step began (ms)", "predicted time (ms)", "by phase", "by module"):
        assert word in text
    assert all(word in text for word in ("forward", "backward", "arithmetic", "limited by"))
    report.plot(dark, kind="time", dark=True)
    assert "#1f2023" in dark.read_text() and "#1f2023" not in text
    report.plot(png, kind="time")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_bars_are_the_times(report, figure):
    top, middle, below = figure.axes
    assert top.get_xlim() == pytest.approx((0, 1e3 * report.time.seconds))
    for axes in (middle, below):
        total = sum(bar.get_width() for bar in axes.patches)
        assert total == pytest.approx(1e3 * report.time.seconds)
    names = [label.get_text() for label in middle.get_yticklabels()][::-1]
    shown = [name for name in names if not name.startswith("(")]
    phases = [name for name in report.time.by_phase if not name.startswith("(")]
    assert shown == phases[: len(shown)]


def test_no_text_of_the_picture_is_cut(figure):
    whole = figure.bbox
    for axes in figure.axes:
        texts = [*axes.texts, *axes.get_yticklabels(), *axes.get_xticklabels(), axes.title]
        for text in filter(lambda text: text.get_text(), texts):
            box = text.get_window_extent()
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1, text.get_text()


def test_what_cannot_be_drawn_is_told(report, tmp_path):
    with pytest.raises(jaxmem.JaxmemError, match="drawn with kind='memory' or 'time'; got 'x'"):
        report.plot(tmp_path / "time.png", kind="x")
    with pytest.raises(jaxmem.JaxmemError, match="written as .png, .svg, .pdf; got"):
        report.plot(tmp_path / "time.x", kind="time")
    local = jaxmem.memory(jnp.sin, jnp.ones(8, "float32"), target="local")
    with pytest.raises(jaxmem.JaxmemError, match="rates of cpu are not known"):
        local.plot(tmp_path / "time.png", kind="time")
