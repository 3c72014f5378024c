"""What matmuls compute as they read.

By `Rules.fuses_elements` XLA computes in the kernel of a matmul what its operand is made of,
element by element, as long as that reads no more than it makes: a `relu`, a `sin`, a product with a
constant or with a parameter that is broadcast, but not a `gelu`, which reads its operand several
times (its GemmFusion; tests/test_operands.py).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxmem.program.readers import SMALL, dtype_of

# In float64 (before jax 0.12) and in whole numbers XLA multiplies otherwise.
_DTYPES = frozenset("bfloat16 float16 float32".split())
_ALONE = frozenset(
    """
    abs add ceil convert_element_type copy cos cosh div erf erf_inv erfc exp exp2 expm1 floor log
    log1p logistic max min mul neg rsqrt sign sin sinh sqrt sub tan tanh
    """.split()
)


def made_in_matmuls(program: Any, reduces: Callable[[Any], bool]) -> list[int]:
    """For each value the one that a matmul reads for it: itself, or what it computes it of."""
    sizes = program.sizes
    read = list(range(len(sizes)))
    if not program.types:
        return read
    # Of the program's own inputs, what is small, and what broadcasts one.
    given = [value < program.input_count and not program.in_loop for value in read]
    broadcast = [False] * len(sizes)
    bounded = [False] * len(sizes)
    for operation in program.operations:
        if operation.name == "broadcast_in_dim":
            broadcast[operation.outputs[0]] = all(given[value] for value in operation.inputs)
            continue
        name = _name(operation)
        if name not in _ALONE or not operation.fused or reduces(operation):
            continue
        if len(operation.outputs) != 1:  # a rule of the user's that returns its operand too, say
            continue
        (result,) = operation.outputs
        read_whole = [value for value in operation.inputs if not broadcast[value]]
        wide = [
            value
            for value in read_whole
            if not (given[value] and sizes[value] * SMALL < sizes[result])
        ]
        if len(wide) != 1 or sizes[wide[0]] > sizes[result]:
            continue
        if sizes[wide[0]] * SMALL < sizes[result]:
            continue  # what is spread out to all rows of a matmul, by another that is
        if not has_matmul_dtype(program, (*wide, result)):
            continue
        # A bound below and one above are one operation to XLA, which matmuls do not compute.
        bounds = name in ("max", "min")
        if not (bounds and bounded[wide[0]]):
            bounded[result] = bounds
            read[result] = read[wide[0]]
    return read


def spread_factors(program: Any, operation: Any, sources: Collection[int]) -> dict[int, int]:
    """By the result of a kernel that multiplies two arrays, each spread out to it, its bytes: the
    matmul that makes its cotangent multiplies that with one of them, written as large as it is. XLA
    has none in a matmul that would read it as small as it was (tests/test_operands.py). Of other
    kernels: nothing."""
    if operation.name != "mul" or not program.rules.fuses_elements:
        return {}
    (result,), sizes = operation.outputs, program.sizes
    if not program.active[result]:
        return {}
    # A parameter, small beside it, is read by the matmul itself.
    large = [one for one in sources if sizes[one] * SMALL >= sizes[result]]
    is_spread = len(sources) > 1 and all(2 * sizes[one] <= sizes[result] for one in sources)
    return {result: sizes[result]} if is_spread and large else {}


def _name(operation: Any) -> str:
    """Of the only elementwise operation that there is inside of a call, or of what is no call."""
    inside = [name for name in operation.source.calls if name not in ("jit", "pjit")]
    return (inside[0] if len(inside) == 1 else "") if operation.source.calls else operation.name


def has_matmul_dtype(program: Any, values: Sequence[int]) -> bool:
    """Whether values have dtypes that XLA multiplies in kernels of its own."""
    return all(dtype_of(program, value) in _DTYPES for value in values)
