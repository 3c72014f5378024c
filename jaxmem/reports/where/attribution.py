"""Who made a value of the compiled program: operation, the user's line, module, phase, kind.

**Phase** of an operation, from its name stack and what it reads: ``recompute`` under
``rematted_computation`` in a transpose, or made by XLA's own rematerialization; ``backward`` under
``transpose(jvp(...))``; ``loss`` and ``forward`` under ``jvp(...)``; outside of both ``update``
where it is computed from a gradient or optimizer state, else ``forward``. Arguments are ``state``
or ``batch``. The loss is what `optax.losses` computes, and those lines of the user, outside of
modules, that compute from the model's results and no longer from its parameters: neither they nor
anything that is computed from them reads one (a scalar made of parameters, such as a penalty on
them, does not count). A line that reads the last parameter is forward as a whole.

**Kind** of a value: an argument is what `describe_arguments` says, and so is what replaces it in
its own memory at the end; ``outputs`` are other results; ``gradients`` were made by the backward
pass for the update; ``residuals`` were made before the backward pass and are read in it;
``workspace`` is scratch of cuDNN and cuBLAS; everything else is ``temporaries``.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence

from jaxmem.reports.where.arguments import Argument
from jaxmem.reports.xla.dump import Allocation, Value
from jaxmem.reports.xla.flow import Flow, Node
from jaxmem.reports.xla.hlo import Frame, Instruction, Module

PHASES = ("state", "batch", "forward", "loss", "backward", "recompute", "update")
KINDS = (
    *("parameters", "optimizer state", "model state", "batch", "gradients", "residuals"),
    *("temporaries", "workspace", "outputs"),
)
UNATTRIBUTED = "(not attributed)"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "jaxmem")

# These pass on the bytes they are given.
_TRANSPARENT = frozenset(
    """bitcast get-tuple-element tuple opt-barrier copy copy-start copy-done while call
    async-start async-done parameter all-gather-done all-reduce-done""".split()
)
_COPIES = frozenset("bitcast opt-barrier copy copy-start copy-done".split())
_CONTAINERS = frozenset("fusion call while conditional tuple get-tuple-element parameter".split())
_ENDS = ("memory", "lower_for_cuda", "saved_residuals")
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-")
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|pmap|shard_map)\((.*)\)$")
_NOT_A_MODULE = re.compile(
    r"^(?:jit\(.*\)|checkpoint|remat\d*|rematted_computation|while|body|cond|closed_call|eval_jaxpr"
    r"|branch_\d+_fun|custom_[jv][jv]p_call|shard_map|core_call|.*->.*|)$"
)
_REMAT_CLASS = re.compile(r"(?:Checkpoint|Remat)(?=[A-Z]\w*_\d+$)")
_LIBRARY = re.compile(rf"site-packages/({'|'.join(LIBRARIES)})/")


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
        self._arguments = arguments
        self._flow = Flow(module)
        self._callers = self._flow.callers
        self._users: dict[str, list[Instruction]] = {}
        for one in module.instructions.values():
            for operand in one.operands:
                self._users.setdefault(operand, []).append(one)
        # Remembered for as long as this object lives, not the process.
        for name in ("_reached", "_phase", "_telling", "_lines"):
            setattr(self, name, functools.cache(getattr(self, name)))
        stacks = [modules_of(one.stack) for one in module.instructions.values()]
        roots = {path[0] for path in stacks if len(path) > 1}
        self._root = roots.pop() if len(roots) == 1 else ""
        self._children = {path[1] for path in stacks if len(path) > 1}
        self._has_gradients = any("transpose(" in one.stack for one in module.instructions.values())

    # ---- values

    def origin(self, value: Value, allocation: Allocation) -> Origin:
        """The origin of a value that lies in an allocation."""
        made = self._module.instructions.get(value.instruction)
        if made is None:
            return unknown("temporaries")
        held = self._argument(allocation.parameter)
        if self._is_parameter(made) and held:
            return self._of_argument(held, "argument")
        if held and allocation.live_out and self._is_result(made, value.index):
            return dataclasses.replace(
                self._of_argument(held, _operation(self._telling(made, value.index))),
                phase="update",
            )
        made, index = self._maker(made, value.index)
        if made.opcode.startswith(_COLLECTIVES):
            return self._of_collective(made, index, value)
        told = self._telling(made, index)
        if self._is_parameter(told):  # copied as it is, or in another layout
            argument = self._argument(told.index)
            if argument:
                return self._of_argument(argument, "copy of an argument")
        phase = self._phase(told.name)
        kind = self._kind(made, value, phase)
        told = self._stored(made, index) or told
        if allocation.role == "output":
            kind = "outputs"
        return Origin(_operation(told), self._source(told), self._path(told, made), phase, kind)

    def _of_collective(self, made: Instruction, index: tuple[int, ...], value: Value) -> Origin:
        """XLA combines collectives: an element of the result belongs to the operand of its place,
        and to the first phase that reads it."""
        operation = made.opcode.removesuffix("-start")
        place = index[-1] if index and index[-1] < len(made.operands) else 0
        operand, _ = self._maker(self._module.instructions[made.operands[place]])
        argument = self._argument(operand.index) if self._is_parameter(operand) else None
        readers = self._reader_phases(made, value)
        phase = min(readers & set(PHASES), key=PHASES.index, default=self._phase(operand.name))
        kind = self._kind(made, value, phase)
        told = self._telling(made)
        if argument and "/" not in told.stack:
            known = self._of_argument(argument, operation)
            return dataclasses.replace(known, phase=phase, kind=kind)
        if "/" not in told.stack:
            told = self._telling(operand)
        return Origin(operation, self._source(told), self._path(told, made), phase, kind)

    def phase(self, instruction: str) -> str:
        """The phase of an instruction of the schedule."""
        known = instruction in self._module.instructions
        return self._phase(instruction) if known else UNATTRIBUTED

    def describe(self, instruction: str) -> Origin:
        """Where an instruction of the schedule comes from."""
        made = self._module.instructions.get(instruction)
        if made is None:
            return unknown("")
        told, phase = self._telling(made), self._phase(made.name)
        return Origin(_operation(told), self._source(told), self._path(told, made), phase, "")

    def argument_of(self, allocation: Allocation) -> Origin | None:
        """The origin of what an argument's allocation was passed with."""
        held = self._argument(allocation.parameter)
        return self._of_argument(held, "argument") if held else None

    def _argument(self, number: int | None) -> Argument | None:
        if number is None or number >= len(self._arguments):
            return None
        return self._arguments[number]

    def _of_argument(self, argument: Argument, operation: str) -> Origin:
        phase = "batch" if argument.kind == "batch" else "state"
        module = argument.module
        if self._root and module.partition("/")[0] in self._children:
            module = f"{self._root}/{module}"
        where = f"argument {argument.group}"
        return Origin(operation, where, module or argument.path, phase, argument.kind)

    def _is_parameter(self, made: Instruction) -> bool:
        return made.opcode == "parameter" and made.computation == self._module.entry

    def _is_result(self, made: Instruction, index: tuple[int, ...]) -> bool:
        """Whether the value is handed out of the entry computation."""
        root = self._module.roots[self._module.entry]
        return any(one is root for one, _ in self._reached(made.name, index))

    def _kind(self, made: Instruction, value: Value, phase: str) -> str:
        if made.opcode == "custom-call" and value.index and value.shape.startswith(("u8", "s8")):
            return "workspace"
        readers = self._reader_phases(made, value)
        if phase in ("backward", "recompute") and "update" in readers:
            return "gradients"
        if phase in ("forward", "loss") and readers & {"backward", "recompute"}:
            return "residuals"
        return "temporaries"

    def _reader_phases(self, made: Instruction, value: Value) -> set[str]:
        reached = self._reached(made.name, value.index[-1:])
        return {self._phase(one.name) for one, passed in reached if not passed}

    def _reached(self, name: str, index: tuple[int, ...]) -> tuple[tuple[Instruction, bool], ...]:
        """The instructions that read a value, also through those that pass it on, and whether each
        of them passes it on."""
        found: dict[str, tuple[Instruction, bool]] = {}
        seen: set[tuple[str, int]] = set()
        todo = [(name, index[0] if index else -1)]
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            name, element = at
            for user in self._users.get(name, ()):
                passes = user.opcode in _TRANSPARENT
                if user.opcode == "get-tuple-element" and element not in (-1, user.index):
                    continue
                found[user.name] = (user, passes)
                if user.opcode == "tuple":
                    for position, operand in enumerate(user.operands):
                        if operand == name:
                            todo.append((user.name, position))
                    caller = self._callers.get(user.computation)
                    is_root = self._module.roots[user.computation] is user
                    if is_root and caller is not None and caller.opcode in ("while", "call"):
                        for position, operand in enumerate(user.operands):
                            if operand == name:
                                todo.append((caller.name, position))
                                todo += self._parameters_of(caller, position)
                elif user.opcode in ("while", "call"):
                    todo.append((user.name, element))
                    todo += self._parameters_of(user, element)
                elif passes:
                    todo.append((user.name, -1 if user.opcode == "get-tuple-element" else element))
        return tuple(found.values())

    def _parameters_of(self, caller: Instruction, element: int) -> list[tuple[str, int]]:
        return [
            (one.name, element)
            for called in caller.called
            for one in self._module.members.get(called, ())
            if one.opcode == "parameter"
        ]

    # ---- instructions

    def _maker(self, made: Instruction, index: tuple[int, ...] = ()):
        """The instruction that fills the memory: past copies, tuples and loops."""
        seen: set[tuple[str, tuple[int, ...]]] = set()
        while not self._is_parameter(made):
            again = (made.name, index) in seen
            seen.add((made.name, index))
            caller = self._callers.get(made.computation)
            if made.opcode == "parameter" and caller is not None and caller.operands:
                if caller.opcode == "while" and not again:  # what the last turn returned
                    following = self._module.roots[made.computation].name
                    if self._module.instructions[following].opcode != "tuple":
                        following = caller.operands[0]
                else:  # what the loop was given: none of its turns made it
                    following = caller.operands[made.index if caller.opcode == "call" else 0]
            elif again:
                break
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

    def _stored(self, made: Instruction, index: tuple[int, ...]):
        """What a loop stores into a stack of values, if that is what an instruction does."""
        inner, inside = made, None
        if made.opcode == "fusion" and made.called:
            inside = made.called[0]
            inner = self._module.roots[inside]
            if inner.opcode == "tuple" and index:
                inner = self._module.instructions[inner.operands[index[0]]]
            while inner.opcode in ("bitcast", "convert") and inner.operands:
                inner = self._module.instructions[inner.operands[0]]
        if inner.opcode != "dynamic-update-slice":
            return None
        stored = self._module.instructions[inner.operands[1]]
        while stored.opcode in ("bitcast", "reshape", "convert", "copy") and stored.operands:
            stored = self._module.instructions[stored.operands[0]]
        if stored.opcode == "parameter" and stored.computation == inside:
            stored, _ = self._maker(self._module.instructions[made.operands[stored.index]])
        told = self._telling(stored)
        return told if "/" in told.stack else None

    def _telling(self, made: Instruction, index: tuple[int, ...] = ()) -> Instruction:
        """The instruction that knows where it comes from: an element of a fusion is told by what it
        computes, one without a name stack by what is inside it, or else by what it reads."""
        seen: set[str] = set()
        todo = collections.deque([made])
        while todo:
            one = todo.popleft()
            if one.name in seen:
                continue
            seen.add(one.name)
            if one.opcode == "fusion" and one.called:
                root = self._module.roots[one.called[0]]
                if index and root.opcode == "tuple" and one is made:
                    element = self._module.instructions[root.operands[index[0]]]
                    if element.stack and not self._looks_like_argument(element.stack):
                        return element
            if one.stack and not (
                one.opcode != "parameter" and self._looks_like_argument(one.stack)
            ):
                return one
            if one.opcode == "fusion" and one.called:
                inner = [
                    member
                    for member in reversed(self._module.members[one.called[0]])
                    if member.stack and "/" in member.stack
                ]
                if inner:
                    return inner[0]
            todo += [self._module.instructions[name] for name in one.operands]
        return made

    @staticmethod
    def _looks_like_argument(stack: str) -> bool:
        return "/" not in stack

    def _phase(self, name: str) -> str:
        one = self._telling(self._module.instructions[name])
        stack = one.stack
        if self._is_parameter(one):
            argument = self._argument(one.index)
            return "batch" if argument and argument.kind == "batch" else "state"
        if not stack:
            return UNATTRIBUTED
        if ".remat" in name or ("transpose(" in stack and "rematted_computation" in stack):
            return "recompute"
        if "transpose(" in stack:
            return "backward"
        if "jvp(" not in stack and (name, -1) in self._after_gradients:
            return "update"
        return "loss" if self._is_loss(one) else "forward"

    @functools.cached_property
    def _after_gradients(self) -> set[Node]:
        """What is computed from a gradient or from optimizer state."""
        return self._flow.computed_from(
            name
            for name, one in self._module.instructions.items()
            if "transpose(" in one.stack or self._is_argument(one, "optimizer state")
        )

    def _is_argument(self, one: Instruction, *kinds: str) -> bool:
        argument = self._argument(one.index) if self._is_parameter(one) else None
        return argument is not None and argument.kind in kinds

    def _is_loss(self, one: Instruction) -> bool:
        if any("optax/losses/" in frame.file for frame in self._frames(one)):
            return True
        return not modules_of(one.stack) and self._lines(one.frame) in self._loss_lines

    @functools.cached_property
    def _loss_lines(self) -> frozenset[tuple[tuple[str, int], ...]]:
        """The lines of the user, each with those that called it, that are the loss."""
        if not self._has_gradients:
            return frozenset()  # of a step without gradients nothing says that it ends in a loss
        flow, every = self._flow, self._module.instructions
        parameters, data = [], []
        for name, one in every.items():
            if self._is_argument(one, "parameters"):
                parameters.append(name)
            elif self._is_parameter(one) and not self._is_argument(one, "optimizer state"):
                data.append(name)
        weights = flow.computed_from(parameters, _before_gradients)
        weights.update((name, -1) for name in parameters)
        computed = flow.computed_from(data, _before_gradients)

        def reads_parameters(one: Instruction) -> bool:
            return (
                (one.name, -1) in computed
                and one.opcode not in _CONTAINERS
                and any(
                    read in weights and read not in computed and not every[read[0]].is_scalar
                    for read in flow.read_by((one.name, -1))
                )
            )

        forward = {name: one for name, one in every.items() if _is_forward(one)}
        readers = [name for name, one in forward.items() if reads_parameters(one)]
        # Not what depends on data alone: XLA merges, say, the indices of tokens and of labels.
        before = flow.sources(readers, _before_gradients) & weights
        after = flow.computed_from(readers, _before_gradients)

        def lines_of(values: set[Node]) -> set[tuple[tuple[str, int], ...]]:
            names = forward.keys() & {name for name, _ in values}
            return {self._lines(forward[name].frame) for name in names}

        return frozenset(lines_of(after) - lines_of(before) - {()})

    def _lines(self, frame: int) -> tuple[tuple[str, int], ...]:
        """The user's lines on the stack of a frame."""
        known = self._module.frames(frame)
        return tuple((one.file, one.line) for one in known if _library(one.file) is None)

    # ---- texts

    def _source(self, one: Instruction) -> str:
        return source_of(self._frames(one))

    def _frames(self, one: Instruction) -> tuple[Frame, ...]:
        return self._module.frames(one.frame)

    def _path(self, one: Instruction, made: Instruction) -> str:
        """Scopes of the name stack (Flax linen, `jax.named_scope`), else the classes whose methods
        are on the stack (Flax nnx, Equinox), else the parameter that is updated, else the user's
        function."""
        scopes = modules_of(one.stack)
        if scopes:
            return "/".join(scopes)
        classes: list[str] = []
        function = ""
        for frame in self._frames(one):
            package = _library(frame.file)
            if package == "jaxmem" and frame.function in _ENDS:
                break
            owner, _, method = frame.function.split("<locals>.")[-1].rpartition(".")
            own = package is None or (package == "flax" and "/nnx/nn/" in frame.file)
            if owner and own and method and classes[-1:] != [owner]:
                classes.append(owner)
            if package is None and not function:
                function = frame.function.split(".")[-1]
        if classes:
            return "/".join(reversed(classes))
        for name in made.operands:
            read, _ = self._maker(self._module.instructions[name])
            argument = self._argument(read.index) if self._is_parameter(read) else None
            if argument and argument.kind != "batch" and self._phase(made.name) == "update":
                return self._of_argument(argument, "").module
        return function or UNATTRIBUTED


