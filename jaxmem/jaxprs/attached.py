"""What JAX asks of the attached device while it traces, answered for a target that is not there."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.ground.errors import JaxmemError
from jaxmem.jaxprs import internals
from jaxmem.targets import (
    FAMILIES,
    LocalDevice,
    Target,
    example_target,
    family_of,
    known_targets,
)

_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("_target", default=None)


@contextlib.contextmanager
def in_place_of_attached(target: Target | LocalDevice | None) -> Iterator[None]:
    """In which a function is traced as if the target were attached (None: the one of a context
    around this one, or that stands for none): `jax.nn` asks the attached device whether it has a
    kernel for attention, and raises an error where there is none."""
    for name in _asked():
        internals.intercept(internals.fused_attention_stablehlo, name, _answer(name))
    chosen = target or _target.get() or example_target()
    token = _target.set(chosen if isinstance(chosen, Target) else None)
    try:
        yield
    finally:
        _target.reset(token)


@functools.cache
def _asked() -> frozenset[str]:
    """The functions of JAX's that ask, of all families."""
    examples = [known_targets()[family.example] for family in FAMILIES.values()]
    return frozenset(name for one in examples for name in family_of(one).device_queries(one))


@functools.cache
def _answer(name: str) -> Callable:
    def answer(function: Callable, *args: Any) -> Any:
        target = _target.get()
        # Not sooner: asking for the attached device starts JAX's backends.
        if target is None or jax.default_backend() == family_of(target).backend:
            return function(*args)
        if not family_of(target).attention(target):
            raise JaxmemError(
                "The function asks for attention by a kernel (implementation= of "
                f"jax.nn.dot_product_attention) that {target.name} does not have. Leave "
                "implementation= out, or take jaxmem.ops.attention."
            )
        return family_of(target).device_queries(target)[name](*args)

    return answer
