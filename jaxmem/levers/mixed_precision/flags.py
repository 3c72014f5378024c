"""What is known of the values of a program before it is cast."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.mixed_precision.dtypes import among, dtype_of, is_floating, is_scalar_shape
from jaxmem.levers.mixed_precision.rules import LAYOUT


class Flags:
    """Which values are arguments, in memory all along, and which take others' dtypes."""

    def __init__(self, flat: jaxprs.FlatJaxpr, stored: Sequence[bool], compute: np.dtype):
        self._largest = float(jnp.finfo(compute).max)
        self.stored = {number for number, flag in enumerate(stored) if flag}
        self._scalars = {number for number, aval in enumerate(flat.avals) if is_scalar_shape(aval)}
        self._grown: set[int] = set()
        for number in self.stored:
            if len(flat.avals[number].shape) == 1:
                self._grown.add(number)  # a bias, perhaps
        for step in flat.steps:
            first = step.inputs[0] if step.inputs else None
            if step.primitive in LAYOUT:
                for kind in (self.stored, self._grown):
                    if among(first, kind):
                        kind.update(step.outputs)
            if step.primitive == "broadcast_in_dim":
                if self.is_scalar(first):
                    self._scalars.update(step.outputs)
                if step.equation.invars[0].aval.size < step.equation.outvars[0].aval.size:
                    self._grown.update(step.outputs)

    def is_scalar(self, operand) -> bool:
        """Whether an operand is one number, or many times the same, that the dtype can hold."""
        if isinstance(operand, int):
            return operand in self._scalars
        if np.ndim(operand.val) or not is_floating(dtype_of(operand.val)):
            return False
        value = abs(float(operand.val))
        return value <= self._largest or not np.isfinite(value)

    def deciding(self, step: jaxprs.FlatStep) -> list[int]:
        """Which operands an operation follows: those of its result's size that were not broadcast
        (as a bias is, or the mean and scale of a norm), or else all but scalars, or else all."""
        avals = [variable.aval for variable in step.equation.invars]
        size = max((variable.aval.size for variable in step.equation.outvars), default=0)
        floats = [i for i, aval in enumerate(avals) if is_floating(dtype_of(aval))]
        arrays = [i for i in floats if not self.is_scalar(step.inputs[i])]
        full = [
            i for i in arrays if avals[i].size >= size and not among(step.inputs[i], self._grown)
        ]
        return full or arrays or floats
