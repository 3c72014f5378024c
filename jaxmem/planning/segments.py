"""Rows of regions as an author writes them: `jax.checkpoint` on stretches of the program's own
operations.

Regions of kernels end where kernels end: what XLA computes of a block in the kernel that reads it
is in the region of the next block, or in none, and a plan has barriers and derivatives of its own.
That takes fewer bytes mostly, and up to 14 % more where it does not suit. A segment has what its
block has, differentiated as JAX does: compiled, a row of them is what one line gives. (Convolutions
are saved wherever matmuls are.)
"""

import dataclasses
from collections.abc import Mapping

from jaxmem.planning.layouts import Layout, Segment
from jaxmem.planning.per_block import (
    Spans,
    in_kernels,
    last_read,
    operation_block_partitions,
    policies,
)
from jaxmem.planning.rates import Rates
from jaxmem.planning.variants import Variant
from jaxmem.program import Program

# Of the bytes of the largest value that a block hands on: what takes less is beside it, such as
# what a head adds to a loss. Chosen: half and twice change no row of 26 programs, those of
# tests/test_segments.py among them.
_SMALL_HEAD = 1 / 16


def per_block_segments(program: Program, rates: Rates) -> list[Layout]:
    """For each way to see a program as a row of blocks, one `jax.checkpoint` on each, by one policy
    after the other; and the same on as much of each as makes what it hands on."""
    program = program.as_written
    variant = Variant.plain(program, rates)
    # Of policies that save the same the last one saves convolutions by JAX's rules too.
    names = {saved: name for name, saved in policies(variant.program).items()}
    if any(kind.startswith("complex") for kind in program.types):
        names = {}  # JAX rounds what a region saves, and cannot do it to complex numbers
    names[frozenset()] = "nothing_saveable"
    tilings = operation_block_partitions(variant.program, variant.prices)
    found = []
    last = last_read(program)
    for spans in dict.fromkeys([*tilings, *(_handing_on(program, one, last) for one in tilings)]):
        kernels = in_kernels(program, spans)
        for saved, name in names.items():
            layout = variant.per_block_layout(kernels, saved)
            segments = tuple(Segment(start, stop, name) for start, stop in spans)
            found.append(dataclasses.replace(layout, segments=segments))
    return found


def _handing_on(program: Program, spans: Spans, last: Mapping[int, int]) -> Spans:
    """Blocks up to where all is made that they hand on but what is small: without the head of each
    layer, say. (The last one hands on what its head makes: it is as long as others like it.)"""
    needed = [_needed(program, *span, last) for span in spans]
    lengths = [stop - start for start, stop in spans]
    shortest = dict(sorted(zip(lengths, needed, strict=True), reverse=True))
    return tuple((start, start + shortest[stop - start]) for start, stop in spans)


def _needed(program: Program, start: int, stop: int, last: Mapping[int, int]) -> int:
    """How many operations of a block make all that it hands on but what is small."""
    made = {
        value: number
        for number, operation in enumerate(program.operations[start:stop], 1)
        for value in operation.outputs
        if last.get(value, -1) >= stop
    }
    least = _SMALL_HEAD * max((program.sizes[value] for value in made), default=0)
    return max((at for v, at in made.items() if program.sizes[v] >= least), default=1)
