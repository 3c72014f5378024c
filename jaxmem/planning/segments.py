"""Rows of regions as an author writes them: `jax.checkpoint` on stretches of the program's own
operations.

Regions of kernels end where kernels end: what XLA computes of a block in the kernel that reads it
is in the region of the next block, or in none, and a plan has barriers and derivatives of its own.
That takes fewer bytes mostly, and up to 14 % more where it does not suit. A segment has what its
block has, differentiated as JAX does: compiled, a row of them is what one line gives. (Convolutions
are saved wherever matmuls are.)
"""

import bisect
import dataclasses
from collections.abc import Mapping

from jaxmem.planning.layouts import Layout, Segment
from jaxmem.planning.per_block import (
    SMALL_BESIDE,
    Spans,
    in_kernels,
    last_read,
    operation_block_partitions,
    per_block_regions,
    policies,
)
from jaxmem.planning.rates import Rates
from jaxmem.planning.variants import Variant
from jaxmem.program import Program


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
    in_memory = {value for kernel in program.kernels for value in kernel.results}
    in_memory.update(range(program.input_count))
    for spans in dict.fromkeys([*tilings, *(_handing_on(program, one, last) for one in tilings)]):
        cut = variant
        if handed_on := _handed_on(program, spans, last) - in_memory:
            cut = Variant.plain(dataclasses.replace(program, handed_on=handed_on), rates)
        in_cut, kernels = in_kernels(cut.program, spans), in_kernels(program, spans)
        for saved, name in names.items():
            layout = cut.per_block_layout(in_cut, saved)
            found.append(
                dataclasses.replace(
                    layout,
                    regions=per_block_regions(program, kernels, saved),
                    peak_location=_location(cut.program, program, layout.peak_location),
                    segments=tuple(Segment(start, stop, name) for start, stop in spans),
                )
            )
    return found


def _handed_on(program: Program, spans: Spans, last: Mapping[int, int]) -> frozenset[int]:
    """What blocks read that is made before them: XLA has it in memory, as it is waited for before a
    block is computed again. And what the last one hands on."""
    read = (
        value
        for start, stop in spans
        for operation in program.operations[start:stop]
        for value in operation.inputs
        if value < program.operations[start].outputs[0]
    )
    start, stop = spans[-1]
    made = (value for one in program.operations[start:stop] for value in one.outputs)
    return frozenset([*read, *(value for value in made if last.get(value, -1) >= stop)])


def _location(cut: Program, program: Program, location: tuple[int, ...]) -> tuple[int, ...]:
    """The same in a program whose kernels end elsewhere: in the kernel that has the operation by
    which one ends."""
    kernel, *inside = location
    last = cut.kernels[kernel].operations[-1]
    found = bisect.bisect_left(program.kernels, last, key=lambda one: one.operations[-1])
    return min(found, len(program.kernels) - 1), *inside


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
    least = SMALL_BESIDE * max((program.sizes[value] for value in made), default=0)
    return max((at for v, at in made.items() if program.sizes[v] >= least), default=1)