def _before_gradients(one: Instruction) -> bool:
    return "transpose(" not in one.stack


def _is_forward(one: Instruction) -> bool:
    return "jvp(" in one.stack and _before_gradients(one) and ".remat" not in one.name


def source_of(frames: Iterable[Frame]) -> str:
    """The user's line on a stack (innermost first), else the function of Flax or optax that the
    user's code is not seen to call; beyond `jaxmem.memory` is only the line that asked for it."""
    library = ""
    for frame in frames:
        package = _library(frame.file)
        if package is None:
            return f"{_short(frame.file)}:{frame.line} ({frame.function.split('.')[-1]})"
        if package == "jaxmem" and frame.function in _ENDS:
            break
        if package in ("flax", "optax") and not frame.function.startswith("<"):
            library = f"{package}: {frame.function.split('.')[0]}"
    return library or UNATTRIBUTED


def modules_of(stack: str) -> tuple[str, ...]:
    """``("ResNet", "Block_3")`` of ``jit(step)/transpose(jvp(ResNet))/Block_3/add``."""
    if "/" not in stack:
        return ()
    names: list[str] = []
    for part in _split(stack)[:-1]:
        while match := _WRAPPER.match(part):
            part = match[1]
        name = _REMAT_CLASS.sub("", part)
        # A region's backward repeats the scope that it was opened in.
        if not _NOT_A_MODULE.match(part) and names[-1:] != [name]:
            names.append(name)
    return tuple(names)


