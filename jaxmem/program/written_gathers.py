"""What is made of several gathers, element by element, and in memory for that.

XLA computes a gather in each kernel that reads it, of an array that is smaller than what it takes
of it. It counts as much as it makes: two gathers that three operations read (of a `leaky_relu` the
comparison, the product and the choice; a `relu` and its derivative are two) take as long so as
written once and read, unless the array stays in the cache. So their sum is in memory, if a
reduction reads what becomes of it, or a derivative. Otherwise a mask of it is, a byte an element,
which is read and kept. Found with graph attention and messages of four layers
(tests/test_graphs.py).
"""

import collections
from collections.abc import Callable
from typing import Any

from jaxmem.program.readers import dtype_of, gathers_repeatedly, read_by_derivative


def written_gathers(program: Any, reduces: Callable[[Any], bool]) -> frozenset[int]:
    """The values that are written so; ``reduces`` says of an operation whether it makes little of
    much."""
    cycles, sizes = program.rules.cycles, program.sizes
    if cycles is None or not any(gathers_repeatedly(program, one) for one in program.operations):
        return frozenset()
    readers: collections.Counter[int] = collections.Counter()
    seen: collections.Counter[tuple] = collections.Counter()  # XLA computes a comparison once
    derived: set[int] = set()
    for operation in program.operations:
        readers.update(set(operation.inputs))
        seen[operation.name, operation.inputs] += 1
        if any(program.active[value] for value in operation.outputs):
            derived.update(read_by_derivative(operation, program.active))
    reduced = [False] * len(sizes)
    for operation in reversed(program.operations):
        reducing = reduces(operation)
        passes = operation.fused and any(reduced[value] for value in operation.outputs)
        for value in operation.inputs:
            kept = sizes[operation.outputs[0]] >= sizes[value]
            reduced[value] |= reducing or (passes and kept)
    made_of: dict[int, frozenset[int]] = {}
    cached: dict[int, bool] = {}  # gathers
    written = set()
    for operation in program.operations:
        if operation.fused and gathers_repeatedly(program, operation):
            (result,), given = operation.outputs, operation.inputs[0]
            made_of[result] = frozenset([result])
            cached[result] = sizes[given] <= cycles.cached_bytes
        elif operation.fused and not reduces(operation):
            read = frozenset().union(*(made_of.get(v, ()) for v in operation.inputs))
            for value in operation.outputs:
                times = readers[value] + (value in derived)
                if dtype_of(program, value) == "bool":
                    alone = seen[operation.name, operation.inputs] == 1
                    is_written = len(read) > 1 and times == 2 and alone
                else:
                    is_written = len(read) > 1 and times > 2 and not any(map(cached.get, read))
                    is_written &= reduced[value] or value in derived
                if is_written:
                    written.add(value)
                else:
                    made_of[value] = read
    return frozenset(written)
