"""Which instructions read a value, also through tuples, copies and loops."""

import functools

from jaxmem.reports.where.program import CompiledProgram
from jaxmem.reports.xla.flow import Node
from jaxmem.reports.xla.instructions import Instruction

# These pass on the bytes they are given.
_TRANSPARENT = frozenset(
    """bitcast get-tuple-element tuple opt-barrier copy copy-start copy-done while call
    async-start async-done parameter all-gather-done all-reduce-done""".split()
)


class Readers:
    """The readers of every value of a program."""

    def __init__(self, program: CompiledProgram):
        self._module = program.module
        self._callers = program.flow.callers
        self._users: dict[str, list[Instruction]] = {}
        for instruction in self._module.instructions.values():
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(instruction)
        # Remembered for as long as this object lives, not the process.
        self._reached = functools.cache(self._find)

    def of(self, name: str, index: tuple[int, ...]) -> list[Instruction]:
        """The instructions that compute from a value."""
        reached = self._reached(name, index)
        return [reader for reader in reached if reader.opcode not in _TRANSPARENT]

    def is_result(self, name: str, index: tuple[int, ...]) -> bool:
        """Whether a value is handed out of the entry computation."""
        root = self._module.roots[self._module.entry]
        return any(reader is root for reader in self._reached(name, index))

    def _find(self, name: str, index: tuple[int, ...]) -> tuple[Instruction, ...]:
        """The instructions that read a value or pass it on."""
        found: dict[str, Instruction] = {}
        seen: set[Node] = set()
        todo: list[Node] = [(name, index[0] if index else -1)]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            name, element = node
            for user in self._users.get(name, ()):
                if user.opcode == "get-tuple-element" and element not in (-1, user.index):
                    continue
                found[user.name] = user
                if user.opcode in _TRANSPARENT:
                    todo += self._forwarded(user, name, element)
        return tuple(found.values())

    def _forwarded(self, user: Instruction, name: str, element: int) -> list[Node]:
        """Where the bytes of an operand are after an instruction that passes them on."""
        if user.opcode == "tuple":
            places = [place for place, operand in enumerate(user.operands) if operand == name]
            return [node for place in places for node in self._in_tuple(user, place)]
        if user.opcode in ("while", "call"):
            return [(user.name, element), *self._parameters(user, element)]
        return [(user.name, -1 if user.opcode == "get-tuple-element" else element)]

    def _in_tuple(self, made: Instruction, place: int) -> list[Node]:
        """An element of a tuple, and of the loop or call that returns the tuple."""
        caller = self._callers.get(made.computation)
        returned = self._module.roots[made.computation] is made
        if not returned or caller is None or caller.opcode not in ("while", "call"):
            return [(made.name, place)]
        return [(made.name, place), (caller.name, place), *self._parameters(caller, place)]

    def _parameters(self, caller: Instruction, element: int) -> list[Node]:
        return [
            (member.name, element)
            for called in caller.called
            for member in self._module.members.get(called, ())
            if member.opcode == "parameter"
        ]
