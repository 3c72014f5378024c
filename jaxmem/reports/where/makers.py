"""Which instruction made a value, through fusions, loops and tuples, and which has its metadata."""

import collections
import functools

from jaxmem.reports.where.program import CompiledProgram
from jaxmem.reports.xla.instructions import Instruction

# JAX rounds what its regions keep to the bits that it has already, and says so of no line.
_ROUNDED = "reduce-precision"
_COPIES = frozenset("bitcast opt-barrier copy copy-start copy-done".split())

# Of one value through a loop: a value that no turn of a loop makes is met again on the way out, and
# once more for each loop around. A guard alone: what is met more often is in no program of XLA's.
_MAX_REVISITS = 20

Element = tuple[int, ...]  # an index into nested tuples; empty: the whole value


class Makers:
    """The makers of the values of a program."""

    def __init__(self, program: CompiledProgram):
        self._program = program
        self._module = program.module
        # Remembered for as long as this object lives, not the process.
        self.annotated = functools.cache(self._annotated)

    def maker(self, made: Instruction, index: Element = ()) -> tuple[Instruction, Element]:
        """The instruction that fills the memory: past copies, tuples and loops."""
        seen: collections.Counter[tuple[str, Element]] = collections.Counter()
        while not self._program.is_argument(made) and seen[made.name, index] <= _MAX_REVISITS:
            again = (made.name, index) in seen
            seen[made.name, index] += 1
            caller = self._program.flow.callers.get(made.computation)
            if made.opcode == "parameter" and caller is not None and caller.operands:
                following = self._loop_operand(made, caller, again)
            elif made.opcode == "while":
                following = self._module.roots[made.called[0]].name
            elif made.opcode == "tuple" and index and index[0] < len(made.operands):
                following, index = made.operands[index[0]], index[1:]
            elif made.opcode == "get-tuple-element":
                following, index = made.operands[0], (made.index, *index)
            elif made.opcode in _COPIES and made.operands:
                following = made.operands[0]
                index = () if made.opcode == "copy-start" else index
            else:
                break
            made = self._module.instructions[following]
        return made, index

    def _loop_operand(self, parameter: Instruction, caller: Instruction, again: bool) -> str:
        """What a computation gets as its parameter: in a loop what the last turn returned or, met
        ``again``, what the loop was given, since none of its turns made it."""
        if caller.opcode != "while" or again:
            return caller.operands[parameter.index if caller.opcode == "call" else 0]
        returned = self._module.roots[parameter.computation]
        return returned.name if returned.opcode == "tuple" else caller.operands[0]

    def stored(self, made: Instruction, index: Element) -> Instruction | None:
        """What a loop stores into a stack of values, if that is what an instruction does."""
        inner, inside = made, None
        if made.opcode == "fusion" and made.called:
            inside = made.called[0]
            inner = self._module.roots[inside]
            if inner.opcode == "tuple" and index:
                inner = self._module.instructions[inner.operands[index[0]]]
            inner = self._skip(inner, "bitcast", "convert")
        if inner.opcode != "dynamic-update-slice":
            return None
        stored = self._module.instructions[inner.operands[1]]
        stored = self._skip(stored, "bitcast", "reshape", "convert", "copy", _ROUNDED)
        if stored.opcode == "parameter" and stored.computation == inside:
            stored, _ = self.maker(self._module.instructions[made.operands[stored.index]])
        annotated = self.annotated(stored)
        return annotated if "/" in annotated.stack else None

    def _has_metadata(self, one: Instruction) -> bool:
        """Whether an instruction says what computes it; a fusion says what its root does."""
        if one.opcode == "fusion" and one.called:
            root = self._module.roots[one.called[0]]
            if root.opcode == _ROUNDED:
                return False
        return "/" in one.stack and one.opcode != _ROUNDED

    def _skip(self, instruction: Instruction, *opcodes: str) -> Instruction:
        while instruction.opcode in opcodes and instruction.operands:
            instruction = self._module.instructions[instruction.operands[0]]
        return instruction

    def _annotated(self, made: Instruction, index: Element = ()) -> Instruction:
        """The instruction whose metadata says where a value comes from: for an element of a fusion
        what computes it, for an instruction without a name stack one inside it, or else one that
        it reads."""
        seen: set[str] = set()
        todo = collections.deque([made])
        while todo:
            one = todo.popleft()
            if one.name in seen:
                continue
            seen.add(one.name)
            fused = one.called[0] if one.opcode == "fusion" and one.called else None
            if fused and index and one is made and self._module.roots[fused].opcode == "tuple":
                root = self._module.roots[fused]
                element = self._module.instructions[root.operands[index[0]]]
                element = self._skip(element, _ROUNDED)
                if "/" in element.stack:
                    return element
            # XLA names some instructions after the argument that they read: no slash.
            if self._has_metadata(one) or (one.stack and one.opcode == "parameter"):
                return one
            for member in reversed(self._module.members[fused] if fused else []):
                if self._has_metadata(member):
                    return member
            todo += [self._module.instructions[name] for name in one.operands]
        return made
