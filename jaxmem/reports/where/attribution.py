"""Who made a value of the compiled program: operation, the user's line, module, phase, kind."""

import dataclasses
from collections.abc import Sequence

from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.where.kinds import kind_of
from jaxmem.reports.where.makers import Element, Makers
from jaxmem.reports.where.names import (
    UNATTRIBUTED,
    classes_and_function,
    modules_of,
    operation_of,
    source_of,
)
from jaxmem.reports.where.phases import PHASES, Phases, phase_of_argument
from jaxmem.reports.where.program import CompiledProgram
from jaxmem.reports.where.readers import Readers
from jaxmem.reports.xla.dump import Allocation, Value
from jaxmem.reports.xla.instructions import Instruction, Module

_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-")


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from; texts are `UNATTRIBUTED` where it is not known."""

    operation: str
    source: str
    module: str
    phase: str
    kind: str


def unknown(kind: str, phase: str = UNATTRIBUTED) -> Origin:
    """The origin of what nothing more is known of."""
    return Origin(UNATTRIBUTED, UNATTRIBUTED, UNATTRIBUTED, phase, kind)


class Attribution:
    """Answers for one compiled program; ``arguments`` are those it kept, by parameter number."""

    def __init__(self, module: Module, arguments: Sequence[Argument | None]):
        self._module = module
        self._program = CompiledProgram(module, arguments)
        self._makers = Makers(self._program)
        self._readers = Readers(self._program)
        self._phases = Phases(self._program, self._makers)
        paths = [modules_of(one.stack) for one in module.instructions.values()]
        roots = {path[0] for path in paths if len(path) > 1}
        self._root = roots.pop() if len(roots) == 1 else ""
        self._children = {path[1] for path in paths if len(path) > 1}

    def origin(self, value: Value, allocation: Allocation) -> Origin:
        """The origin of a value that lies in an allocation."""
        made = self._module.instructions.get(value.instruction)
        if made is None:
            return unknown("temporaries")
        passed = self._program.argument(allocation.parameter)
        if passed and self._program.is_argument(made):
            return self._of_argument(passed, "argument")
        if passed and allocation.live_out and self._readers.is_result(made.name, value.index):
            operation = operation_of(self._makers.annotated(made, value.index))
            return dataclasses.replace(self._of_argument(passed, operation), phase="update")
        made, index = self._makers.maker(made, value.index)
        if made.opcode.startswith(_COLLECTIVES):
            return self._of_collective(made, index, value)
        annotated = self._makers.annotated(made, index)
        argument = self._program.argument_of(annotated)
        if argument:  # copied as it is, or in another layout
            return self._of_argument(argument, "copy of an argument")
        phase = self._phases.of(annotated.name)
        kind = kind_of(made, value, phase, self._read_in(made, value))
        if allocation.role == "output":
            kind = "outputs"
        annotated = self._makers.stored(made, index) or annotated
        return self._of_instruction(made, annotated, operation_of(annotated), phase, kind)

    def phase(self, instruction: str) -> str:
        """The phase of an instruction of the schedule."""
        known = instruction in self._module.instructions
        return self._phases.of(instruction) if known else UNATTRIBUTED

    def is_argument(self, instruction: str) -> bool:
        """Whether nothing runs there."""
        made = self._module.instructions.get(instruction)
        return made is not None and made.opcode == "parameter"

    def describe(self, instruction: str) -> Origin:
        """Where an instruction of the schedule comes from."""
        made = self._module.instructions.get(instruction)
        if made is None:
            return unknown("")
        annotated, phase = self._makers.annotated(made), self._phases.of(made.name)
        return self._of_instruction(made, annotated, operation_of(annotated), phase, "")

    def argument_of(self, allocation: Allocation) -> Origin | None:
        """The origin of what an argument's allocation was passed with."""
        passed = self._program.argument(allocation.parameter)
        return self._of_argument(passed, "argument") if passed else None

    def _of_argument(self, argument: Argument, operation: str) -> Origin:
        return Origin(
            operation,
            f"argument {argument.group}",
            self._module_of_argument(argument),
            phase_of_argument(argument),
            argument.kind,
        )

    def _of_collective(self, made: Instruction, index: Element, value: Value) -> Origin:
        """XLA combines collectives: an element of the result belongs to the operand of its place,
        and to the first phase that reads it."""
        operation = made.opcode.removesuffix("-start")
        place = index[-1] if index and index[-1] < len(made.operands) else 0
        operand, _ = self._makers.maker(self._module.instructions[made.operands[place]])
        read_in = self._read_in(made, value)
        phase = min(read_in & set(PHASES), key=PHASES.index, default=self._phases.of(operand.name))
        kind = kind_of(made, value, phase, read_in)
        annotated = self._makers.annotated(made)
        if "/" not in annotated.stack:
            argument = self._program.argument_of(operand)
            if argument:
                known = self._of_argument(argument, operation)
                return dataclasses.replace(known, phase=phase, kind=kind)
            annotated = self._makers.annotated(operand)
        return self._of_instruction(made, annotated, operation, phase, kind)

    def _of_instruction(
        self, made: Instruction, annotated: Instruction, operation: str, phase: str, kind: str
    ) -> Origin:
        source = source_of(self._module.frames(annotated.frame))
        return Origin(operation, source, self._module_path(made, annotated), phase, kind)

    def _read_in(self, made: Instruction, value: Value) -> set[str]:
        """The phases that read a value."""
        readers = self._readers.of(made.name, value.index[-1:])
        return {self._phases.of(reader.name) for reader in readers}

    def _module_path(self, made: Instruction, annotated: Instruction) -> str:
        """Scopes of the name stack (Flax linen, `jax.named_scope`), else the classes whose methods
        are on the stack (Flax nnx, Equinox), else the parameter that is updated, else the user's
        function, else that of what is read: a slice of the batch, a gradient that is added."""
        place, function = self._place(annotated)
        if place:
            return place
        updates = self._phases.of(made.name) == "update"
        if function and not updates:
            return function
        read = [self._makers.maker(self._module.instructions[name])[0] for name in made.operands]
        for one in read:
            argument = self._program.argument_of(one)
            if argument and not (updates and argument.kind == "batch"):
                return self._module_of_argument(argument)
        if function or updates:
            return function or UNATTRIBUTED
        places = (self._place(self._makers.annotated(one)) for one in read)
        return next((place or function for place, function in places if place or function), "") or (
            UNATTRIBUTED
        )

    def _place(self, annotated: Instruction) -> tuple[str, str]:
        """The path of the module that an instruction itself says that it is in, and the user's
        function; empty where it says none."""
        scopes = modules_of(annotated.stack)
        classes, function = classes_and_function(self._module.frames(annotated.frame))
        return "/".join(scopes or classes), function

    def _module_of_argument(self, argument: Argument) -> str:
        module = argument.module
        if self._root and module.partition("/")[0] in self._children:
            module = f"{self._root}/{module}"
        return module or argument.path
