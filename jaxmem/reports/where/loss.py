"""Which of the user's lines are the loss.

The loss is what `optax.losses` computes, and those lines of the user, outside of modules, that
compute from the model's results and no longer from its parameters: neither they nor anything that
is computed from them reads one (a scalar made of parameters, such as a penalty on them, does not
count). A line that reads the last parameter is forward as a whole.
"""

import functools

from jaxmem.reports.where.names import modules_of, user_lines
from jaxmem.reports.where.program import CompiledProgram
from jaxmem.reports.xla.flow import Node
from jaxmem.reports.xla.instructions import Instruction

Lines = tuple[tuple[str, int], ...]  # a line of the user with those that called it

_CONTAINERS = frozenset("fusion call while conditional tuple get-tuple-element parameter".split())


def before_gradients(instruction: Instruction) -> bool:
    """Whether an instruction is not of the backward pass, by its name stack."""
    return "transpose(" not in instruction.stack


class CompiledLoss:
    """The loss of a program."""

    def __init__(self, program: CompiledProgram):
        self._program = program
        self._module = program.module
        self._lines = functools.cache(lambda frame: user_lines(self._module.frames(frame)))

    def __contains__(self, instruction: Instruction) -> bool:
        frames = self._module.frames(instruction.frame)
        if any("optax/losses/" in frame.file for frame in frames):
            return True
        if modules_of(instruction.stack):
            return False
        return self._lines(instruction.frame) in self._loss_lines

    @functools.cached_property
    def _loss_lines(self) -> frozenset[Lines]:
        instructions = self._module.instructions
        if all(map(before_gradients, instructions.values())):
            return frozenset()  # of a step without gradients nothing says that it ends in a loss
        forward = {
            name: instruction
            for name, instruction in instructions.items()
            if _is_forward(instruction)
        }
        flow = self._program.flow
        weights, readers = self._weights_and_readers(forward)
        # Not what depends on data alone: XLA merges, say, the indices of tokens and of labels.
        before = flow.sources(readers, before_gradients) & weights
        after = flow.computed_from(readers, before_gradients)

        def lines_of(values: set[Node]) -> set[Lines]:
            names = forward.keys() & {name for name, _ in values}
            return {self._lines(forward[name].frame) for name in names}

        return frozenset(lines_of(after) - lines_of(before) - {()})

    def _weights_and_readers(self, forward: dict[str, Instruction]) -> tuple[set[Node], list[str]]:
        """The values that come from parameters, and the instructions of the forward pass that
        combine one that comes from parameters alone with what comes from data."""
        flow, instructions = self._program.flow, self._module.instructions
        parameters, data = [], []
        for name, instruction in instructions.items():
            kind = self._program.kind_of_argument(instruction)
            if kind == "parameters":
                parameters.append(name)
            elif self._program.is_argument(instruction) and kind != "optimizer state":
                data.append(name)
        weights = flow.computed_from(parameters, before_gradients)
        weights.update((name, -1) for name in parameters)
        computed = flow.computed_from(data, before_gradients)

        def reads_parameters(name: str) -> bool:
            return any(
                read in weights and read not in computed and not instructions[read[0]].is_scalar
                for read in flow.read_by((name, -1))
            )

        readers = [
            name
            for name, instruction in forward.items()
            if (name, -1) in computed
            and instruction.opcode not in _CONTAINERS
            and reads_parameters(name)
        ]
        return weights, readers


def _is_forward(instruction: Instruction) -> bool:
    return (
        "jvp(" in instruction.stack
        and before_gradients(instruction)
        and ".remat" not in instruction.name
    )
