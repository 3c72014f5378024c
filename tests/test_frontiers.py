"""Frontiers: plans and one-liners are compared at the same bytes, in the pictures too."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from programs import array

import jaxmem
from benchmarks.page import best_within, curves

DEPTH, WIDTH = 8, 256


def loss(params, x):
    for number, w in enumerate(params):
        with jax.named_scope(f"Net/Block_{number}"):
            x = jnp.tanh(jnp.tanh(x @ w) @ w.T)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def frontier():
    return jaxmem.pareto(loss, [array(WIDTH, WIDTH)] * DEPTH, array(2048, WIDTH), points=4)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a frontier; returns its axes, and all its texts with the figure's box."""

    def draw(frontier, dark=False):
        kept = []

        def keep(figure, path):
            FigureCanvasAgg(figure).draw()
            kept.append(figure)

        monkeypatch.setattr(Figure, "savefig", keep)
        frontier.plot(tmp_path / "plot.png", budget="25MiB", dark=dark)
        return kept[0]

    return draw


def test_a_plan_is_made_for_the_bytes_of_each_one_liner(frontier):
    """So that no one-liner is better than what is drawn at its bytes."""
    assert len(frontier.baseline_policies) > 2
    for _, size, seconds in frontier.baseline_policies:
        fitting = [plan for plan in frontier.plans if plan.projected_bytes <= size]
        assert min(plan.predicted.recompute_seconds for plan in fitting) <= seconds


def test_plans_that_are_as_fast_within_the_error_are_told(frontier):
    assert "are as fast as the first one" not in str(frontier)  # unchecked: nobody knows
    for error, count in [(1e-6, 1), (10.0, len(frontier.plans))]:
        plans = tuple(
            dataclasses.replace(
                plan, planned_for=dataclasses.replace(plan.planned_for, time_error=error)
            )
            for plan in frontier.plans
        )
        text = str(dataclasses.replace(frontier, plans=plans))
        least = jaxmem.format_bytes(plans[-1].projected_bytes)
        told = f"{count} plans, down to {least}, are as fast as the first one within ±1000%"
        assert (told in text) == (count > 1)


def test_the_best_one_liner_at_the_bytes_of_every_plan(frontier, drawn):
    lines = {line.get_label(): line for line in drawn(frontier).axes[0].lines}
    best = lines["the best of these policies in the same bytes"]
    sizes, shares = (list(data) for data in best.get_data())
    assert shares == sorted(shares, reverse=True) and best.get_drawstyle() == "steps-post"
    least = min(size for _, size, _ in frontier.baseline_policies)
    for plan in frontier.plans:
        assert (plan.projected_bytes / 2**20 in sizes) == (plan.projected_bytes >= least)


@pytest.mark.parametrize("dark", [False, True])
def test_no_text_of_the_picture_is_cut(frontier, drawn, dark):
    figure = drawn(frontier, dark)
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()  # of what is seen
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_one_liners_that_are_one_program_are_one_mark(frontier, drawn):
    axes = drawn(frontier).axes[0]
    places = [tuple(map(tuple, line.get_data())) for line in axes.lines if line.get_marker() == "x"]
    assert len(places) == len(set(places)) < len(frontier.baseline_policies)


def test_the_best_within_bytes():
    points = [(9.0, 1.1), (5.0, 1.2), (12.0, 1.15), (15.0, 1.0)]
    assert best_within(points, 20.0) == ([5.0, 9.0, 12.0, 15.0, 20.0], [1.2, 1.1, 1.1, 1.0, 1.0])


def test_rivals_of_a_benchmark_are_drawn_at_the_same_bytes():
    rows = [
        {"step": "plain", "bytes": "10 GiB", "FLOPs": "1.0x"},
        {"step": "jaxmem, 50%", "bytes": "5 GiB", "FLOPs": "1.1x"},
        {"step": "`dots`", "bytes": "8 GiB", "FLOPs": "1.2x"},
    ]

    def line(row):
        return "" if row["step"] == "`dots`" else "jaxmem"

    figure = curves("a title", rows, lambda row: "net", line, lambda row: row["step"], "bytes")
    (axes,) = figure.axes
    steps = [one for one in axes.lines if one.get_drawstyle() == "steps-post"]
    assert [list(one.get_xdata()) for one in steps] == [[5, 10, 10], [8, 10, 10]]
    assert [list(one.get_ydata()) for one in steps] == [[1.1, 1, 1], [1.2, 1, 1]]
