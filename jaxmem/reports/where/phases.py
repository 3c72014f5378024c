"""The phase of a step that an instruction belongs to, from its name stack and what it reads.

``recompute`` under ``rematted_computation`` in a transpose, or made by XLA's own
rematerialization; ``backward`` under ``transpose(jvp(...))``; ``loss`` and ``forward`` under
``jvp(...)``; outside of both ``update`` where it is computed from a gradient or optimizer state
(``backward`` where it adds gradients of microbatches), else ``forward``. Arguments are ``state`` or
``batch``.
"""

import functools

from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.loss import CompiledLoss, before_gradients
from jaxmem.reports.where.makers import Makers
from jaxmem.reports.where.names import UNATTRIBUTED, adds_slices
from jaxmem.reports.where.program import CompiledProgram
from jaxmem.reports.xla.flow import Node

PHASES = ("state", "batch", "forward", "loss", "backward", "recompute", "update")


def phase_of_argument(argument: Argument | None) -> str:
    return "batch" if argument and argument.kind == "batch" else "state"


class Phases:
    """The phases of the instructions of a program."""

    def __init__(self, program: CompiledProgram, makers: Makers):
        self._program = program
        self._module = program.module
        self._makers = makers
        self._loss = CompiledLoss(program)
        # Remembered for as long as this object lives, not the process.
        self.of = functools.cache(self._phase)

    def _phase(self, name: str) -> str:
        """The phase of an instruction by name."""
        annotated = self._makers.annotated(self._module.instructions[name])
        stack = annotated.stack
        if self._program.is_argument(annotated):
            return phase_of_argument(self._program.argument_of(annotated))
        if not stack:
            return UNATTRIBUTED
        if ".remat" in name or ("transpose(" in stack and "rematted_computation" in stack):
            return "recompute"
        if "transpose(" in stack:
            return "backward"
        if "jvp(" not in stack and (name, -1) in self._after_gradients:
            return "backward" if adds_slices(self._module.frames(annotated.frame)) else "update"
        return "loss" if annotated in self._loss else "forward"

    @functools.cached_property
    def _after_gradients(self) -> set[Node]:
        """What is computed from a gradient or from optimizer state."""
        return self._program.flow.computed_from(
            name
            for name, instruction in self._module.instructions.items()
            if not before_gradients(instruction)
            or self._program.kind_of_argument(instruction) == "optimizer state"
        )
