"""Which values of a compiled program others are computed from, through fusions, loops and
branches, element by element of what they pass in tuples."""

import functools
from collections.abc import Callable, Iterable

from jaxmem.reports.xla.instructions import Instruction, Module

Node = tuple[str, int]  # an instruction and the element of its result; -1: all of it

Past = Callable[[Instruction], bool]

_PASS_ON = frozenset("bitcast copy copy-start copy-done opt-barrier".split())


class Flow:
    """The values of one program; ``callers`` has the instruction that runs each computation."""

    def __init__(self, module: Module):
        self._module = module
        self.callers: dict[str, Instruction] = {
            called: one for one in module.instructions.values() for called in one.called
        }

    def read_by(self, node: Node) -> list[Node]:
        """What a value is computed from."""
        name, element = node
        one = self._module.instructions[name]
        if one.opcode == "get-tuple-element":
            return [(one.operands[0], one.index)]
        if one.opcode == "tuple" and 0 <= element < len(one.operands):
            return [(one.operands[element], -1)]
        if one.opcode in ("fusion", "call") and one.called:
            return [(self._module.roots[one.called[0]].name, element)]
        if one.opcode == "while":
            return self._of_loop(one, element)
        if one.opcode == "conditional":
            roots = (self._module.roots[called].name for called in one.called)
            return [*((root, element) for root in roots), (one.operands[0], -1)]
        caller = self.callers.get(one.computation)
        if one.opcode == "parameter" and caller is not None:
            if caller.opcode == "while":
                return self._of_loop(caller, element)
            place = one.index
            if caller.opcode == "conditional":
                place = 1 + caller.called.index(one.computation)
            return [(operand, element) for operand in caller.operands[place : place + 1]]
        kept = element if one.opcode in _PASS_ON else -1
        return [(operand, kept) for operand in one.operands]

    def _of_loop(self, loop: Instruction, element: int) -> list[Node]:
        """An element that a loop carries: as it was given, or as the last turn returned it."""
        return [(loop.operands[0], element), (self._module.roots[loop.called[0]].name, element)]

    @functools.cached_property
    def _readers(self) -> dict[Node, list[Node]]:
        """What is computed from each value; every value of the program is a key."""
        todo: list[Node] = [(name, -1) for name in self._module.instructions]
        readers: dict[Node, list[Node]] = {node: [] for node in todo}
        while todo:
            node = todo.pop()
            for read in self.read_by(node):
                if read not in readers:
                    readers[read] = []
                    todo.append(read)
                readers[read].append(node)
        return readers

    def computed_from(self, names: Iterable[str], past: Past | None = None) -> set[Node]:
        """Everything that is computed from the results of some instructions, without them, through
        the instructions that ``past`` lets by."""
        readers, chosen = self._readers, set(names)
        todo = [node for node in readers if node[0] in chosen]
        found: set[Node] = set()
        while todo:
            for reader in readers[todo.pop()]:
                if reader not in found and self._may(reader, past):
                    found.add(reader)
                    todo.append(reader)
        return found

    def sources(self, names: Iterable[str], past: Past | None = None) -> set[Node]:
        """Everything that the results of some instructions are computed from, and they."""
        todo: list[Node] = [(name, -1) for name in names]
        found = set(todo)
        while todo:
            for read in self.read_by(todo.pop()):
                if read not in found and self._may(read, past):
                    found.add(read)
                    todo.append(read)
        return found

    def _may(self, node: Node, past: Past | None) -> bool:
        return past is None or past(self._module.instructions[node[0]])
