"""The operations of a program that nothing is planned inside of, with their derivatives."""

import dataclasses
from collections.abc import Callable

from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.forward_backward import ForwardBackward, trace_forward_backward
from jaxmem.jaxprs.operands import differentiable
from jaxmem.jaxprs.shardings import Shardings
from jaxmem.program.opaque import JointProgram
from jaxmem.program.operations import Program


class OpaqueOperations:
    """Those of one program: an equation that stands there several times is differentiated once.

    ``separate``: as of `trace_forward_backward`; ``reads`` reads a program that nothing is
    differentiated in.
    """

    def __init__(
        self,
        shards: Shardings,
        separate: bool,
        reads: Callable[[FlatJaxpr, Shardings], Program],
    ):
        self.shards, self.separate, self.reads = shards, separate, reads
        self._known: dict[tuple, tuple[ForwardBackward, JointProgram] | None] = {}

    def with_derivative(self, step: FlatStep, real: list[int]) -> JointProgram | None:
        """One and its derivative by some operands, as JAX has them; None: the derivative refuses,
        in words of its own, which who differentiates the function is told."""
        # An operand that is there twice has one gradient. On a mesh it matters where values lie.
        alike = [step.inputs.index(one) if isinstance(one, int) else -1 for one in step.inputs]
        where = step.inputs if self.shards.mesh is not None else ()
        key = id(step.equation), tuple(real), tuple(alike), where
        if key not in self._known:
            self._known[key] = self._differentiated(step, real)
        if (found := self._known[key]) is None:
            return None
        joint, both = found
        pairs = zip((*joint.operands, *joint.results), (*step.inputs, *step.outputs), strict=True)
        values = tuple((a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int))
        return dataclasses.replace(both, values=values)

    def _differentiated(
        self, step: FlatStep, real: list[int]
    ) -> tuple[ForwardBackward, JointProgram] | None:
        try:
            joint = trace_forward_backward(step, real, self.separate)
        except Exception:
            return None
        results = {value for value in joint.results if isinstance(value, int)}
        derived = {
            at: value
            for at, value in zip(real, joint.flat.outputs[len(joint.results) :], strict=True)
            if isinstance(value, int) and isinstance(step.inputs[at], int)
        }
        # One of a value, however often it is an operand.
        gradients = {step.inputs[at]: value for at, value in derived.items()}
        floating = differentiable([variable.aval for variable in step.equation.outvars])
        if step.primitive == "shard_map":
            inside = self.shards.mapped(step, joint.flat)
        else:
            # Gradients go on to where operands came from, and lie as they do.
            alike = {value: at for at, value in derived.items()}
            given = [*step.inputs, *(step.outputs[at] for at in floating)]
            inside = self.shards.inside(joint.flat, given, alike)
        # What is gathered of an operand is counted where the operation reads it.
        program = self.reads(joint.flat, dataclasses.replace(inside, reshards=()))
        return joint, JointProgram(
            program,
            joint.boundary,
            frozenset(joint.cotangents),
            frozenset(results),
            frozenset(gradients.values()),
            (),
        )
