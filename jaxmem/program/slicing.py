"""Which part of a traced computation can be done piece by piece along leading axes.

An optimizer's update of one parameter is nearly always elementwise, and quantization by blocks of
rows almost is. What treats the indices of the leading axes independently of each other can be done
for a few of them at a time, so that a large or stacked array is never expanded, or fetched, whole.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs

ELEMENTWISE = frozenset(
    """
    abs acos add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz
    convert_element_type copy copy_p cos cosh div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge
    gt integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg
    nextafter not one_minus_square or population_count pow real reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh
    sqrt square stop_gradient sub tan tanh xor
    """.split()
)
REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split()
)


@dataclasses.dataclass(frozen=True)
class Slicing:
    """How some results are computed for a part of their leading axes.

    Attributes:
        lead: lengths of the axes that are cut.
        steps: what is done for each piece, in order.
        sliced: values of which each piece takes its part.
        whole: values that each piece takes as they are.
    """

    lead: tuple[int, ...]
    steps: tuple[jaxprs.FlatStep, ...]
    sliced: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def constrained(self) -> bool:
        """Whether it says how arrays lie on a mesh (and so, that it does not cut there)."""
        return any(step.primitive == "sharding_constraint" for step in self.steps)

    def run(self, values: dict[int, Any], start: Sequence[Any], lengths: tuple[int, ...]) -> None:
        """One piece: from the parts of ``sliced`` and all of ``whole`` in ``values``, by number,
        to its part of the results, in ``values`` too."""
        for step in self.steps:
            operands = [jaxprs.read(values, operand) for operand in step.inputs]
            changed = _resized(step, lengths)
            cut = len(lengths)
            if step.primitive == "iota" and step.equation.params["dimension"] < cut:
                at = step.equation.params["dimension"]
                (result,) = jaxprs.evaluate(step, operands, **changed)
                results = [result + jnp.asarray(start[at], result.dtype)]
            else:
                results = jaxprs.evaluate(step, operands, **changed)
            values.update(zip(step.outputs, results, strict=True))


def find(
    flat: jaxprs.FlatJaxpr,
    wanted: Sequence[int],
    axes: int,
    known: Callable[[int], bool],
    must_slice: Callable[[int], bool],
) -> Slicing | None:
    """The slicing of some results along their first ``axes``; None: they do not allow it.

    Args:
        flat: the computation.
        wanted: numbers of the results, all with the same leading axes.
        axes: how many of them to cut.
        known: whether a value is there already, whole.
        must_slice: whether a value may not be computed whole.
    """
    lead = flat.avals[wanted[0]].shape[:axes]
    if any(flat.avals[value].shape[:axes] != lead for value in wanted):
        return None
    parts: set[int] = set(wanted)
    wholes: set[int] = set()
    sliced: list[int] = []
    steps: list[jaxprs.FlatStep] = []
    for step in reversed(flat.steps):
        made = [value for value in step.outputs if value in parts]
        if not made:
            continue
        demands = None if any(map(known, made)) else _demands(step, flat, lead)
        if demands is None:
            if any(map(must_slice, made)):
                return None
            sliced += made
            continue
        steps.append(step)
        for operand, part in zip(step.inputs, demands, strict=True):
            if isinstance(operand, int):
                (parts if part else wholes).add(operand)
    sliced += [value for value in parts if value < flat.input_count]
    if any(map(must_slice, wholes)):
        return None
    return Slicing(lead, tuple(reversed(steps)), tuple(sliced), tuple(wholes))


def _demands(
    step: jaxprs.FlatStep, flat: jaxprs.FlatJaxpr, lead: tuple[int, ...]
) -> list[bool] | None:
    """For each operand, whether a piece of the result takes a piece of it (True) or all of it;
    None: a piece of the result takes other pieces."""
    name, params, cut = step.primitive, step.equation.params, len(lead)
    shapes = [_shape(operand, flat) for operand in step.inputs]
    if len(step.outputs) != 1 or flat.avals[step.outputs[0]].shape[:cut] != lead:
        return None
    if name in ELEMENTWISE:
        if name == "sharding_constraint" and any(jaxprs.spec_of(params["sharding"])[:cut]):
            return None
        if not all(shape == () or shape[:cut] == lead for shape in shapes):
            return None
        return [shape != () for shape in shapes]
    if name == "iota":
        return []
    if name == "broadcast_in_dim" and len(shapes) == 1:
        axes = params["broadcast_dimensions"]
        if all(axis >= cut for axis in axes):
            return [False]
        return (
            [True] if tuple(axes[:cut]) == tuple(range(cut)) and shapes[0][:cut] == lead else None
        )
    if not shapes or shapes[0][:cut] != lead:
        return None
    fine = (
        (name == "reshape" and params["dimensions"] is None)
        or (name in REDUCTIONS and min(params["axes"], default=cut) >= cut)
        or (name == "squeeze" and min(params["dimensions"], default=cut) >= cut)
        or (name == "transpose" and params["permutation"][:cut] == tuple(range(cut)))
        or (name == "slice" and params["limit_indices"][:cut] == lead and not _strided(params, cut))
        or (name == "pad" and not any(map(any, params["padding_config"][:cut])))
    )
    if name == "concatenate" and params["dimension"] >= cut:
        return [True] * len(shapes)
    return [True] + [False] * (len(shapes) - 1) if fine else None


def _resized(step: jaxprs.FlatStep, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The parameters of an equation that name the cut axes."""
    names = {
        "broadcast_in_dim": "shape",
        "iota": "shape",
        "reshape": "new_sizes",
        "slice": "limit_indices",
    }
    name = names.get(step.primitive)
    if name is None:
        return {}
    return {name: (*lengths, *step.equation.params[name][len(lengths) :])}


def _strided(params: dict[str, Any], cut: int) -> bool:
    strides = params["strides"] or ()
    return any(params["start_indices"][:cut]) or any(stride != 1 for stride in strides[:cut])


def _shape(operand: Any, flat: jaxprs.FlatJaxpr) -> tuple[int, ...]:
    aval = flat.avals[operand] if isinstance(operand, int) else operand.aval
    return tuple(aval.shape)


def pieces(shape: tuple[int, ...], size: int, limit: int) -> tuple[int, int]:
    """How many leading axes to cut, and the length of a piece along the last of them, for pieces
    of at most ``limit`` of the ``size`` bytes of an array; of one index each before it."""
    for axes in range(1, len(shape) + 1):
        each = size // math.prod(shape[:axes])
        if each <= limit or axes == len(shape):
            most = max(1, limit // max(each, 1))
            count = math.ceil(shape[axes - 1] / most)
            return axes, math.ceil(shape[axes - 1] / count)
    raise ValueError(shape)


def take(array: Any, start: Sequence[Any], lengths: tuple[int, ...]) -> Any:
    """A piece of an array."""
    rest = array.shape[len(lengths) :]
    return jax.lax.dynamic_slice(array, (*start, *[0] * len(rest)), (*lengths, *rest))


def put(array: Any, piece: Any, start: Sequence[Any]) -> Any:
    """The array with a piece replaced."""
    return jax.lax.dynamic_update_slice(array, piece, (*start, *[0] * (array.ndim - len(start))))
