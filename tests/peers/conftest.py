"""`jaxmem.remat` under a planner for tests, which places regions in however small a program, so
that no test compares a plain function with itself; in `make fuzz` under "dp" too."""

import functools
import os
import pathlib

import pytest

import jaxmem
from jaxmem.planning import PLANNERS, Layout, Loop, Region
from jaxmem.planning.simulation import LiveBytes


def _layout(regions, loops):
    """A layout of no bytes and no seconds."""
    return Layout(regions, loops, 0, (0,), {}, 0, 0, 0.0, 0.0, (), LiveBytes([0], 0))


class Everywhere:
    """One region round everything, in it one round every kernel but the last, and one round the
    body of every scan."""

    def __init__(self, program, rates):
        self.plain = _layout((), ())
        self.loops = tuple(map(Loop, program.scans))
        count = len(program.kernels)
        inner = tuple(Region(kernel, kernel + 1) for kernel in range(count - 1))
        self.regions = (Region(0, count, (), inner),) if count else ()

    def minimum_at_one_forward(self):
        return _layout(self.regions, self.loops)


PLANNER_NAMES = ["everywhere", "dp"] if "JAXMEM_FUZZ" in os.environ else ["everywhere"]


@pytest.fixture(params=PLANNER_NAMES)
def remat(request, monkeypatch):
    """`jaxmem.remat` by one planner."""
    monkeypatch.setitem(PLANNERS, "everywhere", Everywhere)
    return functools.partial(jaxmem.remat, planner=request.param)


def pytest_collection_modifyitems(items):
    """They are heavy: `make test-all` runs them."""
    folder = pathlib.Path(__file__).parent
    for item in items:
        if folder in item.path.parents and item.path.name != "test_readme.py":
            item.add_marker(pytest.mark.slow)
