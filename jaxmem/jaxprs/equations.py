"""One equation of a jaxpr: what it is called, where it stands, what is inside it."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.sources import no_names, traceback_of, user_frames

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

# Code that is never the user's own.
_OWN_FOLDER = os.path.join(str(pathlib.Path(__file__).parents[1]), "")
_LIBRARIES = ("chex", "equinox", "flax", "haiku", "optax")
# Functions with derivatives of the user's own, under the names that they have had.
CUSTOM_VJPS = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})
CUSTOM_RULES = CUSTOM_VJPS | {"custom_jvp_call"}
# `jax.checkpoint`, under the names that it has had.
_REGIONS = frozenset({"checkpoint", "remat", "remat2"})
# With the flag jax_remat3 it is a class of "call_hi_primitive", and so is `checkpoint_name`.
_HIGH = {"RematTraced": "checkpoint", "CheckpointName": "name"}


def line_of(equation: JaxprEqn) -> str:
    """``file.py:line (function)`` of the innermost frame of the user's own code."""
    return _line(traceback_of(equation))


@functools.lru_cache(maxsize=2**14)  # layers that a loop of Python makes have the same tracebacks
def _frame(traceback) -> Any:
    frames = user_frames(traceback)
    own = (frame for frame in frames if not _is_library(frame.file_name))
    return next(own, frames[0] if frames else None)


def expression_of(equation: JaxprEqn) -> tuple | None:
    """Where the expression of the user's own code stands that an equation is of: file, lines and
    columns; None: not known."""
    frame = _frame(traceback_of(equation))
    if frame is None:
        return None
    lines = (frame.start_line, frame.end_line, frame.start_column, frame.end_column)
    return (frame.file_name, *lines)


def _line(traceback) -> str:
    frame = _frame(traceback)
    if frame is None:
        return "unknown"
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


@functools.cache
def _is_library(file: str) -> bool:
    folders = (os.path.join(os.sep, name, "") for name in _LIBRARIES)
    return file.startswith(_OWN_FOLDER) or any(folder in file for folder in folders)


def operation_of(equation: JaxprEqn) -> str:
    """The name of what an equation does."""
    name = equation.primitive.name
    if name != "call_hi_primitive":
        return name
    return _HIGH.get(type(equation.params["_prim"]).__name__, name)


def is_region(equation: JaxprEqn) -> bool:
    """Whether it is a `jax.checkpoint` of the user's own."""
    return operation_of(equation) in _REGIONS


def parameters_of(equation: JaxprEqn) -> dict[str, Any]:
    """An equation's parameters; those of the class, where it is of "call_hi_primitive"."""
    high = equation.params.get("_prim")
    return equation.params if high is None else vars(high)


def closed_of(jaxpr):
    return jaxpr if hasattr(jaxpr, "consts") else internals.ClosedJaxpr(jaxpr, ())


def in_place_of(equation: JaxprEqn, fun: Callable, avals: Sequence[Any]) -> Any:
    """A function of such arrays as a closed jaxpr that takes the place of an equation: on its line,
    under the name stack that is around it."""
    with equation.ctx.manager:
        closed = jax.make_jaxpr(fun)(*avals)
    source = equation.source_info.replace(name_stack=no_names())
    steps = [one.replace(source_info=source) for one in closed.jaxpr.eqns]
    return internals.ClosedJaxpr(closed.jaxpr.replace(eqns=steps), closed.consts)


def scan_parts(equation: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants of its body, and how many are carried."""
    given = equation.params
    if "ft_in" in given:  # jax 0.11
        consts, carry, _ = (len(list(part)) for part in given["ft_in"].unpack())
        return consts, carry
    return given["num_consts"], given["num_carry"]


def inner_jaxprs(equation: JaxprEqn) -> list[Any]:
    """The jaxprs among an equation's parameters (of scan, cond, checkpoint, custom rules)."""
    return [getattr(one, "jaxpr", one) for one in _inner(equation)]


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, each followed by those of the jaxprs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner)


def closed_inner_jaxprs(equation: JaxprEqn) -> list[ClosedJaxpr]:
    """The same with their constants: a branch has some, where a rule in it reads an array."""
    return [closed_of(one) for one in _inner(equation)]


def _inner(equation: JaxprEqn) -> Iterator[Any]:
    for value in parameters_of(equation).values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


def primitive_names() -> set[str]:
    """The names of JAX's operations, as they stand in a jaxpr."""
    return {
        primitive.name for primitive in {*internals.mlir._lowerings, *internals.ad.primitive_jvps}
    }


def result_of(primitive, avals: Sequence[Any], parameters: dict) -> Any:
    """The abstract result of a primitive of one result."""
    result, _ = primitive.abstract_eval(*avals, **parameters)
    return result


def is_callback(name: str) -> bool:
    """Whether an operation calls into Python."""
    return "callback" in name or name in ("debug_print", "inspect_sharding")


def find_callback(jaxpr) -> str | None:
    """The first call from the device to Python in a jaxpr, and where it stands; None: none."""
    calls = (one for one in all_equations(jaxpr) if is_callback(one.primitive.name))
    return next((f"{one.primitive.name} at {line_of(one)}" for one in calls), None)


def custom_function(equation: JaxprEqn) -> str:
    """``name at file:line`` of the function that a custom_jvp or custom_vjp equation calls."""
    called = called_by_rule(equation)
    return (
        str(internals.attribute(called.jaxpr, "jaxpr.debug_info.func_src_info")) if called else ""
    )


def called_by_rule(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of a function with derivatives of the user's own; None: it is no such call."""
    if equation.primitive.name not in CUSTOM_RULES:
        return None
    given = equation.params
    return closed_of(given["call_jaxpr"] if "call_jaxpr" in given else given["fun_jaxpr"])


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or a cotangent is known to be zero when a custom rule is traced."""
    return isinstance(tangent, internals.SymbolicZero)
