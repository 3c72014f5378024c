"""A transformation of functions onto Flax modules: linen classes, nnx classes and instances."""

import functools
import sys
from collections.abc import Callable
from typing import Any


def is_module(thing: Any) -> bool:
    """Whether it is a linen module class, or an nnx module or its class."""
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    kind = thing if isinstance(thing, type) else type(thing)
    return bool(
        (linen and isinstance(thing, type) and issubclass(thing, linen.Module))
        or (nnx and issubclass(kind, nnx.Module))
    )


def transform_module(thing: Any, transform: Callable[[Callable], Callable]) -> Any:
    """The same kind of thing, with its ``__call__`` as a pure function under ``transform``."""
    kind = thing if isinstance(thing, type) else type(thing)
    linen = sys.modules.get("flax.linen")
    if linen and issubclass(kind, linen.Module):
        return _linen(kind, transform)
    planned = _nnx(kind, transform)
    if isinstance(thing, type):
        return planned
    instance: Any = object.__new__(planned)
    vars(instance).update(vars(thing))
    return instance


def _linen(kind: type, transform) -> type:
    from flax.core import lift
    from flax.linen.transforms import lift_transform

    def planned(call, *_, **__):
        def inner(scope_of, repack, variables, rngs, *args):
            def pure(variables, rngs, *args):
                scope = scope_of(variables, rngs)
                return call(scope, *args), repack(scope)

            return transform(pure)(variables, rngs, *args)

        return lift.pack(inner, (True,), (True,), (True,), name="jaxmem")

    return lift_transform(planned, kind)


def _nnx(kind: type, transform) -> type:
    from flax import nnx

    class Planned(kind):
        @functools.wraps(kind.__call__)
        def __call__(self, *args, **kwargs):
            definition, state = nnx.split(self)

            def pure(state, args, kwargs):
                module = nnx.merge(definition, state)
                return kind.__call__(module, *args, **kwargs), nnx.state(module)

            result, new = transform(pure)(state, args, kwargs)
            nnx.update(self, new)
            return result

    Planned.__name__ = Planned.__qualname__ = kind.__name__
    Planned.__module__, Planned.__doc__ = kind.__module__, kind.__doc__
    return Planned
