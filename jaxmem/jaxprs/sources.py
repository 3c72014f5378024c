"""Lines and modules of a program. Where JAX has moved what tells them, all else works without."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from jaxmem.jaxprs import internals

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


class _NoNames:
    """The empty stack of names, in the place of JAX's own."""

    def __add__(self, names: Any) -> Any:
        return names

    def __str__(self) -> str:
        return ""


def traceback_of(equation: JaxprEqn) -> Any:
    """Where the user's code made it."""
    return internals.attribute(equation, "equation.source_info.traceback")


def names_of(equation: JaxprEqn) -> Any:
    """The stack of names of modules that an equation is in."""
    return internals.attribute(equation, "equation.source_info.name_stack")


def no_names() -> Any:
    """A stack of names of modules that has none."""
    own = internals.optional("source_info_util")
    return own.new_name_stack() if own else _NoNames()


def user_frames(traceback: Any) -> list[Any]:
    """The frames of a traceback that are not JAX's own, the innermost first."""
    own = internals.optional("source_info_util")
    return list(own.user_frames(traceback)) if own else []


def at_source(
    traceback: Any, names: Any, inside: bool = False
) -> contextlib.AbstractContextManager:
    """In which what is bound belongs to a line and to the modules of a stack of names, ``inside``
    of those that are current or not."""
    own = internals.optional("source_info_util")
    if not own:
        return contextlib.nullcontext()
    stack = own.current_name_stack() + names if inside else names
    return own.user_context(traceback, name_stack=stack)