def _split(stack: str) -> list[str]:
    """The parts of a name stack, whose parentheses may hold slashes."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(stack):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth <= 0:
            parts.append(stack[start:position])
            start = position + 1
    return [*parts, stack[start:]]


def _operation(one: Instruction) -> str:
    return _split(one.stack)[-1] if "/" in one.stack else one.opcode


@functools.cache
def _library(file: str) -> str | None:
    """The library that a file belongs to, ``"python"`` for its own; None: the user's."""
    for package, folder in _folders().items():
        if file.startswith(folder + os.sep):
            return package
    match = _LIBRARY.search(file)
    if match:
        return match[1]
    standard = os.path.dirname(os.__file__) + os.sep
    return "python" if file.startswith((standard, "<")) and "-packages" not in file else None


@functools.cache
def _folders() -> dict[str, str]:
    specs = {package: importlib.util.find_spec(package) for package in LIBRARIES}
    return {
        package: os.path.dirname(spec.origin)
        for package, spec in specs.items()
        if spec and spec.origin
    }


def _short(file: str) -> str:
    """A path from the working directory where it is inside it, else its last two parts."""
    folder = os.getcwd() + os.sep
    if file.startswith(folder):
        return file.removeprefix(folder)
    return "/".join(file.split("/")[-2:])
