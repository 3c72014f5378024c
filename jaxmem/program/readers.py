"""Who reads a value, operations and their derivatives; and what is read."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.program.costs import CONTRACTIONS

# Times smaller than a result: next to nothing beside it, in memory or not. Chosen
# (benchmarks/planner/sensitivity.py).
SMALL = 16
SUMS = frozenset({"add", "add_any"})
SLICES = frozenset({"slice", "dynamic_slice"})
CUTS = SLICES | {"split"}
LOOPS = frozenset({"scan", "while"})
# What shows another value, and is where that is.
_VIEW_LIKE = frozenset(
    """
    bitcast_convert_type copy copy_p expand_dims mesh_cast name optimization_barrier pvary reshape
    reshard row_major sharding_constraint squeeze stop_gradient
    """.split()
)
# Their derivatives compare the rows with the result.
_COMPARED = frozenset("reduce_max reduce_min".split())


def readers_of(program: Any) -> Counter[int]:
    """How many operations and derivatives read each value."""
    readers = Counter(program.outputs)
    reached = set(program.outputs)  # by a cotangent
    for operation in reversed(program.operations):
        readers.update(operation.inputs)
        if operation.derivative_reads == "flat" or reached.isdisjoint(operation.outputs):
            continue
        active = {value for value in operation.inputs if program.active[value]}
        if not active:
            continue
        reached |= active
        readers.update(read_by_derivative(operation, program.active))
        if operation.name in _COMPARED:
            readers.update(operation.outputs)
    return readers


def read_by_derivative(operation: Any, active: list[bool]) -> tuple[int, ...]:
    """The operands and results that an operation's derivative reads, as JAX keeps them: of a
    product with what has no cotangent (frozen parameters, a mask), that alone."""
    if operation.reads is not None:
        return tuple(operation.reads)
    inputs = operation.inputs
    how = operation.derivative_reads
    if how in ("nothing", "flat"):
        return ()
    if how == "result":
        return operation.outputs
    if how == "indices":
        return inputs[1:]
    if how == "places":
        return inputs[2:]
    if how == "predicate":
        return inputs[:1]
    if how == "divisor":
        return inputs[1:] + inputs[:1] * active[inputs[1]]
    if how == "other":
        one, other = inputs
        return (other,) * active[one] + (one,) * active[other]
    return inputs


def parameters_as_read(program: Any) -> frozenset[int]:
    """The inputs, and what is cast, turned or gathered of them alone: parameters, as matmuls read
    them."""
    if "parameters" not in program.cache:
        found = set(range(program.input_count))
        for kernel in program.kernels:
            if (kernel.fused or kernel.sent_bytes) and found.issuperset(kernel.sources):
                found.update(kernel.results)
        program.cache["parameters"] = frozenset(found)
    return program.cache["parameters"]


def has_loop(operation: Any) -> bool:
    """Whether it is a loop, or it or its derivative has one inside."""
    if operation.name in LOOPS:
        return True
    inside = operation.body, operation.joint and operation.joint.program
    return any(has_loop(one) for program in inside if program for one in program.operations)


def dtype_of(program: Any, value: int) -> str:
    """The name of a value's dtype; empty where a program has none."""
    return program.types[value].partition("[")[0] if program.types else ""


def shape_of(program: Any, value: int) -> tuple[int, ...]:
    """The lengths of a value's axes."""
    return tuple(map(int, re.findall(r"\d+", program.types[value].partition("[")[2])))


def is_matmul(operation: Any) -> bool:
    """Whether it is one, and none that is fused as a sum of products."""
    return operation.name == "dot_general" and not operation.fused


def is_view(operation: Any) -> bool:
    """Whether it shows its operand as it is, in another shape."""
    return operation.name in _VIEW_LIKE and len(operation.inputs) == 1 == len(operation.outputs)


def views_of(program: Any) -> Iterator[tuple[int, int]]:
    """What is shown, and what shows it; the last view first."""
    for operation in reversed(program.operations):
        if is_view(operation):
            yield operation.inputs[0], operation.outputs[0]


def read_by_contractions(program: Any) -> list[bool]:
    """For each value whether a matmul or a convolution reads it."""
    read = [False] * len(program.sizes)
    for operation in program.operations:
        if operation.name in CONTRACTIONS:
            for value in operation.inputs:
                read[value] = True
    for shown, view in views_of(program):
        read[shown] |= read[view]
    return read


def concatenations(program: Any) -> Iterator[int]:
    """What is put together of several arrays, or of one again and again (`jnp.repeat`, `jnp.tile`:
    a broadcast in another shape), or padded."""
    repeated: set[int] = set()
    for operation in program.operations:
        inputs, outputs, sizes = operation.inputs, operation.outputs, program.sizes
        if operation.name == "broadcast_in_dim" and inputs:
            repeated.update(one for one in outputs if sizes[inputs[0]] * SMALL >= sizes[one])
        again = operation.name == "reshape" and not repeated.isdisjoint(inputs)
        if again or operation.name in ("concatenate", "pad"):
            yield from outputs


def reads_few_elements(operation: Any, sizes: Sequence[int]) -> bool:
    """Whether it takes few elements of its operand, which alone are computed for it."""
    if operation.name != "gather":
        return False
    return sizes[operation.outputs[0]] * SMALL < sizes[operation.inputs[0]]


def scatters_few_elements(operation: Any, sizes: Sequence[int]) -> bool:
    """Whether it scatters in its derivative, and takes few elements of its operand: those alone are
    computed for it."""
    scatters = not operation.fused and operation.derivative_reads != "nothing"
    return scatters and reads_few_elements(operation, sizes)


def shared_cotangents(program: Any, sizes: Sequence[int]) -> set[int]:
    """The values whose cotangents add up, in what one of their readers scatters into, before they
    go on to what the values are made of. Not of what JAX derives several times."""
    read = Counter(value for one in program.operations for value in one.inputs)
    scattered = {one.inputs[0] for one in program.operations if scatters_few_elements(one, sizes)}
    apart = {v for one in program.operations if one.source.merged for v in one.outputs}
    return {value for value in scattered if read[value] > 1} - apart


def gathers_repeatedly(program: Any, operation: Any) -> bool:
    """Whether an operation gathers more than there is: elements that it takes several times."""
    if operation.name != "gather":
        return False
    sizes = program.unsharded.sizes
    return sizes[operation.outputs[0]] > sizes[operation.inputs[0]]
