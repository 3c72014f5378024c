"""Numbers that are known in both traces: constants, and what is calculated from them.

The divisor of a mean is such a number. It is ``examples`` times another number in one trace and in
the other, and that is its growth.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import BatchInvariant, Kind, NotProved
from jaxmem.levers.batch.independence.operation import BatchOperation

_ARITHMETIC: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "neg": np.negative, "sqrt": np.sqrt, "abs": np.abs, "exp": np.exp,
    "log": np.log, "square": np.square, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip
_SAME_NUMBERS = frozenset(
    """
    broadcast_in_dim convert_element_type copy expand_dims optimization_barrier reduce_precision
    reshape sharding_constraint slice squeeze stop_gradient transpose
    """.split()
)


def constant(one: Any, two: Any) -> Kind:
    """Of a constant of the program, in both traces."""
    if one is two:
        number = _number(one)
        return BatchInvariant(value=None if number is None else (number, number))
    if any(map(jaxprs.is_opaque, (one, two))):
        return NotProved("it closes over a value of the trace that is another for a slice")
    numbers = _number(one), _number(two)
    if None not in numbers:
        return _valued(*numbers)
    if np.shape(one) == np.shape(two) and np.array_equal(np.asarray(one), np.asarray(two)):
        return BatchInvariant()
    return NotProved("a constant of it depends on the size of the batch")


def calculated(op: BatchOperation) -> BatchInvariant | None:
    """Of an operation on known numbers, where its result is one too."""
    values = [kind.value for kind in op.kinds]
    if not values or None in values or len(op.results) != 1:
        return None
    if any(kind.uses_rng or kind.uses_model_state for kind in op.kinds):
        return None
    dtype = op.steps[0].equation.outvars[0].aval.dtype
    if jnp.issubdtype(dtype, jnp.unsignedinteger) or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    numbers = [_result(op, which, [value[which] for value in values], dtype) for which in (0, 1)]
    return None if None in numbers else _valued(*numbers)


def _result(op: BatchOperation, which: int, given: list[Any], dtype: Any) -> Any:
    """The number in one of the traces; None: it is not known."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    if op.name in _SAME_NUMBERS:
        number = given[0]
    elif op.name == "reduce_sum":
        shape, axes = op.shapes[0][which], op.params["axes"]
        number = given[0] * math.prod(shape[axis] for axis in axes)
    elif op.name == "integer_pow":
        number = given[0] ** op.params["y"]
    elif op.name == "div" and given[1] != 0:
        number = given[0] / given[1]
    elif op.name in _ARITHMETIC and not (op.name in ("and", "or", "not") and dtype != np.bool_):
        with np.errstate(all="ignore"):
            number = _ARITHMETIC[op.name](*given).item()
    else:
        return None
    return int(number) if integer else number


def _valued(one: Any, two: Any) -> BatchInvariant:
    """Of one known number in each trace."""
    if one == two or (one != one and two != two):  # NaN too
        return BatchInvariant(value=(one, two))
    return BatchInvariant(growth=float(one / two) if two and one else math.nan, value=(one, two))


def _number(value: Any) -> Any:
    """A constant that is one number, as Python has it; None: it is none."""
    if jaxprs.is_opaque(value) or np.ndim(value) != 0:
        return None
    number = np.asarray(value).item()
    if isinstance(number, complex) and not number.imag:
        return number.real
    return number if isinstance(number, bool | int | float) else None
