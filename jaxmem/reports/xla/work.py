"""The FLOPs of a compiled program, from optimised HLO.

What XLA itself recomputes or removes shows here, unlike in a jaxpr.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.xla.attention import attention_of
from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import (
    CALLED,
    LABELS,
    TARGET,
    Lines,
    dimensions_of,
    operands_of,
    operation_of,
    window_of,
)
from jaxmem.reports.xla.run import sum_over_execution
from jaxmem.targets import computed_by

_CONTRACTIONS = ("dot", "convolution", "custom-call")
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"(\d+)"')
_COMPLEX = re.compile(r"\(?c\d+\[")


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of matmuls and convolutions (a multiply-add counts 2), and how many there are. Of a
    Pallas kernel the FLOPs are those of its ``cost_estimate``; without one, none are known.
    A complex product counts the four real ones that it is. ``uncounted`` are loops of which it is
    not known how often they run: they count one turn."""

    flops: int = 0
    convolutions: int = 0
    matmuls: int = 0
    uncounted: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.convolutions + other.convolutions,
            self.matmuls + other.matmuls,
            self.uncounted + other.uncounted,
        )

    def __mul__(self, times: int) -> "Work":
        flops, convolutions = self.flops * times, self.convolutions * times
        return Work(flops, convolutions, self.matmuls * times, self.uncounted)


def count_work(hlo: str) -> Work:
    """The matmuls and convolutions of one run of a compiled program.

    A loop counts its body once per iteration where it counts to a known number, else once, and is
    one of those ``uncounted``; a conditional counts its dearest branch.

    Raises:
        JaxmemError: the text has no entry computation.
    """
    computations = computations_of(hlo)

    def own(line: str, lines: Lines) -> Work:
        return sum((work for _, _, work in contractions(line, lines, computations)), Work())

    def once(turn: Work) -> Work:
        return dataclasses.replace(turn, uncounted=turn.uncounted + 1)

    return sum_over_execution(
        hlo, own, Work(), lambda sums: max(sums, key=lambda work: work.flops), once
    )


def contractions(
    line: str, computation: Lines, computations: Mapping[str, Lines]
) -> Iterator[tuple[str, Lines, Work]]:
    """The matmuls and convolutions of an instruction or of the fusion that it is, each as its
    right-hand side, its computation and its work. What a reduction or a sort applies holds none."""
    operation = operation_of(line)
    if operation == "fusion":
        for called in CALLED.findall(line):
            for inner in computations[called].values():
                yield from contractions(inner, computations[called], computations)
    elif operation in _CONTRACTIONS:
        work = _work_of(line, computation)
        if work != Work():
            yield line, computation, work


def _work_of(line: str, computation: Lines) -> Work:
    """Work of an instruction itself, given as its right-hand side, without what it calls."""
    operation = operation_of(line)
    if operation == "dot":
        return Work(_dot_flops(line, computation, r"lhs_contracting_dims=\{([\d,]*)\}"), matmuls=1)
    if operation == "convolution":
        return Work(_convolution_flops(line, computation), convolutions=1)
    if operation != "custom-call":
        return Work()
    called = TARGET.search(line)
    kind = computed_by(called[1] if called else "")
    if kind == "dot":
        contracted = r'"lhs_contracting_dimensions":\["?([\d,"]*)\]'
        return Work(_dot_flops(line, computation, contracted), matmuls=1)
    if kind == "attention":
        attention = attention_of(line, computation)
        return Work(attention.flops, matmuls=attention.matmuls)
    if kind:
        return Work(_convolution_flops(line, computation, kind), convolutions=1)
    estimate = _ESTIMATE.search(line)
    return Work(int(estimate[1])) if estimate else Work()


def _dot_flops(line: str, computation: Lines, contracted: str) -> int:
    match = re.search(contracted, line)
    axes = re.findall(r"\d+", match[1]) if match else []
    lhs = dimensions_of(computation[operands_of(line)[0]])
    parts = 4 if _COMPLEX.match(line) else 1
    return 2 * parts * math.prod(dimensions_of(line)) * math.prod(lhs[int(axis)] for axis in axes)


def _convolution_flops(line: str, computation: Lines, kind: str = "") -> int:
    """Taps per output feature times outputs of the forward convolution, whichever of its three
    forms this is: labels are always those of the forward one."""
    labels = LABELS.search(line)
    if labels is None:
        raise JaxmemError(f"A convolution without dim_labels in the HLO: {line[:200]}")
    operands = [dimensions_of(computation[name]) for name in operands_of(line)[:2]]
    result = dimensions_of(line)
    if kind == "gradient of the input":
        output, kernel = operands
    elif kind == "gradient of the kernel":
        output, kernel = operands[1], result
    else:
        output, kernel = result, operands[1]
    if not kind:
        return 2 * _pairs(line, labels, operands[0], kernel, result)
    taps = math.prod(kernel) // max(kernel[labels[2].index("o")], 1)
    return 2 * math.prod(output) * taps


def _pairs(
    line: str, labels: re.Match, lhs: list[int], kernel: list[int], result: list[int]
) -> int:
    """Products of a convolution, zeros of the padding among them: each tap meets each place in the
    result, or each element of the operand where those are fewer, as in a derivative. A batched
    matmul, which some compilers make a convolution with strides over elements that lie apart, has
    only the taps that fall on one: hardly any does."""
    window = window_of(line)
    spatial = [at for at, label in enumerate(labels[3]) if label.isdecimal()]
    products = math.prod(result[at] for at in range(len(result)) if at not in spatial)
    products *= kernel[labels[2].index("i")]

    def of(name: str, axis: int, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    for at in spatial:
        label = labels[3][at]
        axis = int(label)
        low = int(of("pad", axis, "0_0").split("_")[0])
        stride, apart, between = (
            int(of(name, axis, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate")
        )
        taps, elements = kernel[labels[2].index(label)], lhs[labels[1].index(label)]
        if stride == 1 or between == 1:
            products *= min(result[at], elements) * taps
            continue
        places = np.arange(result[at])[:, None] * stride - low
        found = places + np.arange(taps)[None, :] * apart
        last = (elements - 1) * between
        products *= int(np.sum((found >= 0) & (found <= last) & (found % between == 0)))
    return products
