"""A compiled step as attribution reads it: instructions, how values flow, the user's arguments."""

from collections.abc import Sequence

from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.xla.flow import Flow
from jaxmem.reports.xla.instructions import Instruction, Module


class CompiledProgram:
    """A compiled module and the arguments that it kept, by parameter number."""

    def __init__(self, module: Module, arguments: Sequence[Argument | None]):
        self.module = module
        self.flow = Flow(module)
        self._arguments = arguments

    def argument(self, number: int | None) -> Argument | None:
        """The argument of a parameter number; None where there is none, or it is not known."""
        if number is None or number >= len(self._arguments):
            return None
        return self._arguments[number]

    def is_argument(self, instruction: Instruction) -> bool:
        """Whether an instruction is a parameter of the entry computation."""
        return instruction.opcode == "parameter" and instruction.computation == self.module.entry

    def argument_of(self, instruction: Instruction) -> Argument | None:
        """The argument that an instruction is, if it is one."""
        return self.argument(instruction.index) if self.is_argument(instruction) else None

    def kind_of_argument(self, instruction: Instruction) -> str | None:
        """What an argument is (parameters, batch, ...); None for other instructions."""
        argument = self.argument_of(instruction)
        return argument.kind if argument else None
