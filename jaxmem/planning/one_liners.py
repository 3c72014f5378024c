"""What the usual policies cost: `jax.checkpoint` on every block of the model."""

import itertools

from jaxmem.planning.dp import Layout, Variant
from jaxmem.planning.loops import loop_options
from jaxmem.planning.rates import Rates
from jaxmem.planning.regions import Region
from jaxmem.program import Program


def one_liners(program: Program, rates: Rates) -> dict[str, Layout]:
    """The layouts of everything saved, and of nothing and of matmuls and convolutions saved on
    every block. A block is a stretch of kernels whose module path starts with the same two parts
    (``ResNet/Block_3``); a program without module paths has none."""
    program = program.as_written
    plain = [loop_options(program, scan, rates)[0] for scan in program.scans]
    variant = Variant(program, rates, plain)
    kernels = variant.program.kernels

    def block(number: int) -> str:
        path = program.operations[kernels[number].operations[-1]].path.split("/")
        return "/".join(path[:2]) if len(path) > 2 else ""

    spans = []
    for name, group in itertools.groupby(range(len(kernels)), block):
        numbers = list(group)
        if name:
            spans.append((numbers[0], numbers[-1] + 1))
    found = {"everything_saveable": variant.layout(())}
    if spans:
        found["nothing_saveable on every block"] = variant.layout(
            tuple(Region(start, stop) for start, stop in spans)
        )
        found["dots and convolutions saveable on every block"] = variant.layout(
            tuple(
                Region(start, stop, tuple(v for k in kernels[start:stop] if k.flops
                                          for v in k.results if v != k.residuals))
                for start, stop in spans
            )
        )  # fmt: skip
    return found
