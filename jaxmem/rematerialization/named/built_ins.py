"""What JAX's own policies keep of a program with regions, and which of that has no name."""

from collections.abc import Iterator

from jaxmem.planning import RegionProgram
from jaxmem.program import CONTRACTIONS, NAMED, Kernel, Program

# Beside them `nothing_saveable`, which is every name recomputed.
BUILT_INS = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def kept_by(name: str, place: RegionProgram) -> tuple[dict[int, frozenset[int]], tuple[str, ...]]:
    """By id of each place the values that a policy keeps there, and the lines of what of them has
    no name, each once."""
    values: dict[int, frozenset[int]] = {}
    lines: dict[str, None] = {}
    for one, _ in place.all():
        program, named = one.program, frozenset().union(*one.groups)
        kept = set()
        for kernel in _in_regions(one):
            for value in _kept(name, program, kernel):
                holder = _named_after(one, value, named)
                if holder is None:
                    operation = program.operations[kernel.operations[-1]]
                    lines[operation.line] = None
                else:
                    kept.add(holder)
        values[id(one)] = frozenset(kept)
    return values, tuple(lines)


def _in_regions(place: RegionProgram) -> Iterator[Kernel]:
    for start, stop in place.spans:
        yield from place.program.kernels[start:stop]


def _kept(name: str, program: Program, kernel: Kernel) -> Iterator[int]:
    if kernel.sent_bytes:
        return
    operation = program.operations[kernel.operations[-1]]
    if name == "everything_saveable":
        read = _read(program)
        yield from (v for v in kernel.results if v in read and v != kernel.residuals)
        return
    without_batch = operation.name == "dot_general" and not operation.contraction.batched
    if without_batch or (name == "dots_saveable" and operation.name in CONTRACTIONS):
        yield from kernel.results


def _read(program: Program) -> set[int]:
    """The values that some derivative reads."""
    return {
        value
        for kernel in program.kernels
        if any(program.active[result] for result in kernel.results)
        for value in kernel.reads
    }


def _named_after(place: RegionProgram, value: int, named: frozenset[int]) -> int | None:
    """The named value that is kept for another: itself, or what is made of it alone before anything
    else reads it (a cast of a matmul's result); None: it has no name."""
    if value in named:
        return value
    readers = [kernel for kernel in place.program.kernels if value in kernel.sources]
    if len(readers) != 1 or not readers[0].fused:
        return None
    last = place.program.operations[readers[0].operations[-1]]
    (result, *_) = readers[0].results
    large = place.program.sizes[result] <= place.program.sizes[value]
    return result if last.name == NAMED and large and result in named else None
