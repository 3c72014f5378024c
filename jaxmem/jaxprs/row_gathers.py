"""Gathers of one element of each row, written as such.

``logits[jnp.arange(len(labels)), labels]`` and `jnp.diagonal` gather single elements, by pairs of
numbers; that the first of each pair is the row shows in the numbers alone. `jnp.take_along_axis`
says so in the gather, and its derivative need not scatter (`jaxmem.program.derivatives.picking`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep

# Numbers of rows that are computed to see whether they are in order. Chosen: those of any batch of
# sequences are fewer, and larger arrays cost time and memory of the host.
_MOST_ROWS = 2**24


def _iota(parameters: Mapping[str, Any]) -> np.ndarray:
    shape, along = parameters["shape"], parameters["dimension"]
    numbers = np.arange(shape[along], dtype=parameters["dtype"])
    return np.broadcast_to(numbers.reshape(_row(shape, along)), shape)


def _broadcast(parameters: Mapping[str, Any], operand: np.ndarray) -> np.ndarray:
    lengths = dict(zip(parameters["broadcast_dimensions"], operand.shape, strict=True))
    inner = [lengths.get(at, 1) for at in range(len(parameters["shape"]))]
    return np.broadcast_to(operand.reshape(inner), parameters["shape"])


# What numbers of rows are computed by.
_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": lambda _, *operands: np.add(*operands),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda parameters, x: x.astype(parameters["new_dtype"]),
    "ge": lambda _, *operands: np.greater_equal(*operands),
    "iota": _iota,
    "lt": lambda _, *operands: np.less(*operands),
    "mul": lambda _, *operands: np.multiply(*operands),
    "reshape": lambda parameters, x: x.reshape(parameters["new_sizes"]),
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
    "squeeze": lambda parameters, x: x.squeeze(parameters["dimensions"]),
    "sub": lambda _, *operands: np.subtract(*operands),
}


def as_row_gathers(flat: FlatJaxpr) -> FlatJaxpr:
    """A flat jaxpr whose gathers of one element of each row say so."""
    names = {step.primitive for step in flat.steps}
    if not {"gather", "concatenate"} <= names:
        return flat
    makers = flat.makers()
    steps = tuple(
        _row_gather(flat, makers, step) or step if step.primitive == "gather" else step
        for step in flat.steps
    )
    return dataclasses.replace(flat, steps=steps)


def _row_gather(flat: FlatJaxpr, makers: Mapping[int, FlatStep], step: FlatStep) -> FlatStep | None:
    """A gather by pairs (triples, ...) of numbers, of which all but one are those of the rows, as
    one by that one; None: it is something else."""
    operand, indices = step.inputs
    parameters = step.equation.params
    numbers, shape = parameters["dimension_numbers"], flat.aval(operand).shape
    axes = tuple(range(len(shape)))
    pairs = makers.get(indices) if isinstance(indices, int) else None
    if (
        pairs is None
        or pairs.primitive != "concatenate"
        or numbers.collapsed_slice_dims != axes
        or numbers.start_index_map != axes
        or len(pairs.inputs) != len(axes)
        or pairs.equation.params["dimension"] != len(flat.aval(indices).shape) - 1
    ):
        return None
    lengths = flat.aval(indices).shape[:-1]
    if len(lengths) != len(axes) - 1 or not 0 < math.prod(lengths) <= _MOST_ROWS:
        return None
    picked = _picked_column(flat, makers, pairs.inputs, lengths)
    if picked is None or shape[:picked] + shape[picked + 1 :] != lengths:
        return None
    others = axes[:picked] + axes[picked + 1 :]
    by_row = jax.lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(picked,),
        start_index_map=(picked,),
        operand_batching_dims=others,
        start_indices_batching_dims=tuple(range(len(lengths))),
    )
    equation = step.equation.replace(
        invars=[step.equation.invars[0], pairs.equation.invars[picked]],
        params={**parameters, "dimension_numbers": by_row},
    )
    return dataclasses.replace(step, equation=equation, inputs=(operand, pairs.inputs[picked]))


def _picked_column(
    flat: FlatJaxpr,
    makers: Mapping[int, FlatStep],
    columns: Sequence[Any],
    lengths: tuple[int, ...],
) -> int | None:
    """The one of some columns of numbers that the others, which count the rows in order, leave: the
    last that may be it."""
    for picked in reversed(range(len(columns))):
        others = [*columns[:picked], *columns[picked + 1 :]]
        if all(
            _counts(_known(flat, makers, column), lengths, axis)
            for axis, column in enumerate(others)
        ):
            return picked
    return None


def _counts(values: np.ndarray | None, lengths: tuple[int, ...], axis: int) -> bool:
    """Whether an array has the numbers along an axis."""
    if values is None or values.shape != (*lengths, 1):
        return False
    return bool((values[..., 0] == np.arange(lengths[axis]).reshape(_row(lengths, axis))).all())


def _known(flat: FlatJaxpr, makers: Mapping[int, FlatStep], value: Any) -> np.ndarray | None:
    """What a value is in every call; None: not known."""
    if not isinstance(value, int):
        return np.asarray(value.val)
    if value < len(flat.consts):
        constant = flat.consts[value]
        return None if isinstance(constant, jax.core.Tracer) else np.asarray(constant)
    step = makers.get(value)
    if step is None or math.prod(flat.aval(value).shape) > _MOST_ROWS:
        return None
    operation = _OPERATIONS.get(step.primitive)
    if operation is None:
        return None
    operands = [_known(flat, makers, one) for one in step.inputs]
    if any(one is None for one in operands):
        return None
    return operation(step.equation.params, *operands)


def _row(shape: Sequence[int], along: int) -> list[int]:
    """The shape of a row along an axis, to be broadcast to a shape."""
    return [length if at == along else 1 for at, length in enumerate(shape)]
