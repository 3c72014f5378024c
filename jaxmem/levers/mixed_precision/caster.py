"""Evaluates a program, traced in float32, with some values in a shorter dtype."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.mixed_precision.calls import CALLS
from jaxmem.levers.mixed_precision.dtypes import (
    among,
    cast_to,
    dtype_of,
    is_floating,
    is_scalar_shape,
)
from jaxmem.levers.mixed_precision.flags import Flags
from jaxmem.levers.mixed_precision.rules import SEPARATE
from jaxmem.program import precision_of


class Caster:
    """Evaluates flat jaxprs, traced in float32, with some values in the compute dtype."""

    def __init__(self, compute: np.dtype, rules: Mapping[str, str], recast: bool):
        self.compute, self.rules, self.recast = compute, rules, recast

    def run(
        self,
        flat: jaxprs.FlatJaxpr,
        inputs: Sequence[Any],
        stored: Sequence[bool],
        wide_outputs: bool = False,
    ) -> list[Any]:
        """The outputs, each in the dtype that it comes out in.

        ``stored`` tells which inputs are arguments of the whole function, in memory all along;
        ``wide_outputs`` that outputs are wanted in float32.
        """
        values = dict(enumerate(inputs))
        exact: dict[int, Any] = {}  # float32 values of what was rounded
        flags = Flags(flat, stored, self.compute)
        wide = self._read_in_float32(flat, flags, wide_outputs)
        for index, step in enumerate(flat.steps):
            operands = [jaxprs.read(values, operand) for operand in step.inputs]
            call = CALLS.get(step.primitive)
            kept = [among(i, flags.stored) for i in step.inputs]
            with jaxprs.context(step):  # its casts too
                inside = jaxprs.inside(step)
                if call is not None:
                    results = call(self.run, inside, operands, kept)
                else:
                    results = self._operation(inside, operands, flags, index in wide, exact)
            values.update(zip(step.outputs, results, strict=True))
        return [jaxprs.read(values, output) for output in flat.outputs]

    # ---- operations

    def _rule(self, step: jaxprs.FlatStep) -> str:
        name = step.primitive
        if name == "div" and is_scalar_shape(step.equation.invars[0].aval):
            return "float32"  # a reciprocal
        if name == "convert_element_type" and step.equation.params["new_dtype"] != np.float32:
            return "any"
        rule = self.rules.get(name, "traced")
        if rule != "compute":
            return rule
        if _is_exact(step):
            return "float32"
        return "follow" if _sums_nothing(step) else rule

    def _operation(self, step, operands, flags, wide: bool, exact: dict[int, Any]) -> list[Any]:
        rule = self._rule(step)
        traced = [dtype_of(variable.aval) for variable in step.equation.invars]
        floats = {dtype for dtype in traced if jax.numpy.issubdtype(dtype, np.inexact)}
        if rule == "any":
            return jaxprs.evaluate(step, operands)
        if floats != {np.dtype(np.float32)}:
            rule = "traced"
        if rule == "compute":
            return self._contraction(step, operands, flags)
        if rule == "traced":
            return jaxprs.evaluate(step, list(map(cast_to, operands, traced)))
        if step.primitive in SEPARATE:
            return jaxprs.evaluate(step, operands)
        follows = (
            rule == "follow"
            and not wide
            and all(dtype_of(operands[i]) == self.compute for i in flags.deciding(step))
        )
        one_number = map(flags.is_scalar, step.inputs)
        if follows and all(
            one or not np.ndim(x) or not is_floating(dtype_of(x)) or dtype_of(x) == self.compute
            for x, one in zip(operands, one_number, strict=True)
        ):
            changed = jaxprs.inner_in(step.equation, self.compute) | self._result(step)
            return jaxprs.evaluate(step, [cast_to(x, self.compute) for x in operands], **changed)
        results = jaxprs.evaluate(
            step,
            [
                cast_to(
                    exact.get(number, x) if isinstance(number, int) else x, np.dtype(np.float32)
                )
                for number, x in zip(step.inputs, operands, strict=True)
            ],
        )
        if not follows:
            return results
        # Statistics or parameters among them: what is of their kind reads the result unrounded.
        exact.update(zip(step.outputs, results, strict=True))
        return [cast_to(x, self.compute) for x in results]

    def _result(self, step) -> dict[str, Any]:
        """The dtype of a matmul's result, where it names one."""
        preferred = step.equation.params.get("preferred_element_type")
        return {} if preferred is None else {"preferred_element_type": self.compute}

    def _contraction(self, step, operands, flags) -> list[Any]:
        changed = self._result(step)

        def contract(*operands):
            return jaxprs.evaluate(step, [cast_to(x, self.compute) for x in operands], **changed)

        # Under a region of its own, only the cast is done again: the derivative of a contraction
        # reads its operands.
        kept = [among(i, flags.stored) for i in step.inputs]
        if not self.recast or not any(kept):
            return contract(*(cast_to(x, self.compute) for x in operands))
        given = [x if k else cast_to(x, self.compute) for x, k in zip(operands, kept, strict=True)]
        return jax.checkpoint(contract)(*given)

    def _read_in_float32(self, flat: jaxprs.FlatJaxpr, flags, wide_outputs: bool) -> set[int]:
        """The steps that follow their operands and that only float32 operations read."""
        float32: set[int] = set()
        for step in flat.steps:
            rule = self._rule(step)
            decides = flags.deciding(step) if rule == "follow" else []
            if rule == "float32" or any(among(step.inputs[i], float32) for i in decides):
                float32.update(step.outputs)
        others: set[int] = set()
        if not wide_outputs:
            others.update(value for value in flat.outputs if isinstance(value, int))
        wide = set()
        for index, step in reversed(list(enumerate(flat.steps))):
            rule = self._rule(step)
            reads_wide = rule == "float32" or (
                rule == "follow"
                and not float32.isdisjoint(step.outputs)
                and step.primitive not in SEPARATE
            )
            if rule == "follow" and others.isdisjoint(step.outputs):
                wide.add(index)
                reads_wide = step.primitive not in SEPARATE
            if not reads_wide:
                others.update(step.uses)
        return wide


def _sums_nothing(step: jaxprs.FlatStep) -> bool:
    """Whether a matmul or a convolution is a product of each with each, such as the angles of
    rotary embeddings: no faster in the shorter dtype, in which positions above 256 are no more told
    apart. One that sums along an axis of one element is one too."""
    parameters = step.equation.params
    left, right = (variable.aval.shape for variable in step.equation.invars[:2])
    if step.primitive == "conv_general_dilated":
        _, *summed = parameters["dimension_numbers"].rhs_spec
        return all(right[axis] == 1 for axis in summed)
    numbers = parameters.get("dimension_numbers")
    if step.primitive == "ragged_dot_general":
        numbers = parameters["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (axes, _), _ = numbers
    return all(left[axis] == 1 for axis in axes)


def _is_exact(step: jaxprs.FlatStep) -> bool:
    """Whether its author asks for exact products, here and not everywhere."""
    everywhere = jax.config.jax_default_matmul_precision in ("highest", "float32")
    return not everywhere and precision_of(step.equation.params) == "highest"
