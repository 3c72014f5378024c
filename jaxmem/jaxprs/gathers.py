"""Gathers whose numbers are known, written as what they are.

``logits[jnp.arange(len(labels)), labels]`` and `jnp.diagonal` gather single elements, by pairs of
numbers; that the first of each pair is the row shows in the numbers alone. `jnp.take_along_axis`
says so in the gather, and its derivative need not scatter (`jaxmem.program.derivatives.picking`).
Nearest neighbours of an image twice as large (`jax.image.resize`) are each element again and again:
a broadcast, whose derivative is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxmem.jaxprs.equations import in_place_of
from jaxmem.jaxprs.flat import FlatStep

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

# Numbers that are computed to see what they are. Chosen: those of the rows of any batch of
# sequences are fewer, and larger arrays cost time and memory of the host.
_MOST_NUMBERS = 2**24


def _iota(parameters: Mapping[str, Any]) -> np.ndarray:
    shape, along = parameters["shape"], parameters["dimension"]
    numbers = np.arange(shape[along], dtype=parameters["dtype"])
    return np.broadcast_to(numbers.reshape(_row(shape, along)), shape)


def _broadcast(parameters: Mapping[str, Any], operand: np.ndarray) -> np.ndarray:
    lengths = dict(zip(parameters["broadcast_dimensions"], operand.shape, strict=True))
    inner = [lengths.get(at, 1) for at in range(len(parameters["shape"]))]
    return np.broadcast_to(operand.reshape(inner), parameters["shape"])


# What numbers are computed by.
_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": lambda _, *operands: np.add(*operands),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda parameters, x: x.astype(parameters["new_dtype"]),
    "div": lambda _, x, y: (x / y if x.dtype.kind == "f" else np.trunc(x / y)).astype(x.dtype),
    "floor": lambda _, x: np.floor(x),
    "ge": lambda _, *operands: np.greater_equal(*operands),
    "iota": _iota,
    "lt": lambda _, *operands: np.less(*operands),
    "mul": lambda _, *operands: np.multiply(*operands),
    "reshape": lambda parameters, x: x.reshape(parameters["new_sizes"]),
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
    "squeeze": lambda parameters, x: x.squeeze(parameters["dimensions"]),
    "sub": lambda _, *operands: np.subtract(*operands),
}


class Numbers(NamedTuple):
    """What is known of numbered values: the constants, which come first, types, and what made the
    others so far."""

    consts: tuple[Any, ...]
    avals: Sequence[Any]
    makers: Mapping[int, FlatStep]

    def known(self, value: Any) -> np.ndarray | None:
        """What a value is in every call; None: not known."""
        aval = self.avals[value] if isinstance(value, int) else value.aval
        if math.prod(aval.shape) > _MOST_NUMBERS:
            return None
        if not isinstance(value, int) or value < len(self.consts):
            constant = self.consts[value] if isinstance(value, int) else value.val
            if isinstance(constant, jax.core.Tracer):
                return None
            is_known = getattr(constant, "is_fully_addressable", True)  # on this host
            return np.asarray(constant) if is_known else None
        step = self.makers.get(value)
        operation = step and _OPERATIONS.get(step.primitive)
        if not step or not operation:
            return None
        operands = [self.known(one) for one in step.inputs]
        if any(one is None for one in operands):
            return None
        return operation(step.equation.params, *operands)


def plainer_gather(
    equation: JaxprEqn, inputs: Sequence[Any], numbers: Numbers
) -> tuple[ClosedJaxpr, list[Any]] | None:
    """What a gather is, and what that takes; None: nothing else."""
    if equation.primitive.name != "gather" or _is_spread(equation.invars[0].aval):
        return None
    found = _repeated(equation, inputs, numbers) or _of_rows(equation, inputs, numbers)
    if found is None:
        return None
    fun, inputs, avals = found
    return in_place_of(equation, fun, avals), inputs


def _is_spread(aval: Any) -> bool:
    """Whether its type says how it is spread over devices."""
    return any(aval.sharding.spec) or bool(getattr(aval, "vma", None))


_Plainer = tuple[Callable[..., Any], list[Any], list[Any]]


def _repeated(equation: JaxprEqn, inputs: Sequence[Any], numbers: Numbers) -> _Plainer | None:
    """Each slice along an axis so many times, one after the other."""
    operand, indices = (variable.aval for variable in equation.invars)
    how, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if how.operand_batching_dims or len(how.start_index_map) != 1 or indices.ndim != 2:
        return None
    (axis,) = how.start_index_map
    length, wanted = operand.shape[axis], indices.shape[0]
    whole = [1 if at == axis else n for at, n in enumerate(operand.shape)]
    others = tuple(at for at in range(operand.ndim) if at != axis)
    if how.collapsed_slice_dims != (axis,) or how.offset_dims != others or list(sizes) != whole:
        return None
    times = wanted // max(length, 1)
    if times < 2 or wanted != times * length:
        return None
    found = numbers.known(inputs[1])
    if found is None or not (found[:, 0] == np.arange(wanted) // times).all():
        return None

    def repeated(operand):
        shape = (*operand.shape[: axis + 1], times, *operand.shape[axis + 1 :])
        again = jax.lax.broadcast_in_dim(
            operand, shape, [at + (at > axis) for at in range(operand.ndim)]
        )
        return jax.lax.reshape(again, equation.outvars[0].aval.shape)

    return repeated, [inputs[0]], [operand]


def _of_rows(equation: JaxprEqn, inputs: Sequence[Any], numbers: Numbers) -> _Plainer | None:
    """One element of each row, where all of the numbers but one count the rows."""
    operand, indices = (variable.aval for variable in equation.invars)
    parameters = equation.params
    how, axes = parameters["dimension_numbers"], tuple(range(operand.ndim))
    pairs = numbers.makers.get(inputs[1]) if isinstance(inputs[1], int) else None
    lengths = indices.shape[:-1]
    if (
        pairs is None
        or pairs.primitive != "concatenate"
        or how.collapsed_slice_dims != axes
        or how.start_index_map != axes
        or len(pairs.inputs) != len(axes)
        or pairs.equation.params["dimension"] != len(lengths)
        or len(lengths) != len(axes) - 1
        or not 0 < math.prod(lengths) <= _MOST_NUMBERS
    ):
        return None
    picked = _picked_column([*map(numbers.known, pairs.inputs)], lengths)
    if picked is None or operand.shape[:picked] + operand.shape[picked + 1 :] != lengths:
        return None
    by_row = jax.lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(picked,),
        start_index_map=(picked,),
        operand_batching_dims=axes[:picked] + axes[picked + 1 :],
        start_indices_batching_dims=tuple(range(len(lengths))),
    )

    def taken(operand, column):
        return equation.primitive.bind(
            operand, column, **{**parameters, "dimension_numbers": by_row}
        )

    column = pairs.equation.invars[picked].aval
    return taken, [inputs[0], pairs.inputs[picked]], [operand, column]


def _picked_column(columns: Sequence[np.ndarray | None], lengths: tuple[int, ...]) -> int | None:
    """The one of some columns of numbers that the others, which count the rows in order, leave: the
    last that may be it."""
    for picked in reversed(range(len(columns))):
        others = [*columns[:picked], *columns[picked + 1 :]]
        if all(_counts(column, lengths, axis) for axis, column in enumerate(others)):
            return picked
    return None


def _counts(values: np.ndarray | None, lengths: tuple[int, ...], axis: int) -> bool:
    """Whether an array has the numbers along an axis."""
    if values is None or values.shape != (*lengths, 1):
        return False
    return bool((values[..., 0] == np.arange(lengths[axis]).reshape(_row(lengths, axis))).all())


def _row(shape: Sequence[int], along: int) -> list[int]:
    """The shape of a row along an axis, to be broadcast to a shape."""
    return [length if at == along else 1 for at, length in enumerate(shape)]
