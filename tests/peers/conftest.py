"""`jaxmem.remat` under several planners. Two of them are for tests: they place regions in however
small a program, so that no test compares a plain function with itself."""

import functools

import pytest

import jaxmem
from jaxmem.planning import PLANNERS, Layout, Loop, Region


class EveryKernel:
    """A region round every kernel but the last, and round the body of every scan."""

    def __init__(self, program, rates):
        self.plain = Layout((), (), 0, (0,), {}, 0, 0, 0.0, 0.0, 0)
        self.regions = tuple(Region(k, k + 1) for k in range(len(program.kernels) - 1))
        self.loops = tuple(map(Loop, program.scans))

    def frugal(self):
        return Layout(self.regions, self.loops, 0, (0,), {}, 0, 0, 0.0, 0.0, 0)


class Nested(EveryKernel):
    """One region round everything, with those of `EveryKernel` in it."""

    def __init__(self, program, rates):
        super().__init__(program, rates)
        if program.kernels:
            self.regions = (Region(0, len(program.kernels), (), self.regions),)


@pytest.fixture(params=["dp", "every_kernel", "nested"])
def remat(request, monkeypatch):
    """`jaxmem.remat` by one planner."""
    monkeypatch.setitem(PLANNERS, "every_kernel", EveryKernel)
    monkeypatch.setitem(PLANNERS, "nested", Nested)
    return functools.partial(jaxmem.remat, planner=request.param)
