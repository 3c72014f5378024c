"""Barriers that part what a plan runs one after the other.

Without them XLA may leave gradients of parameters for later, on several devices most of all, and
hold what they are made from until then.
"""

from typing import Any

from jaxmem import jaxprs
from jaxmem.planning import Loop, Region
from jaxmem.program import Program, has_loop, parameters_as_read


def stretch_reads(program: Program, stretch: Region) -> list[int]:
    """The values that some kernels one after the other read, and do not make."""
    kernels = program.kernels[stretch.start : stretch.stop]
    made = {value for kernel in kernels for value in kernel.results}
    return sorted({value for kernel in kernels for value in kernel.sources} - made)


def tied_values(program: Program, stretch: Region, reads: list[int]) -> list[int]:
    """The parameters that the matmuls of a region, or of the kernels behind one, read, as they read
    them, and the latest value of those: the backward pass goes on from their cotangents once all
    are there.

    Not where there are convolutions: a barrier among their cotangents costs copies, since XLA
    chooses the layouts on both sides of it apart, and more than it spares.
    """
    kernels = program.kernels[stretch.start : stretch.stop]
    names = {program.operations[index].name for k in kernels for index in k.operations}
    if "dot_general" not in names or "conv_general_dilated" in names:
        return []
    active = [value for value in reads if program.active[value]]
    parameters = [value for value in active if value in parameters_as_read(program)]
    latest = max(active, key=lambda value: program.made[value], default=-1)
    return [*parameters, latest] if parameters and latest not in parameters else []


def part_passes(program: Program, stop: int, values: dict[int, Any]) -> None:
    """Parts a loop among the kernels before ``stop`` from those after it, in the backward pass
    too."""
    parted = [
        v for v in values
        if program.active[v] and program.made[v] <= stop < program.last_used[v]
    ]  # fmt: skip
    passed = jaxprs.barrier([jaxprs.as_array(values[value]) for value in parted])
    passed = jaxprs.cotangent_barrier(passed)
    values.update(zip(parted, passed, strict=True))


def is_parted(program: Program, number: int, loop: Loop | None) -> bool:
    """Whether a barrier parts a loop, or what has one inside, from what comes after it."""
    kept = program.kernels[number].residuals is not None and has_loop(program.operation_of(number))
    return kept and (loop is None or loop.parted)
