"""The names in a compiled program as text: operations, module paths, source lines, libraries."""

import functools
import importlib.util
import os
import re
from collections.abc import Iterable

from jaxmem.reports.xla.instructions import Frame, Instruction

UNATTRIBUTED = "(not attributed)"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "jaxmem")

# Functions of jaxmem that compute on their own, between the user's lines.
_COMPUTING = ("microbatch", "accumulate", "offload", "layers", "scan", "while_loop")
# Beyond these functions of jaxmem a stack has only the line that asked for the report.
_REPORTING = ("memory", "lower_for", "saved_residuals")
_PUNCTUATION = re.compile("[()/]")
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|pmap|shard_map)\((.*)\)$")
_NOT_A_MODULE = re.compile(
    r"^(?:jit\(.*\)|checkpoint|remat\d*|rematted_computation|while|body|cond|closed_call|eval_jaxpr"
    r"|branch_\d+_fun|custom_[jv][jv]p_call|shard_map|core_call|.*->.*|)$"
)
_REMAT_CLASS = re.compile(r"(?:Checkpoint|Remat)(?=[A-Z]\w*_\d+$)")
_LIBRARY = re.compile(rf"site-packages/({'|'.join(LIBRARIES)})/")


def operation_of(instruction: Instruction) -> str:
    """The JAX primitive of an instruction, or its opcode where XLA made it."""
    stack = instruction.stack
    return _parts(stack)[-1] if "/" in stack else instruction.opcode


@functools.lru_cache(10_000)
def modules_of(stack: str) -> tuple[str, ...]:
    """``("ResNet", "Block_3")`` of ``jit(step)/transpose(jvp(ResNet))/Block_3/add``."""
    if "/" not in stack:
        return ()
    names: list[str] = []
    for part in _parts(stack)[:-1]:
        while match := _WRAPPER.match(part):
            part = match[1]
        name = _REMAT_CLASS.sub("", part)
        # A region's backward repeats the scope that it was opened in.
        if not _NOT_A_MODULE.match(part) and names[-1:] != [name]:
            names.append(name)
    return tuple(names)


def source_of(frames: Iterable[Frame]) -> str:
    """The user's line on a stack (innermost first), else the function of Flax or optax, or of
    jaxmem, that the user's code is not seen to call."""
    in_library = in_jaxmem = ""
    for frame in frames:
        library = _library(frame.file)
        if library is None:
            return f"{_short(frame.file)}:{frame.line} ({frame.function.split('.')[-1]})"
        if library == "jaxmem" and frame.function in _REPORTING:
            break
        if library in ("flax", "optax") and not frame.function.startswith("<"):
            in_library = f"{library}: {frame.function.split('.')[0]}"
        if library == "jaxmem" and frame.function.split(".")[0] in _COMPUTING:
            in_jaxmem = f"jaxmem: {frame.function.split('.')[0]}"
    return in_library or in_jaxmem or UNATTRIBUTED


def adds_slices(frames: Iterable[Frame]) -> bool:
    """Whether `jaxmem.microbatch` computes this between the gradients of two slices."""
    return source_of(frames) == "jaxmem: microbatch"


def user_lines(frames: Iterable[Frame]) -> tuple[tuple[str, int], ...]:
    """The user's lines on a stack, as file and number."""
    return tuple((frame.file, frame.line) for frame in frames if _library(frame.file) is None)


def classes_and_function(frames: Iterable[Frame]) -> tuple[list[str], str]:
    """The classes whose methods are on a stack (innermost first), outermost first, and the user's
    innermost function; the user's own classes and the layers of Flax nnx count."""
    classes: list[str] = []
    function = ""
    for frame in frames:
        library = _library(frame.file)
        if library == "jaxmem" and frame.function in _REPORTING:
            break
        owner, _, method = frame.function.split("<locals>.")[-1].rpartition(".")
        counts = library is None or (library == "flax" and "/nnx/nn/" in frame.file)
        if owner and counts and method and classes[-1:] != [owner]:
            classes.append(owner)
        if library is None and not function:
            function = frame.function.split(".")[-1]
    return classes[::-1], function


@functools.lru_cache(10_000)  # the instructions of a program share a few thousand
def _parts(stack: str) -> tuple[str, ...]:
    """The parts of a name stack, whose parentheses may hold slashes."""
    if "(" not in stack:
        return tuple(stack.split("/"))
    parts, depth, start = [], 0, 0
    for match in _PUNCTUATION.finditer(stack):
        letter, position = match[0], match.start()
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth <= 0:
            parts.append(stack[start:position])
            start = position + 1
    return (*parts, stack[start:])


@functools.cache
def _library(file: str) -> str | None:
    """The library that a file belongs to, ``"python"`` for its own; None: the user's."""
    for library, folder in _folders().items():
        if file.startswith(folder + os.sep):
            return library
    match = _LIBRARY.search(file)
    if match:
        return match[1]
    standard = os.path.dirname(os.__file__) + os.sep
    return "python" if file.startswith((standard, "<")) and "-packages" not in file else None


@functools.cache
def _folders() -> dict[str, str]:
    specs = {library: importlib.util.find_spec(library) for library in LIBRARIES}
    return {
        library: os.path.dirname(spec.origin)
        for library, spec in specs.items()
        if spec and spec.origin
    }


def _short(file: str) -> str:
    """A path from the working directory where it is inside it, else its last two parts."""
    folder = os.getcwd() + os.sep
    if file.startswith(folder):
        return file.removeprefix(folder)
    return "/".join(file.split("/")[-2:])
