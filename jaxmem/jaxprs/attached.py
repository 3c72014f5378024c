"""What JAX asks of the attached device while it traces, answered for a target that is not there."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.jaxprs import internals
from jaxmem.targets import LocalDevice, Target, family_of

_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("_target", default=None)


@contextlib.contextmanager
def in_place_of_attached(target: Target | LocalDevice | None) -> Iterator[None]:
    """In which a function is traced as if the target were attached: `jax.nn` asks the attached
    device whether it has a kernel for attention, and raises an error where there is none."""
    chosen = target if isinstance(target, Target) else None
    for name in family_of(chosen).answers(chosen) if chosen else ():
        internals.intercept(internals.fused_attention_stablehlo, name, _answer(name))
    token = _target.set(chosen)
    try:
        yield
    finally:
        _target.reset(token)


@functools.cache
def _answer(name: str) -> Callable:
    def answer(function: Callable, *args: Any) -> Any:
        target = _target.get()
        # Not sooner: asking for the attached device starts JAX's backends.
        if target is None or jax.default_backend() == family_of(target).backend:
            return function(*args)
        return family_of(target).answers(target)[name](*args)

    return answer
